"""The Triton kernels of norms, RoPE, cache rows and absorbed projections against the torch code.

They run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention import head_factors, projections
from dcpmla.attention.mla.prefill import read_cache_rows
from dcpmla.attention.projection_calls import LatentWrite, QueryAbsorption, ValueProjection
from tests.support.hopper import compile_source
from tests.support.shared_memory import run_interpreted

BLOCK_SIZE, NUM_BLOCKS = 4, 7
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}  # the interpreter truncates, at each of three roundings
DTYPES = tuple(TOLERANCE)
# Lq, L, R, P, V, h: DeepSeek-V3's, no query latent, nothing a power of two.
DEEPSEEK, NO_Q_LORA, ODD = (1536, 512, 64, 128, 128, 16), (0, 512, 64, 128, 128, 16), (24, 40, 6, 12, 5, 3)
LONG = (0, 72, 16, 140, 5, 3)  # latents and heads longer than a tile of W_UK


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(x: Tensor) -> Tensor:
    """Return the same rows with NaN after each: a slice of something wider."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


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


def on(device: str, arguments: Iterable[Any]) -> Any:
    """Copy tensors to a device with their strides, also in NamedTuples; return a NamedTuple, or a list."""

    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return on(device, x)
        if not isinstance(x, Tensor):
            return x
        base = x if x._base is None else x._base
        return base.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())

    moved = [move(x) for x in arguments]
    return type(arguments)(*moved) if isinstance(arguments, tuple) else moved


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(got.double().cpu(), wanted.double(), atol=tolerance, rtol=tolerance, equal_nan=True)


def with_dtypes(device: str, cases: Iterable[Any]) -> Iterator[Any]:
    """Pair cases with dtypes: all combinations on GPUs, a dtype for each case in the interpreter."""
    if device == "cuda":
        return itertools.product(cases, DTYPES)
    return zip(cases, itertools.cycle(DTYPES), strict=False)


def check_latents(device: str, *sizes: tuple[int, ...]) -> None:
    from dcpmla.attention.triton import projections as kernels

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


def check_queries(device: str, num_tokens: int, *sizes: tuple[int, ...]) -> None:
    from dcpmla.attention.triton import projections as kernels
    from dcpmla.attention.triton.rope import rotate_query_

    dtypes = (
        DTYPES if device == "cuda" else (torch.float32, torch.float16)
    )  # the interpreter multiplies bfloat16's bits, as integers
    for size, dtype, rope, interleaved in itertools.product(sizes, dtypes, (True, False), (True, False)):
        arguments = query_case(size, num_tokens, dtype, rope, interleaved)
        assert_near(kernels.absorb_query(on(device, arguments)), projections.absorb_query(arguments))
        if rope:
            q, _, cos_sin, *_ = on(device, arguments)
            rotate_query_(q, cos_sin, interleaved)
            projections.rotate_query_(arguments[0], cos_sin.cpu(), interleaved)
            assert_near(q, arguments[0])


def check_factors(device: str) -> None:
    from dcpmla.attention.triton import head_factors as kernels

    cases = itertools.product((0, 64, 5), (1, 3, 16), (64, 12))
    for (padding, num_heads, width), dtype in with_dtypes(device, cases):
        logs, scale, bias = (randn(size, dtype=dtype, seed=size) for size in (5, num_heads + 7, num_heads + 8))
        arguments = [cut(randn(5, num_heads, width, dtype=dtype)), logs, scale[7:], bias[8:], padding]
        assert_near(kernels.scale_queries(*on(device, arguments)), head_factors.scale_queries(*arguments))


def check_rows(device: str, width: int) -> None:
    from dcpmla.cache import kernels

    for dtype in (torch.float64, *DTYPES):
        cache = randn(NUM_BLOCKS, 3, BLOCK_SIZE, width, dtype=dtype)[:, 1]
        slots = torch.tensor([3, 3, 0, 27, 9])
        (moved,) = on(device, [cache])
        assert torch.equal(kernels.read_cache_rows(moved, slots.to(device)).cpu(), read_cache_rows(cache, slots))
        assert kernels.read_cache_rows(moved, slots[:0].to(device)).shape == (0, width)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 130])
def test_queries(num_tokens: int) -> None:
    check_queries("cuda", num_tokens, DEEPSEEK, ODD, LONG)


@pytest.mark.gpu
def test_kernels() -> None:
    check_latents("cuda", DEEPSEEK, NO_Q_LORA, ODD)
    check_rows("cuda", 576)
    check_rows("cuda", 7)
    check_factors("cuda")


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


def check_in_the_interpreter() -> None:
    check_latents("cpu", ODD, (0, *ODD[1:]))
    check_queries("cpu", 5, ODD)
    check_queries("cpu", 19, LONG)
    check_rows("cpu", 7)
    check_factors("cpu")


def check_formats_in_the_interpreter() -> None:
    from tests.attention import test_format_kernels as formats
    from tests.support.interpreter import convert_as_torch

    convert_as_torch()
    formats.check_cache_rows("cpu")
    formats.check_quantized_latents("cpu")
    formats.check_fp8_queries("cpu")
    formats.check_reading("cpu")
    formats.check_rounding("cpu")
    formats.check_refusals("cpu")


@pytest.mark.parametrize("check", [check_in_the_interpreter, check_formats_in_the_interpreter])
def test_kernels_in_the_interpreter(check: Callable[[], None]) -> None:
    pytest.importorskip("triton")
    run_interpreted(1, check)


def compile_for_hopper(kernel: Any, dtype: str, constants: dict[str, Any], **types: str) -> str:
    """PTX of a kernel whose pointers are to dtype where nothing else is said, and like the strides multiples of 16."""
    from triton.compiler import ASTSource

    def type_of(name: str) -> str:
        return "constexpr" if name in constants else types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")

    aligned = [
        (at,)
        for at, name in enumerate(kernel.arg_names)
        if name not in constants and ("ptr" in name or "stride" in name)
    ]
    attributes = {at: [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(
        kernel, {name: type_of(name) for name in kernel.arg_names}, constexprs=constants, attrs=attributes
    )
    ptx = str(compile_source(source).asm["ptx"])
    assert "sm_90a" in ptx
    return ptx


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
    pytest.importorskip("triton")
    from dcpmla.attention.triton.head_factors import scale_kernel
    from dcpmla.attention.triton.projections import absorb_kernel, latents_kernel
    from dcpmla.attention.triton.rope import rotate_kernel
    from dcpmla.cache.kernels import read_kernel

    without_q_lora = {"Q_RANK": 0, "Q_COLUMNS": 1, "q_weight_ptr": None, "cos_sin_ptr": None}
    for nothing in ({}, without_q_lora):
        compile_for_hopper(latents_kernel, dtype, {**LATENTS, "kv_scale_ptr": None, **nothing}, **TYPES)
    normed = {name: value for name, value in LATENTS.items() if name != "k_pe_weight_ptr"}
    compile_for_hopper(latents_kernel, dtype, {**normed, "kv_scale_ptr": None}, **TYPES)
    for kernel, constants in (
        (absorb_kernel, {"q_scale_ptr": None, "w_scales_ptr": None, **QUERY}),
        (rotate_kernel, ROPE),
        (read_kernel, {"WIDTH": 576, "ROWS": 4, "COLUMNS": 1024}),
    ):
        ptx = compile_for_hopper(kernel, dtype, constants, **TYPES)
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert not re.search(r"(st|ld)\.global\.b(8|16)\b", ptx)
    for padding in (0, 64):
        constants = {"WIDTH": 128, "OUT_WIDTH": 128 + padding, "COLUMNS": 128 if padding == 0 else 256}
        ptx = compile_for_hopper(scale_kernel, dtype, constants)
        assert "st.global.v4.b32" in ptx
    in_fp8 = {**TYPES, "w_uk_ptr": "*fp8e4nv", "w_scales_ptr": "*fp32"}
    ptx = compile_for_hopper(absorb_kernel, dtype, {"q_scale_ptr": None, **QUERY}, **in_fp8)
    assert not re.search(r"ld\.global\.b(8|16)\b", ptx)
