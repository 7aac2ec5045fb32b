"""Sizes of models whose layers are of several kinds: parameters as published, bytes of weights and caches, reads."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla.attention.layers.windowed.spec import WindowSpec
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.planning.deployment import attention_us
from dcpmla.planning.exchange import ExchangeCosts
from dcpmla.planning.machine import H200X8
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.layouts import dcp_config
from tests.support.models import random_model, tiny_config
from tests.support.plan_cases import CONFIGS, deployed, read_published

# Of earlier releases files have fewer float32 weights, and some families are missing.
pytestmark = pytest.mark.skipif(not hasattr(transformers, "HYV4VLTextConfig"), reason="needs transformers 5.24")


@pytest.mark.parametrize(
    ("name", "num_billions", "num_index_layers"),
    [
        ("axk2_light", 20.3, 48),
        ("hy_v4", 58.3, 10),
        ("hy_v4_vl", 769.9, 21),
        ("glm5_next", 313.3, 11),
        ("dots3_note", 279.6, 13),
    ],
)
def test_published_sizes(name: str, num_billions: float, num_index_layers: int) -> None:
    """Most sizes are defaults of transformers' configs."""
    size = read_published(name)
    assert round(sum(p.count * prod(p.shape) for p in size.parameters) / 1e9, 1) == num_billions
    assert size.attention.num_index_layers == num_index_layers


@pytest.mark.parametrize(
    ("name", "row", "state", "num_billions"),
    [("glm5_next", 2 * (576 + 128 // 16), 4 * 3 * 128, 7.4), ("dots3_note", 2 * 1088, 0, 1.1)],
)
def test_published_sizes_with_a_module(name: str, row: int, state: int, num_billions: float) -> None:
    """A row more for each token, GLM-5-Next's sums of a pool, and the weights of a layer and an embedding."""
    sizes = [read_published(name), read_model(load_config(CONFIGS / f"{name}.json"), True)]
    plans = [size.attention.plan_cache(DCPConfig(), [4096], torch.bfloat16) for size in sizes]
    assert plans[1].bytes_per_token - plans[0].bytes_per_token == row
    assert plans[1].bytes_per_state - plans[0].bytes_per_state == state
    assert round((sizes[1].num_parameters - sizes[0].num_parameters) / 1e9, 1) == num_billions


def test_bytes_in_bfloat16(tmp_path: Path) -> None:
    directories = [tmp_path / family for family in ("hy_v4", "glm5_next_text")]
    for directory in directories:
        config = tiny_config(directory.name)
        config.dtype = torch.bfloat16
        random_model(config).bfloat16().save_pretrained(directory)
    check_bytes(directories, 2)


def test_caches_of_glm5_next() -> None:
    """Three tiny layers of MLA, two of them with an indexer; 11 published ones that read 2,048 keys, and the newest."""
    plan = attention_of(tiny_config("glm5_next_text")).plan_cache(
        DCPConfig(block_size=16), [64], torch.float32, num_states=3, num_drafts=2
    )
    assert plan.bytes_per_block == 16 * 3 * (16 + 64) * 4 + 4 * 2 * 16 * 4
    tensors = plan.allocate(torch.device("cpu")).tensors
    assert sum(tensor.nbytes for tensor in tensors) == plan.bytes_per_rank
    kind = read_published("glm5_next").attention
    assert [number for number, layer in enumerate(kind.layers) if layer.has_indexer] == [*range(3, 45, 4)]
    plan = kind.plan_cache(dcp_config(8, 8), [4096], torch.bfloat16)
    assert plan.bytes_per_token == 11 * (576 * 2 + 256 // 16)
    reads = {(layer.reads(32768).num_rows, layer.reads(32768).num_keys): n for layer, n in kind.sorts.items()}
    assert reads == {(2063, 2048): 11, (0, 0): 34}
    with pytest.raises(ValueError, match=r"block_size \(--block-size\) is 64; it must be a multiple of 128"):
        kind.check_layout(DCPConfig(cp_kv_cache_interleave_size=8, block_size=64))


def test_caches_of_dots3() -> None:
    """Rows have the width of their layer; layers with a window read the window whatever the context. 13 published
    layers have an index key and a latent of 512, 33 a latent of 1,024; each head has a gate.
    """
    kind = attention_of(tiny_config("dots3_note_text"))
    plan: Any = kind.plan_cache(DCPConfig(block_size=16), [100], torch.float32)
    assert [layer.row_width for layer in plan.layers] == [24, 40, 40, 24]
    tensors = plan.allocate(torch.device("cpu")).tensors
    assert sum(tensor.nbytes for tensor in tensors) == plan.bytes_per_rank
    for context in (5, 100, 10**6):
        windows = [layer.reads(context).num_rows for layer in kind.layers if isinstance(layer, WindowSpec)]
        assert windows == [min(context, 12)] * 2
    size = read_published("dots3_note")
    assert sum(isinstance(layer, WindowSpec) for layer in size.attention.layers) == 33
    plan = size.attention.plan_cache(DCPConfig(), [4096], torch.bfloat16)
    assert plan.bytes_per_token == 13 * 2 * (576 + 128) + 33 * 2 * 1088
    gates = [(p.count, p.shape) for p in size.parameters if p.name.endswith("g_proj.weight")]
    assert sorted(gates) == [(13, (128, 5120)), (33, (64, 5120))]


def test_the_times_of_both_kinds_of_layers_of_dots3() -> None:
    """A GPU of 8 multiplies by 128 and 64 heads of the DCP group, and reads rows of 1,152 and 2,176 bytes."""
    model = read_published("dots3_note")
    reads = {isinstance(layer, WindowSpec): layer.reads(100_000) for layer in model.attention.sorts}
    parts = deployed(model, 8, 8).attention_us(32, 100_000)
    selected_us = attention_us(H200X8, reads[False], 1152, 128, 32, 8)
    window_us = attention_us(H200X8, reads[True], 2176, 64, 32, 8)
    assert parts["attention"] == pytest.approx(13 * selected_us + 33 * window_us)
    exchange = ExchangeCosts(H200X8, 8, backend="auto")
    combine_us = [exchange.time_us("combine", 32, *widths) for widths in ((128, 512), (64, 1024))]
    assert parts["combine"] == pytest.approx(13 * combine_us[0] + 33 * combine_us[1])
