"""Blocks against a set of what is out, plans against what is allocated, rows against what was written."""

import mmap
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla import DCPConfig, LatentCache, MLAConfig
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.mla.prefill import read_cache_rows
from dcpmla.attention.stack import Stack
from dcpmla.cache.formats import write_latents
from dcpmla.cache.latent import num_blocks
from dcpmla.cache.layers import LayerCache
from dcpmla.integrations.families.table import attention_of
from dcpmla.planning.capacity import capacity_table
from tests.support.layouts import dcp_config
from tests.support.models import tiny_config
from tests.test_ownership import deal_slots


def make_dcp(size: int = 1, interleave: int = 1, block_size: int = 4) -> DCPConfig:
    return dcp_config(size, size, interleave, block_size=block_size)


@pytest.fixture(scope="module")
def config() -> MLAConfig:
    return attention_of(tiny_config("deepseek_v3")).config


# kv_cache_dtype, what the model computes in; what its cache holds: dtype, elements and bytes of a row of 128 + 8
# values.
FORMATS = [
    ("auto", torch.float32, torch.float32, 136, 544),
    ("auto", torch.bfloat16, torch.bfloat16, 136, 272),
    ("bf16", torch.bfloat16, torch.bfloat16, 136, 272),
    ("fp8", torch.float32, torch.float8_e4m3fn, 136, 136),
    ("fp8_ds_mla", torch.bfloat16, torch.uint8, 148, 148),
]


@pytest.mark.parametrize(("kv_cache_dtype", "dtype", "storage", "width", "row_bytes"), FORMATS)
@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 4), (3, 2), (8, 1)])
def test_plan_is_what_is_allocated(
    config: MLAConfig,
    size: int,
    interleave: int,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    storage: torch.dtype,
    width: int,
    row_bytes: int,
) -> None:
    seq_lens = [1, 7, 8, 9, 100]
    dcp = replace(make_dcp(size, interleave), kv_cache_dtype=kv_cache_dtype)
    plan = LatentCache.plan(replace(config, kv_lora_rank=128), dcp, 3, seq_lens, dtype)
    cache = LatentCache(plan, torch.device("cpu"))
    layers = [layer.latents for layer in cache]
    assert list(cache) == [LayerCache(latents, loads=[], starts=[]) for latents in layers]
    assert sum(layer.nbytes for layer in layers) == plan.bytes_per_rank
    assert size * plan.bytes_per_rank == plan.bytes_total
    assert len({layer.data_ptr() for layer in layers}) == 3
    assert {layer.dtype for layer in layers} == {storage}
    assert {tuple(layer.shape) for layer in layers} == {(plan.num_blocks, 4, width)}
    assert plan.bytes_per_token == 3 * row_bytes
    assert plan.tokens_per_gb == 10**9 // (3 * row_bytes) * size
    assert plan.tokens_per_rank == layers[0].flatten(0, 1).shape[0]
    assert plan.tokens_total == size * plan.tokens_per_rank
    assert plan.num_blocks == sum(
        len(range(0, seq_len, 4 * size)) for seq_len in seq_lens
    )  # every sequence opens its own blocks


@pytest.mark.parametrize("family", ["deepseek_v32", "glm5_next_text", "deepseek_v4"])
def test_a_cache_takes_pages_of_the_host_as_it_is_written(family: str) -> None:
    """An engine on CPUs plans its cache for all free memory, and so may other ranks."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    plan = attention_of(tiny_config(family)).plan_cache(make_dcp(block_size=64), [2**22], torch.float32, num_states=64)
    before = resident()
    cache = plan.allocate(torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache.tensors) == plan.bytes_per_rank > 2**28
    assert resident() - before < plan.bytes_per_rank / 8
    assert not any(tensor.flatten()[:1000].float().any() for tensor in cache.tensors)


def test_formats_that_the_model_lacks_have_no_capacity(config: MLAConfig) -> None:
    """A latent of 16 does not split into fp8_ds_mla's groups."""
    plans = capacity_table(Stack(config, (LatentSpec(config),) * 2), 10**6, 4, (1, 4))
    assert [plan.dtype for plan in plans] == 2 * [torch.bfloat16] + 2 * [torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("num_layers", "seq_lens", "kv_cache_dtype", "message"),
    [
        (1, [], "auto", "seq_lens is .*must be a list of lengths that are not negative"),
        (1, [5, -1], "auto", "seq_lens is .*must be a list of lengths that are not negative"),
        (0, [1], "auto", "num_layers is 0; it must be at least 1$"),
        (-1, [1], "auto", "num_layers is -1; it must be at least 1$"),
        (1, [1], "bf16", r"kv_cache_dtype \(--kv-cache-dtype\) is 'bf16', but the model computes in torch.float32"),
        (1, [1], "fp8_ds_mla", ".*fp8_ds_mla scales 128 values of kv_c at a time; kv_lora_rank is 16"),
    ],
)
def test_plans_that_cannot_be(
    config: MLAConfig, num_layers: int, seq_lens: list[int], kv_cache_dtype: str, message: str
) -> None:
    dcp = replace(make_dcp(), kv_cache_dtype=kv_cache_dtype)
    with pytest.raises(ValueError, match=f"^{message}"):
        LatentCache.plan(config, dcp, num_layers, seq_lens, torch.float32)


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 4), (3, 2), (5, 1)])
def test_blocks_of_a_sequence_are_enough_and_none_too_many(size: int, interleave: int) -> None:
    dcp = make_dcp(size, interleave)
    for seq_len in range(0, 4 * 4 * size):
        count = num_blocks(seq_len, dcp)
        deal_slots(seq_len, list(range(count)), 4, size, interleave)  # fails where a rank's blocks run out
        if count:
            with pytest.raises(StopIteration):
                deal_slots(seq_len, list(range(count - 1)), 4, size, interleave)


def test_plan_speaks_in_numbers(config: MLAConfig) -> None:
    """2 layers x 1024 tokens x (16 + 8) elements of 2 bytes = 96 KiB a rank."""
    text = str(LatentCache.plan(config, make_dcp(4, block_size=64), 2, [4096], torch.bfloat16))
    for number in (
        "4,096 tokens",
        "16 blocks of 64",
        "4 DCP ranks",
        "1,024 tokens",
        "0.1 MiB a rank",
        "0.4 MiB in total",
    ):
        assert number in text


def test_sequences_without_tokens_still_give_a_cache(config: MLAConfig) -> None:
    plan = LatentCache.plan(config, make_dcp(2), 1, [0, 0], torch.float32)
    assert LatentCache(plan, torch.device("cpu"))[0].latents.shape[0] >= 1


def test_a_plan_that_cannot_fit_is_refused_before_it_is_allocated(
    config: MLAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr("dcpmla.cache.layers.zeros", refuse)
    plan = LatentCache.plan(config, make_dcp(2), 1, [2**40], torch.float32)
    with pytest.raises(ValueError, match=r"do not fit into the [\d,]+ bytes free on cpu") as error:
        LatentCache(plan, torch.device("cpu"))
    assert f"{plan.bytes_per_rank:,} bytes" in str(error.value)
    assert all(option in str(error.value) for option in ("--max-model-len", "--max-new-tokens", "-dcp"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_as_written_and_no_others_change(dtype: torch.dtype) -> None:
    """In a cache that is a slice of a larger one. Rows replace others; no rows change nothing."""
    whole = torch.full((6, 2, 4, 10), torch.nan, dtype=dtype)
    kv_cache, kv_c, k_pe = whole[:, 1], torch.randn(7, 8), torch.randn(7, 2)
    slots = torch.tensor(random.Random(1).sample(range(24), 7))
    write_latents(kv_cache, kv_c[:3] + 1, k_pe[:3], slots[:3])
    write_latents(kv_cache, kv_c, k_pe, slots)
    write_latents(kv_cache, kv_c[:0], k_pe[:0], slots[:0])
    expected = torch.cat([kv_c, k_pe], -1).to(dtype)
    assert torch.equal(read_cache_rows(kv_cache, slots), expected)
    order = torch.tensor([3, 3, 0])
    assert torch.equal(read_cache_rows(kv_cache, slots[order]), expected[order])
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(kv_cache[slot // 4, slot % 4], expected[token])
    untouched = torch.ones(24, dtype=torch.bool).index_fill(0, slots, False)
    assert kv_cache.flatten(0, 1)[untouched].isnan().all()
    assert whole[:, 0].isnan().all()
    assert read_cache_rows(kv_cache, slots[:0]).shape == (0, 10)
