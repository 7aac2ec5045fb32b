"""Triton kernels that write and read quantized caches and queries, byte for byte against `cache/formats.py`.

They run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
import re

import pytest
import torch
from torch import Tensor

from dcpmla.attention import projections
from dcpmla.attention.mla.deterministic import round_latents
from dcpmla.attention.mla.prefill import dequantize_rows, read_cache_rows
from dcpmla.attention.projection_calls import LatentWrite
from dcpmla.attention.triton.projections import absorb_kernel, absorb_query, latents_kernel, norm_rope_cache
from dcpmla.cache import kernels
from dcpmla.cache.formats import FP8, row_width, to_fp8, to_latents, write_latents
from tests.attention.test_small_kernels import (
    BLOCK_SIZE,
    DTYPES,
    LATENTS,
    NUM_BLOCKS,
    ODD,
    QUERY,
    TYPES,
    latents_case,
    query_case,
)
from tests.parallel.test_fp8_linear import quantized
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import bytes_of, on, on_both, run_kernels

POISON = 0xA5
ROW_OF_NAN = 1
TILES = (24, 384, 6, 12, 5, 3)  # Lq, L, R, P, V, h with a latent of three tiles


def random_rows(num_rows: int, storage: torch.dtype, rank: int, rope: int) -> Tensor:
    """Rows of any bytes that a cache may hold; scales and k_pe of fp8_ds_mla are numbers."""
    generator = torch.Generator().manual_seed(num_rows)
    codes = torch.randint(256, (num_rows, row_width(storage, rank, rope)), dtype=torch.uint8, generator=generator)
    if storage == FP8:
        return codes.view(FP8)
    numbers = (
        torch.rand(num_rows, rank // 128, generator=generator),
        torch.randn(num_rows, rope, generator=generator).bfloat16(),
    )
    codes[:, rank:] = torch.cat([part.view(torch.uint8) for part in numbers], -1)
    return codes


def quantized_case(
    sizes: tuple[int, ...], storage: torch.dtype, dtype: torch.dtype, scale: float, interleaved: bool
) -> LatentWrite:
    """Arguments of `norm_rope_cache` over a cache of poison, with a row of zeros and one of NaN."""
    arguments = latents_case(sizes, [3, 27, -1, 0, 6], dtype, True, interleaved)
    q_rank, rank, rope, *_ = sizes
    cache = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, row_width(storage, rank, rope)), POISON, dtype=torch.uint8)
    arguments.down[0, q_rank:], arguments.down[ROW_OF_NAN, q_rank] = 0, torch.nan
    kv_scale = torch.tensor([scale]) if storage == FP8 else None
    return arguments._replace(kv_cache=cache.view(storage)[:, 1], kv_scale=kv_scale)


def check_cache_rows(device: str) -> None:
    """Check that the cache holds what `to_cache_rows` makes of the latents that the kernel returns, NaN included, and
    that nothing else of it changes.
    """
    formats = (ODD, FP8, 0.01), (ODD, FP8, 30.0), (TILES, torch.uint8, 0.0)  # saturates; rounds to denormals
    for (sizes, storage, scale), (dtype, interleaved) in itertools.product(
        formats, zip(DTYPES, (True, False, True), strict=True)
    ):
        arguments, rank = quantized_case(sizes, storage, dtype, scale, interleaved), sizes[1]
        moved = on(device, arguments)
        latents, cached = norm_rope_cache(moved)[1].cpu(), moved[1]._base.cpu()
        cache, slots, kv_scale = arguments.kv_cache, arguments.slots, arguments.kv_scale
        at_nan = slots[ROW_OF_NAN] // BLOCK_SIZE, 1, slots[ROW_OF_NAN] % BLOCK_SIZE
        assert torch.equal(
            to_latents(cached[at_nan], rank, kv_scale, torch.float32).isnan(), latents[ROW_OF_NAN].isnan()
        )
        others = torch.where(torch.arange(len(slots)) == ROW_OF_NAN, -1, slots)
        write_latents(cache, latents[:, :rank], latents[:, rank:], others, kv_scale)
        cache._base[at_nan] = cached[at_nan]
        assert torch.equal(bytes_of(cached), bytes_of(cache._base))


def check_quantized_latents(device: str) -> None:
    """Check the query latent's codes against the quantized latent, which is the same without codes."""
    for dtype in (torch.float32, torch.float16):
        arguments = on(device, latents_case((384, 40, 6), [3, -1, 0, 27, 9], dtype, True, True))
        q_c, latents, *rows = norm_rope_cache(arguments._replace(quantizes=True))
        wanted = quantized(q_c, "tma")
        assert torch.equal(bytes_of(rows[0]), bytes_of(wanted.values))
        assert torch.equal(rows[1], wanted.scales)
        assert rows[1].stride() == wanted.scales.stride()
        assert all(map(torch.equal, (q_c, latents), norm_rope_cache(arguments)[:2]))


def check_fp8_queries(device: str) -> None:
    """Check codes against the kernel's query without a scale. Both are rounded to q's dtype first."""
    # The interpreter multiplies bfloat16's bits, as integers.
    dtypes = DTYPES if device == "cuda" else (torch.float32, torch.float16)
    scale = torch.tensor([0.004])
    for dtype, interleaved in itertools.product(dtypes, (True, False)):
        arguments = on(device, query_case(ODD, 19, dtype, True, interleaved))
        codes, query = absorb_query(arguments._replace(q_scale=scale.to(device))), absorb_query(arguments)
        assert (codes.dtype, query.dtype) == (FP8, dtype)
        assert torch.equal(bytes_of(codes), bytes_of(to_fp8(query.cpu(), scale)))
        assert (codes.float().abs() == 448).any()


def check_reading(device: str) -> None:
    for storage, (rank, rope) in itertools.product((FP8, torch.uint8), ((384, 6), (512, 64))):
        kv_scale = torch.tensor([0.37]) if storage == FP8 else None
        cache = random_rows(NUM_BLOCKS * 2 * BLOCK_SIZE, storage, rank, rope).unflatten(0, (NUM_BLOCKS, 2, BLOCK_SIZE))[
            :, 1
        ]
        slots = torch.tensor([3, 3, 0, 27, 9, 14, 22, 1, 6, 13, 20])
        rows, wanted = kernels.read_cache_rows(*on(device, [cache, slots])), read_cache_rows(cache, slots)
        assert torch.equal(bytes_of(rows), bytes_of(wanted))
        on_device = None if kv_scale is None else kv_scale.to(device)
        for dtype in DTYPES:
            decoded = kernels.dequantize_rows(rows, rank, on_device, dtype)
            assert decoded.dtype == dtype
            torch.testing.assert_close(
                decoded.cpu(), to_latents(wanted, rank, kv_scale, dtype), rtol=0, atol=0, equal_nan=True
            )
        assert kernels.dequantize_rows(rows[:0], rank, on_device, torch.float32).shape == (0, rank + rope)


def check_rounding(device: str) -> None:
    """Check that latents are rounded as the cache rounds them, and as torch does."""
    for storage, dtype in itertools.product((FP8, torch.uint8), (torch.float32, torch.float16)):
        kv_scale = torch.tensor([0.01]) if storage == FP8 else None
        num_rows, down = 9, 3 * torch.randn(9, 256 + 6, dtype=torch.float32).to(dtype)
        cache = torch.zeros(3, 4, row_width(storage, 256, 6), dtype=storage)
        slots, weight = torch.arange(num_rows), torch.ones(256, dtype=dtype)
        arguments = on(device, LatentWrite(down, cache, slots, None, weight, 1e-6, 1.0, None, True, kv_scale))
        _, latents, *_ = norm_rope_cache(arguments)
        rounded = kernels.round_latents(latents, 256, storage, arguments.kv_scale)
        rows = read_cache_rows(arguments[1].cpu(), slots)
        assert torch.equal(rounded.cpu(), to_latents(rows, 256, kv_scale, dtype))
        assert torch.equal(rounded.cpu(), round_latents(latents.cpu(), 256, storage, kv_scale))
        assert not torch.equal(rounded, latents)


def check_refusals(device: str) -> None:
    arguments = on(device, quantized_case(ODD, FP8, torch.float32, 1.0, True))
    with pytest.raises(ValueError, match="kv_scale is missing for a cache of torch.float8_e4m3fn"):
        norm_rope_cache(arguments._replace(kv_scale=None))
    with pytest.raises(ValueError, match=r"kv_cache has rows of 45 torch.float8_e4m3fn; latents of 40 \+ 6 take 46"):
        norm_rope_cache(arguments._replace(kv_cache=arguments.kv_cache[..., :-1]))
    with pytest.raises(ValueError, match="kv_scale is given for a cache of torch.uint8"):
        kernels.dequantize_rows(
            torch.zeros(1, 656, dtype=torch.uint8, device=device), 512, torch.ones(1, device=device), torch.float32
        )


@on_both
def test_kernels(device: str) -> None:
    checks = check_cache_rows, check_quantized_latents, check_fp8_queries, check_reading, check_rounding
    run_kernels(device, *checks, check_refusals)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [FP8, torch.uint8])
def test_a_chunk_through_the_operators(storage: torch.dtype) -> None:
    """DeepSeek's widths, a chunk of 65,536 rows read in any order and decoded."""
    cache = random_rows(1024 * 64, storage, 512, 64).unflatten(0, (1024, 64))
    kv_scale = torch.tensor([0.37]) if storage == FP8 else None
    slots = torch.randperm(1024 * 64, generator=torch.Generator().manual_seed(0))
    rows = read_cache_rows(cache.cuda(), slots.cuda())
    assert torch.equal(bytes_of(rows), bytes_of(read_cache_rows(cache, slots)))
    for dtype in (*DTYPES, torch.float64):
        decoded = dequantize_rows(rows, 512, None if kv_scale is None else kv_scale.cuda(), dtype)
        torch.testing.assert_close(
            decoded.cpu(), dequantize_rows(rows.cpu(), 512, kv_scale, dtype), rtol=0, atol=0, equal_nan=True
        )


@on_both
def test_operators(device: str) -> None:
    """Check schema, shapes and strides that tracing is told, what is written: `torch.library.opcheck`."""
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for sizes, storage in ((ODD, FP8), (TILES, torch.uint8)):
        arguments = quantized_case(sizes, storage, torch.float32, 0.01, True)
        arguments[0].nan_to_num_()
        if storage != FP8:  # which torch's check of the schema cannot compare
            checks.append("test_schema")
        rows = [arguments[1], torch.tensor([3, 0])]
        torch.library.opcheck(projections.norm_rope_cache.op, on(device, arguments), test_utils=checks)
        torch.library.opcheck(read_cache_rows.op, on(device, rows), test_utils=checks)
        codes = [read_cache_rows(*rows), sizes[1], arguments.kv_scale, torch.bfloat16]
        torch.library.opcheck(dequantize_rows.op, on(device, codes), test_utils=checks)
        latents = [torch.randn(3, sizes[1] + sizes[2]), sizes[1], storage, arguments.kv_scale]
        torch.library.opcheck(round_latents.op, on(device, latents), test_utils=checks)
    query = query_case(ODD, 3, torch.float32, True, False)._replace(q_scale=torch.tensor([0.01]))
    torch.library.opcheck(projections.absorb_query.op, on(device, query))


def test_kernels_compile_for_hopper() -> None:
    """Rows move 16 bytes a thread, but for the one row of a token; conversions and the division are the exact ones."""
    latents = [
        ptx_for_hopper(latents_kernel, "bf16", LATENTS, **TYPES, cache_ptr="*fp8e4nv"),
        ptx_for_hopper(latents_kernel, "bf16", {**LATENTS, "kv_scale_ptr": None}, **TYPES, cache_ptr="*u8"),
    ]
    queries = ptx_for_hopper(absorb_kernel, "bf16", {**QUERY, "w_scales_ptr": None}, **TYPES, out_ptr="*fp8e4nv")
    for ptx in (*latents, queries):
        assert "div.rn.f32" in ptx
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    copied = ptx_for_hopper(kernels.read_kernel, "u8", {"WIDTH": 656, "ROWS": 4, "COLUMNS": 1024}, **TYPES)
    widths = {"RANK": 512, "ROPE": 64, "ROWS": 8, "RANK_COLUMNS": 512, "ROPE_COLUMNS": 64}
    dequantized = [
        ptx_for_hopper(kernels.dequantize_kernel, "bf16", widths, **TYPES, rows_ptr="*fp8e4nv"),
        ptx_for_hopper(kernels.dequantize_kernel, "bf16", {**widths, "scale_ptr": None}, **TYPES, rows_ptr="*u8"),
    ]
    assert all("cvt.rn.f16x2.e4m3x2" in ptx for ptx in dequantized)
    for ptx in (queries, copied, *dequantized):
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert not re.search(r"(st|ld)\.global\.b(8|16)\b", ptx)
