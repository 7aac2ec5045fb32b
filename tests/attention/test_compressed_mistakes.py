"""Mistakes in what DeepSeek-V4's layers take, and in their configs: each is named."""

import dataclasses
from typing import Any

import pytest
import torch

from dcpmla import Placement, StepMetadata
from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, LayerKind
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.attention.layers.compressed.step import compressed_traits
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.integrations.families.table import attention_of
from tests.attention.test_compressed_layer import HIDDEN, Layers, layout, tiny
from tests.support.ranks import on_ranks


@on_ranks(1)
def test_errors() -> None:
    layers = Layers(tiny(), layout(1, 1, 1), [40, 40])
    layer, cache, rows = layers.layers[1], layers.cache[1], torch.zeros(2, HIDDEN)
    step = layers.step([0, 1], [1, 1], [5, 9])

    def build(num_decodes: int | None = None, **changes: Any) -> StepMetadata:
        requests = StepRequests([1], [1], [[0]], [0])._replace(**changes)
        steps = StepBuilder(layers.plan.dcp, 0, "cpu", compressed_traits(layers.plan))
        return steps.build(requests, num_decodes=num_decodes)

    other_rows = cache._replace(latents=cache.latents[1:])
    other_dtype = cache._replace(latents=cache.latents.double())
    other_keys = cache._replace(index_keys=None)
    many_blocks = dataclasses.replace(step, num_blocks=layers.plan.num_blocks + 1)
    for match, call in (
        ("hidden_states has shape", lambda: layer(rows[:1], cache, step)),
        ("hidden_states has shape", lambda: layer(rows[:, 1:], cache, step)),
        ("expected a LayerCache", lambda: layer(rows, cache.latents, step)),
        ("cache.latents has shape", lambda: layer(rows, other_rows, step)),
        ("cache.latents has shape", lambda: layer(rows, other_dtype, step)),
        ("index_cache", lambda: layer(rows, other_keys, step)),
        ("call with_angles", lambda: layer(rows, cache, dataclasses.replace(step, shared={}))),
        ("the cache has", lambda: layer(rows, cache, many_blocks)),
        ("states is", lambda: build(states=[])),
        ("states is", lambda: build(states=[3])),
        ("states is", lambda: build(states=[-1])),
        ("states is", lambda: build(query_lens=[1, 1], seq_lens=[1, 1], block_tables=[[0], [1]], states=[1, 1])),
        ("block_tables", lambda: build(seq_lens=[1000])),
        (r"of \[2\] new tokens decodes have at most 1", lambda: build(1, query_lens=[2], seq_lens=[2])),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    config, exchange = layers.config, layer.exchange
    for match, dcp in (
        ("the mesh has", layout(2, 1, 1)),
        ("kv_cache_dtype", layout(1, 1, 1, kv_cache_dtype="fp8")),
        ("block_size", layout(1, 1, 1, block_size=3)),
        ("dcp_project_before_merge", layout(1, 1, 1, dcp_project_before_merge=True)),
    ):
        with pytest.raises(ValueError, match=match):
            CompressedAttention(config, LayerKind(4, True), Placement(dcp, layers.mesh, exchange, torch.float32, "cpu"))
    weights = layers.modules[0].state_dict()
    for broken, match in (
        ({name: value for name, value in weights.items() if name != "sinks"}, "sinks"),
        ({**weights, "kv_norm.weight": torch.zeros(3)}, "kv_norm"),
    ):
        with pytest.raises(ValueError, match=match):
            layers.layers[0].load_weights(broken)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"head_dim": 17}, "head_dim is 17"),
        ({"rope_dim": 7}, "rope_dim is 7"),
        ({"rope_dim": 18}, "rope_dim is 18"),
        ({"o_groups": 5}, "o_groups is 5"),
        ({"layer_kinds": ()}, "layer_kinds"),
        ({"layer_kinds": (LayerKind(0, True),)}, "layer_kinds"),
        ({"layer_kinds": (LayerKind(1, False), WINDOW_ONLY)}, "layer_kinds"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"indexer": None}, "indexer"),
        ({"head_dim": 1.5}, "head_dim"),
    ],
)
def test_a_config_says_what_is_wrong(changes: dict[str, Any], match: str) -> None:
    config = attention_of(tiny()).config
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(config, **changes)


def test_groups_of_heads_divide_over_the_ranks() -> None:
    config = attention_of(tiny(o_groups=4)).config
    assert [config.heads_per_rank(tp) for tp in (1, 2, 4)] == [24, 12, 6]
    for tp in (0, 3, 8):
        with pytest.raises(ValueError, match="choose 1, 2 or 4"):
            config.heads_per_rank(tp)
