"""Plans of DeepSeek-V4.1, whose layers share entries: sizes of caches, reads of a step, weights."""

from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch

from dcpmla.attention.layers.compressed.cache import CompressedPlan
from dcpmla.config import DCPConfig
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.weights import ModelSize
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.deepseek_v41_files import save_v41
from tests.support.plan_cases import deployed, read_published


@pytest.fixture(scope="module")
def flash() -> ModelSize:
    """DeepSeek-V4.1-Flash as it is published."""
    return read_published("deepseek_v41_flash")


def test_parameters_are_as_published(flash: ModelSize) -> None:
    sizes = [p.count * prod(p.shape) for p in flash.parameters if ".engram." not in p.name]
    assert round(sum(sizes) / 1e9) == 552


def test_tables_are_cut_and_not_read(flash: ModelSize) -> None:
    """A rank of eight has 25 GB of both tables, of which a step reads a few rows."""
    assert round(flash.weight_bytes(8)["embedding"] / 1e9) == round((768_022_850 * 264 / 8 + 2 * 129280 * 5120) / 1e9)


def test_bytes_of_a_token_and_of_a_state_by_hand(flash: ModelSize) -> None:
    """Three caches of entries of two tokens, one of one; windows of 40 layers; an id of each token on each rank."""
    plan = make_plan(deployed(flash, 8, 8, "fp8_ds_mla", index_cache_dtype="fp8"), 1, 4096)
    assert plan.kv_bytes_per_token == -(-(3 / 2 + 1) * (585 + 132) // 1) + 8 * 4
    assert plan.bytes_per_state == 40 * 128 * 585 + 4 * 4 * 3 * 512
    plain = make_plan(deployed(flash, 8, 1), 1, 4096)
    assert plain.kv_bytes_per_token == (3 / 2 + 1) * 2 * (512 + 128) + 4


def test_a_step_reads_windows_and_selected_entries(flash: ModelSize) -> None:
    """By two layers with windows alone; indexers and readers of entries of two tokens; the source of candidate blocks,
    readers and later indexers of entries of one.
    """
    reads = [layer.reads(1 << 20) for layer in flash.attention.layers]
    counts = Counter((each.num_rows, each.num_keys) for each in reads)
    assert counts == {(128, 0): 2, (640, 1 << 19): 3, (640, 0): 30, (640, 1 << 20): 5}


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_bytes_are_what_the_cache_allocates(dcp_size: int, tmp_path: Path) -> None:
    save_v41(tmp_path)
    attention = read_model(load_config(tmp_path)).attention
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=dcp_size, block_size=8)
    plan = attention.plan_cache(dcp, [200], torch.float32, num_states=64)
    assert isinstance(plan, CompressedPlan)
    cache = plan.allocate(torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache.tensors) == plan.bytes_per_rank
    assert cache[2].latents is cache[1].latents
    assert cache[5].index_keys is cache[3].index_keys
    assert plan.bytes_per_block == (8 // 2 + 8) * (16 + 16) * 4


def test_weights_that_ranks_hold(tmp_path: Path) -> None:
    save_v41(tmp_path)
    check_bytes([tmp_path], 2)
