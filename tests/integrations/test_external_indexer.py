"""Sparse MLA over an engine's own projections, indexer and buffer of selected positions."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla import DCPConfig, ExternalAttention, MLAAttention, MLAModules, Placement, init_mesh
from dcpmla.attention.select.step import SparseMetadata, with_selection
from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import LayerCache
from dcpmla.integrations.external.indexer import IndexerModules, rotated_first
from dcpmla.integrations.external.selection import with_selected
from tests.attention.test_layer import layout
from tests.attention.test_small_kernels import cut
from tests.attention.test_sparse_layer import BATCH, TOPK, new_layer, run_layers
from tests.integrations import test_external_latent
from tests.support.models import random_model, tiny_config
from tests.support.ranks import run_ranks
from tests.support.steps import part

NUM_TOKENS = sum(new for _, new in BATCH)


def modules_of(layer: MLAAttention, changes: dict[str, Any] | None = None) -> MLAModules:
    """Return a layer's projections as an engine would hand them over, with float32 weights of the indexer's heads."""
    modules, indexer = test_external_latent.modules_of(layer), layer.indexer
    if indexer is None:
        return modules

    def down_proj(x: Tensor) -> tuple[Tensor, ...]:
        keys, weights = indexer.fused_wk_weights_proj(x).split([indexer.config.head_dim, indexer.config.num_heads], -1)
        return cut(keys), weights.float().contiguous()

    fields: dict[str, Any] = {
        "q_proj": lambda x: F.linear(x, indexer.wq_b.weight),
        "down_proj": down_proj,
        "k_norm": (indexer.k_norm.weight, indexer.k_norm.bias),
    }
    return dataclasses.replace(modules, indexer=IndexerModules(**{**fields, **(changes or {})}))


def external(layer: MLAAttention, modules: MLAModules, dtype: torch.dtype = torch.float32) -> MLAAttention:
    placement = Placement(layer.dcp, layer.mesh, layer.exchange, dtype, "cpu")
    return ExternalAttention(layer.config, placement, modules, layer.indexer is None)


class Reader:
    """A layer that gets the selection from an engine's buffer alone."""

    def __init__(self, layer: MLAAttention, buffer: Tensor) -> None:
        self.layer, self.buffer = layer, buffer
        self.indexer, self.config, self.mesh = layer.indexer, layer.config, layer.mesh

    def __call__(self, hidden_states: Tensor, cache: LayerCache, step: StepMetadata) -> Tensor:
        bare = step.sharing(dataclasses.replace(part(step, SparseMetadata), selection=None))
        return self.layer(  # type: ignore[no-any-return]
            hidden_states, cache, with_selected(bare, self.buffer, self.layer.dcp, self.mesh.dcp_rank)
        )


def compare(hf_config: Any, layouts: list[DCPConfig]) -> None:
    """On each rank: compare layers with layers over their projections, whose selection is in an engine's buffer."""
    model = random_model(hf_config).model
    for dcp in layouts:
        mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
        loaded = [new_layer(hf_config, dcp, mesh, model.layers[i].self_attn.state_dict(), i > 0) for i in range(2)]
        buffer = torch.empty(NUM_TOKENS + sum(cached for cached, _ in BATCH), TOPK, dtype=torch.int32)
        layers = [external(layer, modules_of(layer)) for layer in loaded]
        for layer in layers:
            layer.load_weights({})  # the caches' formats have no scales
        for num_decodes in (None, len(BATCH)):
            with torch.no_grad():
                loaded_outputs, selection = run_layers(loaded, hf_config, dcp, 0, num_decodes)
                outputs, written = run_layers(layers, hf_config, dcp, 0, num_decodes, buffer)
                readers: list[Any] = [layers[0], Reader(layers[1], buffer)]
                read, _ = run_layers(readers, hf_config, dcp, 0, num_decodes, buffer)
            assert written.positions.data_ptr() == buffer.data_ptr()
            assert torch.equal(buffer[:NUM_TOKENS], selection.positions)
            for out, out_of_reader, expected in zip(outputs, read, loaded_outputs, strict=True):
                assert expected.any()
                assert torch.equal(out, expected)
                assert torch.equal(out_of_reader, expected)


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("deepseek_v32", [layout(1, 1)]),
        ("glm_moe_dsa", [layout(2, 2, 2), dataclasses.replace(layout(2, 2), index_cache_dtype="fp8")]),
        ("glm_moe_dsa", [dataclasses.replace(layout(2, 2), index_hadamard=True, dcp_q_replicate=True)]),
    ],
    ids=["V3.2", "GLM-5", "replicated"],
)
def test_an_engine_s_indexer(family: str, layouts: list[DCPConfig]) -> None:
    """GLM-5's indexer rotates pairs of neighbours, V3.2's halves."""
    run_ranks(layouts[0].tensor_parallel_size, compare, tiny_config(family), layouts)


def select_with_rotated_columns_last(hf_config: Any) -> list[Tensor]:
    """On one rank: positions selected by a layer, and by an engine whose weights have the rotated columns last."""
    dcp, mesh = layout(1, 1), init_mesh(1, 1)
    layer = new_layer(hf_config, dcp, mesh, random_model(hf_config).model.layers[0].self_attn.state_dict())
    indexer = layer.indexer
    assert indexer is not None
    config, rope = indexer.config, layer.config.rope_dim
    last = torch.arange(config.head_dim).roll(-rope)
    assert torch.equal(rotated_first(last, config.head_dim, rope), torch.arange(config.head_dim))
    w_q = indexer.wq_b.weight.unflatten(0, (-1, config.head_dim))[:, last].flatten(0, 1)
    w_k, w_heads = indexer.fused_wk_weights_proj.weight.split([config.head_dim, config.num_heads])
    w_k = rotated_first(w_k[last].t(), config.head_dim, rope).t()  # loaded in the kernels' order
    changes = {
        "q_proj": lambda x: rotated_first(F.linear(x, w_q), config.head_dim, rope),
        "down_proj": lambda x: (F.linear(x, w_k), F.linear(x, w_heads)),
    }
    positions = []
    for each in (layer, external(layer, modules_of(layer, changes))):
        with torch.no_grad():
            positions.append(run_layers([each], hf_config, dcp, 0, None)[1].positions.sort(1).values)
    return positions


def test_rotated_columns_last() -> None:
    ((positions, expected),) = run_ranks(1, select_with_rotated_columns_last, tiny_config("deepseek_v32"))
    assert torch.equal(positions, expected)


def check_refusals(hf_config: Any) -> None:
    dcp, mesh = layout(1, 1), init_mesh(1, 1)
    layer = new_layer(hf_config, dcp, mesh, random_model(hf_config).model.layers[0].self_attn.state_dict())
    modules, config = modules_of(layer), layer.config
    assert modules.indexer is not None
    assert config.indexer is not None
    short = dataclasses.replace(modules.indexer, k_norm=(modules.kv_a_layernorm[:8], modules.kv_a_layernorm))
    with pytest.raises(ValueError, match=r"indexer.k_norm has shapes \[\(8,\), \(16,\)\]; .* \[\(16,\), \(16,\)\]"):
        external(layer, dataclasses.replace(modules, indexer=short))
    for changes, match in (
        ({"indexer": None}, "modules have an indexer, but config.indexer is None"),
        ({"indexer": dataclasses.replace(config.indexer, norms_hidden=True)}, "config sets indexer.norms_hidden"),
        ({"indexer": dataclasses.replace(config.indexer, pool_size=2)}, "config sets indexer.pool_size"),
        ({"has_query_factors": True}, "config sets has_query_factors"),
    ):
        with pytest.raises(ValueError, match=match):
            modules.indexer.check(dataclasses.replace(config, **changes))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights have 'indexer.wk.weight', but the layer's modules hold its indexer"):
        external(layer, modules).load_weights({"indexer.wk.weight": torch.zeros(1)})
    step = StepBuilder(dcp, 0).build(StepRequests([30], [30], [list(range(8))])).with_cos_sin(torch.zeros(30, 8))
    cache = LayerCache(torch.zeros(8, 4, 24), torch.zeros(8, 4, 16))
    wrong = external(layer, modules_of(layer, {"down_proj": lambda x: (x, x)}))
    with pytest.raises(
        ValueError, match=r"down_proj returns .* expected \[\(30, 16\), \(30, 32\)\], columns of stride 1"
    ):
        wrong(torch.zeros(30, 48), cache, with_selection(step, TOPK))
    buffer = torch.empty(40, TOPK, dtype=torch.int32)
    for other in (buffer[:29], buffer.long(), buffer[:, 1:], torch.empty(40, 48, dtype=torch.int32)[:, ::2]):
        with pytest.raises(ValueError, match="positions is .*; expected .*, contiguous"):
            with_selection(step, TOPK, other)
    with pytest.raises(ValueError, match="positions is .*; expected .*, contiguous"):
        with_selected(step, buffer[:29], dcp, 0)
    short = with_selected(step, torch.empty(40, 30, dtype=torch.int32), dcp, 0)
    assert part(short, SparseMetadata).selection is None  # no token has more than 30 before it
    check_rows(step, dcp)


def check_rows(step: StepMetadata, dcp: DCPConfig) -> None:
    """Give a step of 30 tokens selections of 8 of them, right ones and wrong ones."""
    right = torch.full((30, 8), -1, dtype=torch.int32)
    for row in range(30):
        num = min(row + 1, 8)
        right[row, :num] = torch.randperm(row + 1)[:num]
    right[20, 5:] = -1  # an engine may select fewer
    selection = part(with_selected(step, right, dcp, 0), SparseMetadata).selection
    assert selection is not None
    assert torch.equal(selection.positions, right)
    for row, wrong in (
        (20, [1, 2, 3, -1, 5, 6, 7, 8]),
        (20, [1, 2, 3, 4, 5, 6, 7, 7]),
        (20, [1, 2, 3, 4, 5, 6, 7, 21]),
        (20, [1, 2, 3, 4, 5, 6, -2, -1]),
        (20, [-1] * 8),
        (5, [0, 1, 2, 3, 4, -1, -1, -1]),
        (5, [0, 1, 2, 3, 4, 5, 6, -1]),
    ):
        broken = right.clone()
        broken[row] = torch.tensor(wrong)
        amount = "some of [0, 21)" if row == 20 else "all of [0, 6)"
        match = re.escape(f"positions[{row}] is {wrong}; a token after {row} others lists {amount}, each once, then -1")
        with pytest.raises(ValueError, match=match):
            with_selected(step, broken, dcp, 0)


def test_mistakes_are_named() -> None:
    run_ranks(1, check_refusals, tiny_config("deepseek_v32"))
