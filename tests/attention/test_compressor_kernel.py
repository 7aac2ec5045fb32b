"""The compressor: the Triton kernel against the torch code.

The kernel runs on a GPU, in Triton's interpreter without one, and is compiled for Hopper.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from dcpmla import DCPConfig
from dcpmla.attention.layers.compressed.cache import plan_compressed
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.select import compressor
from dcpmla.attention.select.entries import EntryLayout, Pooling, PoolUpdate
from dcpmla.attention.select.kernels import compressor as kernels
from dcpmla.cache.shared_format import ROPE_DIM
from tests.attention.test_compressed_kernels import DTYPES, POISON, TYPES, assert_near
from tests.support.compressor_steps import build, config_of, tables_of
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import cut, on, on_both, randn, run_kernels

# New tokens of each request, step by step: prefills of one span and of many, in the middle of spans and at their ends,
# decodes. No request has the last state.
STEPS = (
    (5, 0, 1),
    (3, 1, 1),
    (1, 1, 1),
    (1, 26, 2),
    (1, 1, 1),
    (2, 3, 17),
    (1, 0, 1),
    (23, 4, 1),
    (1, 1, 1),
    (1, 1, 1),
)
Steps = tuple[tuple[int, ...], ...]


KINDS = (  # A kind of layer, whether it has index keys, and whether its cache is quantized where the format allows it.
    (LayerKind(4, True), False, True),
    (LayerKind(4, True), True, True),
    (LayerKind(4, True), True, False),
    (LayerKind(6, False), False, False),
    (LayerKind(2, True), False, True),  # Neither this nor the next one overlaps.
    (LayerKind(1, True), False, False),
)
Case = tuple[tuple[LayerKind, bool, bool], torch.dtype]


def compare_kinds(device: str, width: int, rope: int, cases: Iterable[Case], steps: Steps = STEPS) -> None:
    """Check entries and sums after every step, of rows and of index keys, in every format; poison stays elsewhere."""
    layouts = ((1, 0, 1), (3, 1, 1), (2, 0, 2))
    for number, ((kind, is_index, can_be_quantized), dtype) in enumerate(cases, start=width // 8):
        is_quantized = can_be_quantized and (is_index or rope == ROPE_DIM)
        size, rank, interleave = layouts[number % len(layouts)]
        layout = {"tensor_parallel_size": size, "decode_context_parallel_size": size}
        formats = {
            "index_cache_dtype": "fp8" if is_index and is_quantized else "auto",
            "kv_cache_dtype": "fp8_ds_mla" if is_quantized and not is_index else "auto",
        }
        sizes = {"cp_kv_cache_interleave_size": interleave, "block_size": (2 if kind.has_indexer else 1) * interleave}
        dcp = DCPConfig(**layout, **sizes, **formats)  # type: ignore[arg-type]
        check_steps(device, config_of(kind, width, rope, kind.ratio < 4), dcp, rank, is_index, dtype, steps)


def check_steps(
    device: str,
    config: CompressedConfig,
    dcp: DCPConfig,
    rank: int,
    is_index: bool,
    dtype: torch.dtype,
    steps: Steps,
    pairs_dtype: torch.dtype | None = None,
) -> None:

    moved_sums = moved_cache = None
    for call, part in compressor_cases(config, dcp, rank, is_index, dtype, steps, pairs_dtype):
        moved, moved_part = on(device, [call, part])
        if moved_sums is None:
            moved_sums, moved_cache = moved.sums, moved.cache
        kernels.compress_(moved._replace(sums=moved_sums, cache=moved_cache), moved_part)
        compressor.compress_(call, part)
        sums, cache = call.sums, call.cache
        if not is_index:
            assert torch.equal(moved.slots.cpu(), call.slots)
            assert_near(moved.latents, call.latents)
        torch.testing.assert_close(moved_sums.cpu(), sums, atol=1e-5, rtol=1e-5, equal_nan=True)
        if cache.dtype == torch.uint8:  # a code turns where a rounding before it does
            assert (moved_cache.cpu() != cache).double().mean() < 0.01
        else:
            assert_near(moved_cache, cache)
        moved_sums.copy_(sums)
        moved_cache.copy_(cache)
    assert (cache.flatten(1).view(torch.uint8) != POISON).any()


def compressor_cases(
    config: CompressedConfig,
    dcp: DCPConfig,
    rank: int,
    is_index: bool,
    dtype: torch.dtype = torch.float32,
    steps: Steps = STEPS,
    pairs_dtype: torch.dtype | None = None,
) -> Iterator[tuple[Pooling, PoolUpdate]]:
    """Yield arguments of `compress_`, step by step, over the same sums and the same cache. An engine's pairs may have
    another dtype than its model.
    """
    pairs_dtype = pairs_dtype or dtype
    kind, width, rope = config.layer_kinds[0], config.head_dim, config.rope_dim
    totals = [sum(new) for new in zip(*steps, strict=True)]
    plan = plan_compressed(config, dcp, totals, dtype, 4, num_drafts=2 * (rank % 2))
    shape = plan.index_shape(kind.ratio) if is_index else plan.rows_shape(kind.ratio)
    cache = torch.empty(shape, dtype=plan.index_dtype if is_index else plan.dtype)
    sums = torch.full((plan.num_states * plan.num_copies, *plan.sums(kind, width).shape[1:]), torch.nan)
    cache.view(torch.uint8).fill_(POISON)
    tables = tables_of(plan, totals)
    halves, num_columns = config.num_halves(kind), 2 if kind.ratio > 1 else 1
    bias, norm = randn(kind.ratio, halves * width, seed=1), 0.5 + randn(width, seed=2).abs()
    done = [0] * len(totals)
    for number, new in enumerate(steps):
        step, parts = build(plan, rank, new, done, tables)
        done = [a + b for a, b in zip(done, new, strict=True)]
        num_tokens = len(step.positions)
        pairs = cut(randn(num_tokens, num_columns * halves * width, dtype=pairs_dtype, seed=number))
        cos_sin = torch.rand(num_tokens, rope, generator=torch.Generator().manual_seed(number))
        table = step.block_table if is_index else step.entry_table(kind.ratio)
        layout = EntryLayout(cos_sin, table, plan.entries_per_block(kind.ratio), step.owner)
        options = is_index, is_index and width & (width - 1) == 0
        for each in parts:
            call = Pooling(pairs, bias, norm, 1e-3, sums, cache, layout, *options)
            if not is_index:
                latents = torch.full((num_tokens, width), 5.0, dtype=pairs_dtype)
                call = call._replace(latents=latents, slots=torch.full((num_tokens,), -1))
            yield call, each


def check_wide_pairs(device: str) -> None:
    """Check pairs in float32 of a model in bfloat16, with every format of a cache."""
    config = config_of(LayerKind(4, True), 128, 64)
    for dcp in (DCPConfig(block_size=2), DCPConfig(block_size=2, kv_cache_dtype="fp8_ds_mla", index_cache_dtype="fp8")):
        for is_index in (False, True):
            check_steps(device, config, dcp, 0, is_index, torch.bfloat16, STEPS[:2], torch.float32)


def check_compressor(device: str) -> None:
    """Compare with narrow rows, in every format of a cache."""
    if device == "cuda":
        for width, rope in ((16, 8), (24, 6)):
            compare_kinds(device, width, rope, zip(KINDS, itertools.cycle(DTYPES), strict=False))
    else:
        cases = [*zip(KINDS, itertools.cycle((torch.float32, torch.bfloat16)), strict=False)]
        compare_kinds(device, 16, 8, cases[:1])
        compare_kinds(device, 16, 8, cases[1:], STEPS[:6])
        compare_kinds(device, 24, 6, itertools.product(KINDS, (torch.float32,)), STEPS[2:4])
        quantized = [kind for kind in KINDS if kind[-1]]  # The other formats do not depend on the width of RoPE.
        compare_kinds(device, 128, 64, itertools.product(quantized, (torch.bfloat16,)), STEPS[2:4])


@on_both
def test_the_kernel(device: str) -> None:
    run_kernels(device, check_compressor, check_wide_pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "rope"), [(128, 64), (512, 64)])
def test_the_kernel_at_widths_of_models(width: int, rope: int, dtype: torch.dtype) -> None:
    compare_kinds("cuda", width, rope, itertools.product(KINDS, (dtype,)))


@on_both
def test_operator(device: str) -> None:
    case = next(compressor_cases(config_of(LayerKind(4, True), 16, 8), DCPConfig(block_size=2), 0, False))
    torch.library.opcheck(compressor.compress_.op, compressor.compress_.flatten(*on(device, [*case])))


@pytest.mark.parametrize(
    ("dtype", "cache"), [("bf16", "bf16"), ("bf16", "u8"), ("fp32", "fp32"), ("fp32", "u8"), ("fp32", "bf16")]
)
def test_the_kernel_compiles_for_hopper(dtype: str, cache: str) -> None:
    numbers = dict.fromkeys(("end_ptr", "source_ptr", "target_ptr"), "*i32")
    types = {**TYPES, **numbers, "cache_ptr": f"*{cache}"}
    pooled: dict[str, Any] = {"ROPE": 64, "HADAMARD_BITS": 0, "IS_INDEX": False, "WIDTH": 512, "COLUMNS": 512}
    index = {**pooled, "IS_INDEX": True, "WIDTH": 128, "COLUMNS": 128, "HADAMARD_BITS": 7}
    none: dict[str, Any] = dict.fromkeys(("latents_ptr", "slots_ptr"))
    for ratio, halves, tokens in ((4, 2, 1), (4, 2, 4), (128, 1, 1), (128, 1, 8)):
        constants = {"RATIO": ratio, "HALVES": halves, "GATES": halves * 512, "TOKENS": tokens}
        ptx_for_hopper(kernels.compress_kernel, dtype, {**pooled, **constants, **none}, **types)
    for ratio in (1, 2):  # These write entries before RoPE, too.
        constants = {"RATIO": ratio, "HALVES": 1, "GATES": 512 * (ratio - 1), "TOKENS": ratio}
        ptx_for_hopper(kernels.compress_kernel, dtype, {**pooled, **constants}, **types)
    constants = {"RATIO": 4, "HALVES": 2, "GATES": 256, "TOKENS": 4}
    ptx_for_hopper(kernels.compress_kernel, dtype, {**index, **constants, **none}, **types)
