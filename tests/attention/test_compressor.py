"""The compressor: the torch code against sums in float64 over whole prompts, the Triton kernel against the torch code.

The kernel runs on a GPU, in Triton's interpreter without one, and is compiled for Hopper.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import DCPConfig
from dcpmla.attention.compressed.build import CompressedStepBuilder
from dcpmla.attention.compressed.cache import CompressedPlan, plan_compressed
from dcpmla.attention.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.compressed.projections import rotate
from dcpmla.attention.compressed.step import CompressedMetadata
from dcpmla.attention.pooled import compressor
from dcpmla.attention.pooled.entries import EntryLayout, Part
from dcpmla.attention.step import StepRequests
from dcpmla.cache.shared_format import ROPE_DIM
from dcpmla.config import IndexerConfig
from tests.attention.test_compressed_kernels import DTYPES, POISON, TYPES, assert_near
from tests.attention.test_small_kernels import compile_for_hopper, cut, on, randn
from tests.support.shared_memory import run_interpreted
from tests.support.steps import part

EPS = 1e-3


def pool(pairs: Tensor, bias: Tensor, norm: Tensor, num_halves: int, cos_sin: Tensor) -> Tensor:
    """Return the entries of a prompt [L, 2 A D] in float64, one after the other, column by column: no sums are kept."""
    ratio, width, rope = len(bias), len(norm), cos_sin.shape[1]
    pairs, bias = pairs.double(), bias.double()
    entries = []
    for number in range(len(pairs) // ratio):
        values, gates = [], []
        for half in range(num_halves):
            # The last half is the entry's own span, the first one of two the span before.
            first = (number - (num_halves - 1 - half)) * ratio
            columns = slice(half * width, (half + 1) * width)
            for token in range(max(0, first), first + ratio):
                values.append(pairs[token, columns])
                gates.append(pairs[token, num_halves * width :][columns] + bias[token - first, columns])
        entry = (torch.stack(gates).softmax(0) * torch.stack(values)).sum(0)
        entry = entry / (entry.square().mean() + EPS).sqrt() * norm.double()
        angles = cos_sin[number * ratio].double()
        for pair in range(rope // 2):
            at = width - rope + 2 * pair
            cos, sin = angles[pair], angles[rope // 2 + pair]
            first_one, second = entry[at].clone(), entry[at + 1].clone()
            entry[at], entry[at + 1] = first_one * cos - second * sin, second * cos + first_one * sin
        entries.append(entry)
    return torch.stack(entries) if entries else torch.empty(0, width, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_entries_are_those_of_whole_prompts(data: st.DataObject) -> None:
    """Any ratio, however prompts are cut into steps, whichever rank an entry is on, and whatever tokens of a step are
    rejected; nothing else is written.
    """
    ratio, num_halves = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 2))
    size, interleave = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    lens = data.draw(st.lists(st.tuples(*[st.integers(0, 11)] * 2).filter(any), min_size=1, max_size=7))
    num_drafts = data.draw(st.integers(0, 2))
    rejected = [tuple(data.draw(st.integers(0, max(0, min(new - 1, num_drafts)))) for new in each) for each in lens]
    rejected = [
        tuple(r if n <= 1 + num_drafts else 0 for n, r in zip(*both, strict=True))
        for both in zip(lens, rejected, strict=True)
    ]
    width, rope = 6, 4
    config = config_of(LayerKind(ratio, num_halves == 2), width, rope)
    layout = {"tensor_parallel_size": size, "decode_context_parallel_size": size}
    dcp = DCPConfig(**layout, cp_kv_cache_interleave_size=interleave, block_size=2 * interleave)
    totals = [
        sum(new) - sum(gone) for new, gone in zip(zip(*lens, strict=True), zip(*rejected, strict=True), strict=True)
    ]
    prompts = [cut(randn(total, 2 * num_halves * width, seed=i)) for i, total in enumerate(totals)]
    angles = randn(max(totals) + num_drafts, rope, seed=9)
    bias, norm = randn(ratio, num_halves * width, seed=7), randn(width, seed=8)
    longest = [total + num_drafts for total in totals]
    plan = plan_compressed(config, dcp, longest, torch.float32, 3, num_drafts)
    tables = tables_of(plan, longest)
    found: list[dict[int, Tensor]] = [{} for _ in totals]
    for rank in range(size):
        cache = torch.full(plan.rows_shape(ratio), torch.nan)
        sums = torch.full(plan.sums_shape(config.layer_kinds[0], width), torch.nan)
        done = [0] * len(totals)
        for new, gone in zip(lens, rejected, strict=True):
            step, parts = build(plan, rank, new, done, tables)
            kept = [a + b - c for a, b, c in zip(done, new, gone, strict=True)]
            wrong = randn(num_drafts, 2 * num_halves * width, seed=99)
            pairs = torch.cat(
                [rows for i in decodes_first(plan, new) for rows in (prompts[i][done[i] : kept[i]], wrong[: gone[i]])]
            )
            done = kept
            cos_sin = angles[step.positions // ratio * ratio]
            layout = EntryLayout(cos_sin, step.entry_table(ratio), plan.entries_per_block(ratio), *step.layout)
            for each in parts:
                compressor.compress_(pairs, bias, norm, EPS, sums, cache, each, layout, False, False)
        written = 0
        for i, table in enumerate(tables):
            for entry in range(totals[i] // ratio):
                if entry // interleave % size == rank:
                    local = entry // (size * interleave) * interleave + entry % interleave
                    block, offset = divmod(local, plan.entries_per_block(ratio))
                    row = plan.window_rows(ratio) + table[block] * plan.entries_per_block(ratio) + offset
                    found[i][entry] = cache[row, 0]
                    written += 1
        # Rejected tokens may have completed an entry more.
        assert written <= int((~cache.isnan()).any(-1).sum()) <= written + (len(totals) if num_drafts else 0)
    for i, prompt in enumerate(prompts):
        wanted = pool(prompt, bias, norm, num_halves, angles)
        assert sorted(found[i]) == list(range(len(wanted)))
        if len(wanted):
            got = torch.stack([found[i][entry] for entry in range(len(wanted))])
            torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_before_rope(ratio: int) -> None:
    """They are the cached ones, not rotated yet; a token that completes no entry of this rank has none."""
    config = config_of(LayerKind(ratio, True), 6, 4, True)
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=4)
    num_written = 0
    for arguments, (_, cache) in compressor_cases(config, dcp, 1, False):
        compressor.compress_(*arguments)
        layout, latents, slots = arguments[7], *arguments[10:]
        written = slots >= 0
        num_written += int(written.sum())
        rotated = rotate(latents, layout.cos_sin)[written]
        torch.testing.assert_close(cache[slots[written], 0], rotated)
        assert (latents[~written] == 5).all()
    lens = [sum(new) // ratio for new in zip(*STEPS, strict=True)]
    assert num_written == sum(length // 2 for length in lens)


def tables_of(plan: CompressedPlan, totals: list[int]) -> list[list[int]]:
    blocks = iter(range(plan.num_blocks))
    return [[next(blocks) for _ in range(-(-total // plan.block_tokens))] for total in totals]


def config_of(kind: LayerKind, width: int, rope: int, has_entry_keys: bool = False) -> CompressedConfig:
    return CompressedConfig(
        hidden_size=8,
        num_heads=12,  # a multiple of all sizes of a group
        head_dim=width,
        rope_dim=rope,
        q_lora_rank=8,
        o_groups=12,
        o_lora_rank=8,
        sliding_window=8,
        rms_norm_eps=1e-3,
        indexer=IndexerConfig(num_heads=1, head_dim=width, topk=4, rope_interleaved=True),
        layer_kinds=(kind,),
        has_entry_keys=has_entry_keys,
    )


# New tokens of each request, step by step: prefills of one span and of many, in the middle of spans and at their ends,
# decodes; the last state is nobody's.
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


def check_compressor(
    device: str, width: int, rope: int, dtypes: tuple[torch.dtype, ...] = DTYPES, steps: Steps = STEPS
) -> None:
    """Check entries and sums after every step, of rows and of index keys, in every format; poison stays elsewhere."""
    layouts = ((1, 0, 1), (3, 1, 1), (2, 0, 2))
    cases = (  # of what, whether quantized
        (LayerKind(4, True), False, rope == ROPE_DIM),
        (LayerKind(4, True), True, True),
        (LayerKind(4, True), True, False),
        (LayerKind(6, False), False, False),
        (LayerKind(2, True), False, rope == ROPE_DIM),  # Neither this nor the next one overlaps.
        (LayerKind(1, True), False, False),
    )
    for number, ((kind, is_index, is_quantized), dtype) in enumerate(itertools.product(cases, dtypes)):
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
) -> None:
    from dcpmla.attention.pooled.kernels import compressor as kernels

    moved_sums = moved_cache = None
    for arguments, (sums, cache) in compressor_cases(config, dcp, rank, is_index, dtype, steps):
        moved = on(device, arguments)
        if moved_sums is None:
            moved_sums, moved_cache = moved[4:6]
        kernels.compress_(*moved[:4], moved_sums, moved_cache, *moved[6:])
        compressor.compress_(*arguments)
        if not is_index:
            latents, slots = arguments[10:]
            assert torch.equal(moved[11].cpu(), slots)
            assert_near(moved[10], latents)
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
) -> Iterator[tuple[list[Any], tuple[Tensor, Tensor]]]:
    """Yield arguments of `compress_`, step by step, over the same sums and the same cache."""
    kind, width, rope = config.layer_kinds[0], config.head_dim, config.rope_dim
    totals = [sum(new) for new in zip(*steps, strict=True)]
    plan = plan_compressed(config, dcp, totals, dtype, 4, num_drafts=2 * (rank % 2))
    shape = plan.index_shape(kind.ratio) if is_index else plan.rows_shape(kind.ratio)
    cache = torch.empty(shape, dtype=plan.index_dtype if is_index else plan.dtype)
    sums = torch.full(plan.sums_shape(kind, width), torch.nan)
    cache.view(torch.uint8).fill_(POISON)
    tables = tables_of(plan, totals)
    halves, num_columns = config.num_halves(kind), 2 if kind.ratio > 1 else 1
    bias, norm = randn(kind.ratio, halves * width, seed=1), 0.5 + randn(width, seed=2).abs()
    done = [0] * len(totals)
    for number, new in enumerate(steps):
        step, parts = build(plan, rank, new, done, tables)
        done = [a + b for a, b in zip(done, new, strict=True)]
        num_tokens = len(step.positions)
        pairs = cut(randn(num_tokens, num_columns * halves * width, dtype=dtype, seed=number))
        cos_sin = torch.rand(num_tokens, rope, generator=torch.Generator().manual_seed(number))
        table = step.block_table if is_index else step.entry_table(kind.ratio)
        layout = EntryLayout(cos_sin, table, plan.entries_per_block(kind.ratio), *step.layout)
        how = is_index, is_index and width & (width - 1) == 0
        for each in parts:
            arguments = [pairs, bias, norm, 1e-3, sums, cache, each, layout, *how]
            if not is_index:
                latents = torch.full((num_tokens, width), 5.0, dtype=dtype)
                arguments += [latents, torch.full((num_tokens,), -1)]
            yield arguments, (sums, cache)


def decodes_first(plan: CompressedPlan, new: tuple[int, ...]) -> list[int]:
    return sorted((i for i, count in enumerate(new) if count), key=lambda i: new[i] > 1 + plan.num_drafts)


def build(
    plan: CompressedPlan, rank: int, new: tuple[int, ...], done: list[int], tables: list[list[int]]
) -> tuple[CompressedMetadata, tuple[Part, ...]]:
    requests = decodes_first(plan, new)
    lens = [new[i] for i in requests]
    step = CompressedStepBuilder(plan, rank).build(
        StepRequests(
            lens, [done[i] + new[i] for i in requests], [tables[i] for i in requests], [2 - i for i in requests]
        ),
        max_decode_query_len=1 + plan.num_drafts,
    )
    compressed = part(step, CompressedMetadata)
    return compressed, compressed.parts_of(step.decode)


def check_compressor_in_the_interpreter() -> None:
    from tests.support.interpreter import convert_as_torch

    convert_as_torch()
    check_compressor("cpu", 16, 8, (torch.float32, torch.bfloat16))
    check_compressor("cpu", 24, 6, (torch.float32,), STEPS[:4])
    check_compressor("cpu", 128, 64, (torch.bfloat16,), STEPS[:5])


def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(1, check_compressor_in_the_interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "rope"), [(16, 8), (24, 6), (128, 64), (512, 64)])
def test_the_kernel(width: int, rope: int) -> None:
    check_compressor("cuda", width, rope)


def check_operator(device: str) -> None:
    arguments, _ = next(compressor_cases(config_of(LayerKind(4, True), 16, 8), DCPConfig(block_size=2), 0, False))
    *tensors, each, layout, is_index, hadamard, latents, slots = on(device, arguments)
    options = is_index, hadamard, latents, slots
    torch.library.opcheck(compressor.compress_.op, (*tensors, *each, *layout, *options))


def test_operator() -> None:
    check_operator("cpu")


@pytest.mark.gpu
def test_operator_on_a_gpu() -> None:
    check_operator("cuda")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("cache", ["plain", "u8"])
def test_the_kernel_compiles_for_hopper(dtype: str, cache: str) -> None:
    pytest.importorskip("triton")
    from dcpmla.attention.pooled.kernels.compressor import compress_kernel

    numbers = dict.fromkeys(("end_ptr", "source_ptr", "target_ptr"), "*i32")
    types = {**TYPES, **numbers, "cache_ptr": "*u8" if cache == "u8" else f"*{dtype}"}
    pooled: dict[str, Any] = {"ROPE": 64, "HADAMARD_BITS": 0, "IS_INDEX": False, "WIDTH": 512, "COLUMNS": 512}
    index = {**pooled, "IS_INDEX": True, "WIDTH": 128, "COLUMNS": 128, "HADAMARD_BITS": 7}
    none: dict[str, Any] = dict.fromkeys(("latents_ptr", "slots_ptr"))
    for ratio, halves, tokens in itertools.product((4, 128), (1, 2), (1, 8)):
        constants = {"RATIO": ratio, "HALVES": halves, "GATES": halves * 512, "TOKENS": tokens}
        compile_for_hopper(compress_kernel, dtype, {**pooled, **constants, **none}, **types)
    for ratio in (1, 2):  # These write entries before RoPE, too.
        constants = {"RATIO": ratio, "HALVES": 1, "GATES": 512 * (ratio - 1), "TOKENS": 1}
        compile_for_hopper(compress_kernel, dtype, {**pooled, **constants}, **types, slots_ptr="*i64")
    constants = {"RATIO": 4, "HALVES": 2, "GATES": 256, "TOKENS": 8}
    compile_for_hopper(compress_kernel, dtype, {**index, **constants, **none}, **types)
