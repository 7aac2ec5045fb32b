"""Caches of DeepSeek-V4's attention: bytes, capacity under DCP, states, rows of shared keys byte by byte."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpmla import DCPConfig
from dcpmla.attention.layers.compressed.cache import CompressedCache, CompressedPlan, plan_compressed
from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, CompressedConfig, LayerKind
from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import read_rows, to_fp8_rows, write_rows
from dcpmla.indexer_config import IndexerConfig

CSA, HCA = LayerKind(4, True), LayerKind(128, False)
FLASH = CompressedConfig(
    hidden_size=4096,
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    rms_norm_eps=1e-6,
    indexer=IndexerConfig(num_heads=64, head_dim=128, topk=512, rope_interleaved=True),
    layer_kinds=(WINDOW_ONLY, WINDOW_ONLY, *[CSA, HCA] * 20, CSA),
)
CPU = torch.device("cpu")


def plan_of(
    config: CompressedConfig, size: int, seq_lens: list[int], num_states: int | None = None, **options: object
) -> CompressedPlan:
    layout = {"tensor_parallel_size": size, "decode_context_parallel_size": size, "block_size": 64, **options}
    return plan_compressed(config, DCPConfig(**layout), seq_lens, torch.bfloat16, num_states)  # type: ignore[arg-type]


def test_blocks_of_each_ratio() -> None:
    assert FLASH.ratios == (4, 128)
    plan = plan_of(FLASH, 1, [1])
    assert (plan.entries_per_block(4), plan.entries_per_block(128)) == (64, 2)


@given(
    size=st.sampled_from([1, 2, 3]),
    num_states=st.integers(1, 5),
    seq_lens=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    kv=st.sampled_from(["auto", "fp8_ds_mla"]),
    index=st.sampled_from(["auto", "fp8"]),
)
def test_a_plan_counts_what_is_allocated(size: int, num_states: int, seq_lens: list[int], kv: str, index: str) -> None:
    config = dataclasses.replace(FLASH, layer_kinds=(WINDOW_ONLY, CSA, HCA), head_dim=128)
    plan = plan_of(config, size, seq_lens, num_states, kv_cache_dtype=kv, index_cache_dtype=index)
    cache = CompressedCache(plan, CPU)
    assert sum(tensor.nbytes for tensor in cache.tensors) == plan.bytes_per_rank
    assert plan.num_blocks >= sum(-(-length // plan.block_tokens) for length in seq_lens)
    assert plan.num_blocks * plan.block_tokens == plan.tokens_total
    assert plan.bytes_total == size * plan.bytes_per_rank
    for kind, layer in zip(config.layer_kinds, cache, strict=True):
        rows = plan.window_rows(kind.ratio) + (
            plan.num_blocks * plan.entries_per_block(kind.ratio) if kind.ratio else 0
        )
        assert layer.latents.shape[0] * layer.latents.shape[1] >= rows
        assert len(layer.states) == (kind.ratio > 0) + kind.has_indexer
        assert (layer.index_keys is None) == (not kind.has_indexer)
        if kind.ratio:  # entries begin with a block of their own
            assert plan.window_rows(kind.ratio) % plan.entries_per_block(kind.ratio) == 0
            assert plan.window_rows(kind.ratio) >= num_states * plan.ring_rows
    assert f"{num_states} states" in str(plan)


def test_a_state_is_copied_alone() -> None:
    config = dataclasses.replace(FLASH, layer_kinds=(WINDOW_ONLY, CSA, HCA), head_dim=128)
    for kv in ("auto", "fp8_ds_mla"):
        cache = CompressedCache(plan_of(config, 1, [300], 4, kv_cache_dtype=kv), CPU)
        for tensor in cache.tensors:
            tensor.copy_(torch.randint(0, 100, tensor.shape))
        before = [tensor.clone() for tensor in cache.tensors]
        cache.copy_state(1, 3)
        changed = 0
        for now, old in zip(cache.tensors, before, strict=True):
            changed += (now != old).sum().item() * now.element_size()
        assert 0 < changed <= cache.sizes.bytes_per_state
        ring = cache.sizes.ring_rows
        for layer in cache:
            rows = layer.latents.flatten(0, 1) if kv == "auto" else layer.latents.flatten(1).repeat_interleave(64, 0)
            assert torch.equal(rows[3 * ring : 4 * ring], rows[ring : 2 * ring])
            for sums in layer.states:
                assert torch.equal(sums[1], sums[3])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: plan_of(FLASH, 1, []), "seq_lens is []"),
        (lambda: plan_of(FLASH, 1, [-1]), "seq_lens is [-1]"),
        (lambda: plan_of(FLASH, 1, [5], block_size=16), "a multiple of 32"),
        (lambda: plan_of(FLASH, 1, [5], cp_kv_cache_interleave_size=4), "a multiple of 128"),
        (lambda: plan_of(FLASH, 1, [5], kv_cache_dtype="fp8"), "kv_cache_dtype"),
        (lambda: rows_shape(5, 96, torch.uint8), "head_dim is 96"),
        (lambda: rows_shape(5, 64, torch.uint8), "head_dim is 64"),
        (lambda: rows_shape(5, 640, torch.uint8), "head_dim is 640"),
    ],
)
def test_errors(call: object, match: str) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        call()  # type: ignore[operator]


def test_bytes_of_a_page() -> None:
    """A page of 64 rows: 576 bytes of data each, then 8 of scales each; 37,440 bytes."""
    shape = rows_shape(100, 512, torch.uint8)
    assert shape == (2, 64, 37440 // 64)
    cache = torch.full(shape, 0xA5, dtype=torch.uint8)
    rows = torch.randn(2, 512) * torch.tensor([[1.0], [30.0]])
    rows[0, :64] = 0
    write_rows(cache, rows, torch.tensor([70, -1]))
    page = cache[1].flatten()
    codes, rope = page[6 * 576 :][:448], page[6 * 576 + 448 :][:128]
    scales = page[64 * 576 + 6 * 8 :][:8]
    assert torch.equal(rope.clone().view(torch.bfloat16), rows[0, 448:].bfloat16())
    assert scales[7] == 0
    values = codes.clone().view(torch.float8_e4m3fn).double()
    for tile in range(7):
        part, exact = slice(64 * tile, 64 * tile + 64), rows[0].bfloat16().double()
        amax = max(exact[part].abs().max().item(), 1e-4)
        scale = 2.0 ** (int(scales[tile]) - 127)
        assert amax / 448 <= scale < 2 * amax / 448
        torch.testing.assert_close(values[part] * scale, exact[part], atol=scale / 512, rtol=2**-4)
    assert int((cache != 0xA5).sum()) <= 584
    assert torch.equal(
        read_rows(cache, torch.tensor([70]), 512, torch.float32)[0, 448:], rows[0, 448:].bfloat16().float()
    )


def test_largest_values_take_the_least_scale_that_holds_them() -> None:
    for value, byte in ((448.0, 127), (449.0, 127), (450.0, 128), (224.0, 126), (0.0, 127 - 22), (1e-5, 127 - 22)):
        rows = torch.full((1, 128), value)
        codes, scales, _ = to_fp8_rows(rows)
        assert scales.tolist() == [[byte]]
        assert codes.float().abs().max() <= 448
