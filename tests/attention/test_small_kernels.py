"""The Triton kernels of norms, RoPE, cache rows and absorbed projections against the torch code.

They run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention import head_factors, projections
from dcpmla.attention.mla.prefill import read_cache_rows
from dcpmla.attention.projection_calls import LatentWrite, QueryAbsorption, ValueProjection
from dcpmla.attention.triton import head_factors as factor_kernels
from dcpmla.attention.triton import projections as kernels
from dcpmla.attention.triton.rope import rotate_kernel, rotate_query_
from dcpmla.cache import kernels as cache_kernels
from tests.support.hopper import ptx_for_hopper as compile_for_hopper
from tests.support.kernels import cut, on, on_both, randn, run_kernels

BLOCK_SIZE, NUM_BLOCKS = 4, 7
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of three roundings
DTYPES = tuple(TOLERANCE)
# Lq, L, R, P, V, h: DeepSeek-V3's, no query latent, nothing a power of two.
DEEPSEEK, NO_Q_LORA, ODD = (1536, 512, 64, 128, 128, 16), (0, 512, 64, 128, 128, 16), (24, 40, 6, 12, 5, 3)
LONG = (0, 72, 16, 140, 5, 3)  # latents and heads longer than a tile of W_UK


def latents_case(
    sizes: tuple[int, ...], slots: list[int], dtype: torch.dtype, rope: bool, interleaved: bool
) -> LatentWrite:
    """Arguments of `norm_rope_cache`: strided rows, a cache of NaN that is one layer of several."""
    q_rank, rank, width, *_ = sizes
    num_tokens = len(slots)
    cache = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, rank + width), torch.nan, dtype=dtype)[:, 1]
    q_weight = 0.5 + randn(q_rank, dtype=dtype, seed=1).abs() if q_rank else None
    cos_sin = randn(num_tokens, width, seed=2) if rope else None
    down = cut(randn(num_tokens, q_rank + rank + width, dtype=dtype, seed=3))
    return LatentWrite(
        down,
        cache,
        torch.tensor(slots, dtype=torch.int64),
        q_weight,
        0.5 + randn(rank, dtype=dtype, seed=4).abs(),
        1e-3,
        1.7,
        cos_sin,
        interleaved,
        None,
    )


def query_case(
    sizes: tuple[int, ...], num_tokens: int, dtype: torch.dtype, rope: bool, interleaved: bool
) -> QueryAbsorption:
    """Arguments of `absorb_query`: rows cut out, W_UK as a view of W_UK over W_UV."""
    _, rank, width, nope, value, heads = sizes
    cos_sin = randn(num_tokens, width, seed=2) if rope else None
    w_uk = (randn(heads, nope + value, rank, dtype=dtype, seed=5) / nope**0.5)[:, :nope]
    q = cut(randn(num_tokens, heads, nope + width, dtype=dtype, seed=6))
    return QueryAbsorption(q, w_uk, cos_sin, interleaved, None)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(got.double().cpu(), wanted.double(), atol=tolerance, rtol=tolerance, equal_nan=True)


def with_dtypes(device: str, cases: Iterable[Any]) -> Iterator[Any]:
    """Pair cases with dtypes: all combinations on GPUs, a dtype for each case in the interpreter."""
    if device == "cuda":
        return itertools.product(cases, DTYPES)
    return zip(cases, itertools.cycle(DTYPES), strict=False)


def check_latents(device: str) -> None:
    sizes = (DEEPSEEK, NO_Q_LORA, ODD) if device == "cuda" else (ODD, (0, *ODD[1:]))
    cases = itertools.product(sizes, (True, False), (True, False))
    for number, ((size, rope, interleaved), dtype) in enumerate(with_dtypes(device, cases)):
        arguments = latents_case(size, [3, -1, 27, -1, 0], dtype, rope, interleaved)
        if number % 4 in (1, 2):  # k_pe is normed, in either layout
            arguments = arguments._replace(k_pe_weight=randn(size[2], dtype=dtype, seed=7))
        moved = on(device, arguments)
        wanted, got = projections.norm_rope_cache(arguments), kernels.norm_rope_cache(moved)
        for mine, theirs in zip(got[:2], wanted[:2], strict=True):
            assert_near(mine, theirs)
        assert_near(moved[1], arguments[1])  # NaN stays wherever no slot points
        assert moved[1]._base[:, 0].isnan().all()
        assert int((~moved[1].isnan()).any(-1).sum()) == 3


def check_queries(device: str) -> None:
    # The interpreter multiplies bfloat16's bits, as integers.
    dtypes, cases = (torch.float32, torch.float16), [(5, ODD), (19, LONG)]
    if device == "cuda":
        dtypes, cases = DTYPES, [*itertools.product((0, 1, 17, 130), (DEEPSEEK, ODD, LONG))]
    for (num_tokens, size), dtype, rope, interleaved in itertools.product(cases, dtypes, (True, False), (True, False)):
        arguments = query_case(size, num_tokens, dtype, rope, interleaved)
        assert_near(kernels.absorb_query(on(device, arguments)), projections.absorb_query(arguments))
        if rope:
            q, _, cos_sin, *_ = on(device, arguments)
            rotate_query_(q, cos_sin, interleaved)
            projections.rotate_query_(arguments[0], cos_sin.cpu(), interleaved)
            assert_near(q, arguments[0])


def check_factors(device: str) -> None:
    cases = itertools.product((0, 64, 5), (1, 3, 16), (64, 12))
    for (padding, num_heads, width), dtype in with_dtypes(device, cases):
        logs, scale, bias = (randn(size, dtype=dtype, seed=size) for size in (5, num_heads + 7, num_heads + 8))
        arguments = [cut(randn(5, num_heads, width, dtype=dtype)), logs, scale[7:], bias[8:], padding]
        assert_near(factor_kernels.scale_queries(*on(device, arguments)), head_factors.scale_queries(*arguments))


def check_rows(device: str) -> None:
    for width, dtype in itertools.product((576, 7) if device == "cuda" else (7,), (torch.float64, *DTYPES)):
        cache = randn(NUM_BLOCKS, 3, BLOCK_SIZE, width, dtype=dtype)[:, 1]
        slots = torch.tensor([3, 3, 0, 27, 9])
        (moved,) = on(device, [cache])
        assert torch.equal(cache_kernels.read_cache_rows(moved, slots.to(device)).cpu(), read_cache_rows(cache, slots))
        assert cache_kernels.read_cache_rows(moved, slots[:0].to(device)).shape == (0, width)


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_latents, check_queries, check_rows, check_factors)


@pytest.mark.gpu
def test_operators_run_the_kernels_and_match_the_torch_code() -> None:
    """The doors of the package, on CUDA tensors; float64 stays torch's."""
    for dtype in (*DTYPES, torch.float64):
        tolerance = TOLERANCE.get(dtype, 1e-6)
        arguments, queries = (
            latents_case(DEEPSEEK, [5, -1, 0], dtype, True, True),
            query_case(DEEPSEEK, 3, dtype, True, True),
        )
        moved = on("cuda", arguments)
        out, w_uv = randn(3, 16, 512, dtype=dtype), (randn(16, 256, 512, dtype=dtype) / 512**0.5)[:, 128:]
        wanted = [
            *projections.norm_rope_cache(arguments)[:2],
            projections.absorb_query(queries),
            projections.project_values(ValueProjection(out, w_uv)),
        ]
        got = [
            *projections.norm_rope_cache(moved)[:2],
            projections.absorb_query(on("cuda", queries)),
            projections.project_values(on("cuda", ValueProjection(out, w_uv))),
        ]
        slots = torch.tensor([5, 0])
        wanted.append(read_cache_rows(arguments[1], slots))
        got.append(read_cache_rows(moved[1], slots.cuda()))
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31() -> None:
    num_blocks = 2**31 // (64 * 576) + 2
    cache = torch.empty(num_blocks, 64, 576, dtype=torch.bfloat16, device="cuda")
    cache[-1], cache[0] = torch.nan, torch.nan
    arguments = on("cuda", latents_case(NO_Q_LORA, [num_blocks * 64 - 1], torch.bfloat16, True, True))
    _, latents, *_ = projections.norm_rope_cache(arguments._replace(kv_cache=cache))
    assert torch.equal(cache[-1, -1], latents[0])
    assert torch.equal(read_cache_rows(cache, arguments[2]), latents)
    assert cache[-1, :-1].isnan().all()
    assert cache[0].isnan().all()


ROPE = {"ROPE": 64, "PAIRS": 32, "INTERLEAVED": True}
LATENTS = {"k_pe_weight_ptr": None, "KV_RANK": 512, "KV_COLUMNS": 512, "Q_RANK": 1536, "Q_COLUMNS": 2048, **ROPE}
QUERY = {"NOPE": 128, "RANK": 512, "TOKENS": 64, **ROPE}
TYPES = {
    **{"cos_sin_ptr": "*fp32", "slots_ptr": "*i64", "eps": "fp32", "kv_lora_scale": "fp32"},
    **dict.fromkeys(("kv_scale_ptr", "q_scale_ptr", "scale_ptr", "scales_ptr"), "*fp32"),
    "codes_ptr": "*fp8e4nv",
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_hopper(dtype: str) -> None:
    """Tiles of rows move 16 bytes a thread."""
    without_q_lora = {"Q_RANK": 0, "Q_COLUMNS": 1, "q_weight_ptr": None, "cos_sin_ptr": None}
    for nothing in ({}, without_q_lora):
        compile_for_hopper(kernels.latents_kernel, dtype, {**LATENTS, "kv_scale_ptr": None, **nothing}, **TYPES)
    normed = {name: value for name, value in LATENTS.items() if name != "k_pe_weight_ptr"}
    compile_for_hopper(kernels.latents_kernel, dtype, {**normed, "kv_scale_ptr": None}, **TYPES)
    for kernel, constants in (
        (kernels.absorb_kernel, {"q_scale_ptr": None, "w_scales_ptr": None, **QUERY}),
        (rotate_kernel, ROPE),
        (cache_kernels.read_kernel, {"WIDTH": 576, "ROWS": 4, "COLUMNS": 1024}),
    ):
        ptx = compile_for_hopper(kernel, dtype, constants, **TYPES)
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert not re.search(r"(st|ld)\.global\.b(8|16)\b", ptx)
    for padding in (0, 64):
        constants = {"WIDTH": 128, "OUT_WIDTH": 128 + padding, "COLUMNS": 128 if padding == 0 else 256}
        ptx = compile_for_hopper(factor_kernels.scale_kernel, dtype, constants)
        assert "st.global.v4.b32" in ptx
    in_fp8 = {**TYPES, "w_uk_ptr": "*fp8e4nv", "w_scales_ptr": "*fp32"}
    ptx = compile_for_hopper(kernels.absorb_kernel, dtype, {"q_scale_ptr": None, **QUERY}, **in_fp8)
    assert not re.search(r"ld\.global\.b(8|16)\b", ptx)
