"""Triton kernels of DeepSeek-V4's attention against the torch code that specifies them.

They run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.layers.compressed import projections
from dcpmla.attention.layers.compressed.calls import WindowWrite
from dcpmla.attention.layers.compressed.kernels import projections as kernels
from dcpmla.cache.shared_format import ROPE_DIM, rows_shape
from dcpmla.cache.shared_kernels import read_pages_kernel, read_shared_rows
from dcpmla.cache.shared_rows import read_rows, write_rows
from dcpmla.parallel.quantized import quantize_groups
from tests.attention.test_small_kernels import with_dtypes
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import bytes_of, cut, on, on_both, randn, run_kernels

POISON, RING = 0xA5, 7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of what was rounded once or twice more, or from sums in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
V4, ODD = (1536, 512, 64), (24, 40, 6)  # Lq, D, R: DeepSeek-V4's, nothing a power of two
GROUPS = (384, 40, 6)  # Lq of whole groups of 128
_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
FP8_SIZES = (24, 128, 64), (24, 192, 64), (24, 512, 64)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(got.double().cpu(), wanted.double(), atol=tolerance, rtol=tolerance, equal_nan=True)


def rows_case(sizes: tuple[int, int, int], dtype: torch.dtype, storage: torch.dtype) -> WindowWrite:
    """Arguments of `norm_rope_window`: a prefill longer than its window, decodes, padding; a row of zeros."""
    q_rank, width, rope = sizes
    lens, ends, states = (9, 1, 1, 1, 1), (21, 1, 5, 200, 0), (2, 0, 40, 1, -1)
    parts = [torch.arange(max(0, end - length), max(1, end)) for length, end in zip(lens, ends, strict=True)]
    positions = torch.cat(parts)
    request = torch.arange(len(lens), dtype=torch.int32).repeat_interleave(torch.tensor(lens))
    down = cut(randn(len(positions), q_rank + width, dtype=dtype, seed=3))
    down[:, q_rank:] *= 2.0 ** torch.randint(-12, 5, (len(positions), 1), generator=torch.Generator().manual_seed(5))
    down[5, q_rank:], down[6, q_rank : q_rank + 8] = 0, 300
    down[-1] = torch.nan
    cache = torch.empty(rows_shape(RING * 41 + 9, width, storage), dtype=storage)
    cache.view(torch.uint8).fill_(POISON)
    weights = 0.5 + randn(q_rank, seed=1).abs(), 0.5 + randn(width, seed=2).abs()
    per_request = torch.tensor(ends, dtype=torch.int32), torch.tensor(states, dtype=torch.int32)
    cos_sin = randn(len(positions), rope, seed=4)
    return WindowWrite(down, cache, *weights, 1e-3, cos_sin, positions, request, *per_request, RING)


def check_finish_rows(device: str) -> None:
    """Check that rows are as the torch code's, and a cache, byte by byte, as it makes them of the kernel's rows."""
    sizes = (V4, ODD, *FP8_SIZES) if device == "cuda" else (ODD, *FP8_SIZES[:2])
    for size, dtype in with_dtypes(device, sizes):
        call = rows_case(size, dtype, dtype)
        moved = on(device, call)
        wanted, got = projections.norm_rope_window(call), kernels.norm_rope_window(moved)
        for mine, theirs in zip(got[:2], wanted[:2], strict=True):
            assert_near(mine, theirs)
        check_written(call, moved.cache, got[1].cpu())
        if size[2] == ROPE_DIM:
            call = rows_case(size, dtype, torch.uint8)
            moved = on(device, call)
            rounded = kernels.norm_rope_window(moved)[1].cpu()
            check_written(call, moved.cache, got[1].cpu())
            page = torch.empty_like(call.cache)
            everywhere = torch.arange(len(rounded))
            write_rows(page, got[1].cpu(), everywhere)
            assert torch.equal(rounded[:-1], read_rows(page, everywhere, size[1], dtype)[:-1])  # the last is NaN


def check_quantized(device: str) -> None:
    """Check that query latents are what they are alone, and codes and scales what `quantize_groups` makes of them."""
    for size, dtype in itertools.product((V4, GROUPS) if device == "cuda" else (GROUPS,), DTYPES):
        call = rows_case(size, dtype, dtype)
        call = call._replace(down=call.down.nan_to_num(0.0))
        alone, _, *nothing = kernels.norm_rope_window(on(device, call))
        q_c, _, *found = kernels.norm_rope_window(on(device, call)._replace(quantizes=True))
        assert torch.equal(q_c, alone)
        assert not any(part.numel() for part in nothing)
        for mine, theirs in zip(found, quantize_groups(q_c.cpu(), 128), strict=True):
            assert torch.equal(bytes_of(mine), bytes_of(theirs))
        q_c, _, *found = projections.norm_rope_window(call._replace(quantizes=True))
        for mine, theirs in zip(found, quantize_groups(q_c, 128), strict=True):
            assert torch.equal(mine.float(), theirs.float())


def check_written(call: WindowWrite, cache: Tensor, rows: Tensor) -> None:
    """Check a cache against one that rows are written to by the torch code, over poison."""
    again, positions, request, states = call.cache, call.positions, call.request, call.states
    is_kept = (states[request] >= 0) & (call.seq_lens[request] - positions <= RING)
    again.view(torch.uint8).fill_(POISON)
    write_rows(again, rows, (states[request].long() * RING + positions % RING).where(is_kept, -1))
    assert torch.equal(bytes_of(cache), bytes_of(again))


def heads_case(num_tokens: int, num_heads: int, width: int, rope: int, dtype: torch.dtype) -> list[Any]:
    """Arguments of `unrope_heads`, rows that nothing was attended to, NaN among them."""
    out, lse = cut(randn(num_tokens, num_heads, width, dtype=dtype, seed=1)), 3 * randn(num_tokens, num_heads, seed=2)
    sinks = 3 * randn(num_heads, seed=3)
    if num_tokens:
        lse[0, 0], out[0, 0], lse[-1] = -torch.inf, torch.nan, -torch.inf
        sinks[-1] = -torch.inf
    return [out, lse, sinks, randn(num_tokens, rope, seed=4)]


def check_heads(device: str) -> None:
    shapes = [(3, 5, 40, 6), (2, 3, 256, 64), (0, 3, 128, 64)]
    if device == "cuda":
        shapes += [(1, 64, 512, 64), (70, 128, 512, 64), (5, 1, 128, 64)]
    for shape, dtype in itertools.product(shapes, DTYPES):
        arguments = heads_case(*shape, dtype)
        moved = on(device, arguments)
        got, _ = kernels.unrope_heads(*moved, False)
        assert_near(got, projections.unrope_heads(*arguments, False)[0])
        assert got.is_contiguous()
        if shape[2] % projections.GROUP == 0:
            codes, scales = kernels.unrope_heads(*moved, True)
            wanted = projections.index_to_fp8(got.cpu().unflatten(-1, (-1, projections.GROUP)))
            assert torch.equal(bytes_of(codes), bytes_of(wanted[0].flatten(-2)))
            assert torch.equal(scales.cpu(), wanted[1])
        q, cos_sin = arguments[0].nan_to_num(0.5), arguments[3]
        for eps in (1e-3, None):
            (moved_q,) = on(device, [cut(q)])
            kernels.norm_rope_query_(moved_q, eps, cos_sin.to(device))
            wanted_q = q.clone()
            projections.norm_rope_query_(wanted_q, eps, cos_sin)
            assert_near(moved_q, wanted_q)
            assert moved_q._base[..., shape[2] :].isnan().all()


def check_reading(device: str) -> None:
    slots = torch.tensor([[3, 3, 0], [127, 64, 130]])
    for width, dtype in with_dtypes(device, (128, 192, 512)):
        cache = torch.empty(rows_shape(140, width, torch.uint8), dtype=torch.uint8)
        write_rows(cache, randn(140, width), torch.arange(140))
        (moved,) = on(device, [cache])
        got = read_shared_rows(moved, slots.to(device), width, dtype)
        assert torch.equal(got.cpu(), read_rows(cache, slots, width, dtype))
        assert read_shared_rows(moved, slots[:0].to(device), width, dtype).shape == (0, 3, width)
        plain = randn(140, 1, width, dtype=dtype)
        got = read_shared_rows(plain.to(device), slots.to(device), width, dtype)
        assert torch.equal(got.cpu(), plain[slots, 0])


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_finish_rows, check_quantized, check_heads, check_reading)


@pytest.mark.gpu
def test_operators_run_the_kernels() -> None:
    """The doors of the package, on CUDA tensors; float64 stays torch's."""
    for dtype in (*DTYPES, torch.float64):
        tolerance = TOLERANCE.get(dtype, 1e-6)
        rows, heads = rows_case(V4, dtype, dtype), heads_case(5, 8, 512, 64, dtype)
        found = []
        for device in ("cuda", "cpu"):
            call = on(device, rows)
            out, _ = projections.unrope_heads(*on(device, heads), False)
            found.append([*projections.norm_rope_window(call)[:2], call.cache, out])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, atol=tolerance, rtol=tolerance, equal_nan=True)


@on_both
def test_operators(device: str) -> None:
    """Check schema, shapes and strides that tracing is told, what is written: `torch.library.opcheck`."""
    for dtype in (torch.float32, torch.bfloat16):
        rows, heads = rows_case(FP8_SIZES[0], dtype, torch.uint8), on(device, heads_case(3, 2, 128, 64, dtype))
        rows = rows._replace(down=rows.down.nan_to_num(0.0))
        torch.library.opcheck(projections.norm_rope_window.op, on(device, rows))
        quantized = on(device, rows_case(GROUPS, dtype, dtype)._replace(quantizes=True))
        torch.library.opcheck(projections.norm_rope_window.op, quantized, test_utils=_CHECKS)
        torch.library.opcheck(projections.norm_rope_query_.op, [heads[0].nan_to_num(0.0), 1e-6, heads[3]])
        torch.library.opcheck(projections.unrope_heads.op, [*heads, False])
        torch.library.opcheck(projections.unrope_heads.op, [*heads, True])
        torch.library.opcheck(read_rows.op, on(device, [rows.cache.zero_(), torch.tensor([[1, 2]]), 128, dtype]))


def test_groups_of_a_quantized_output() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        projections.unrope_heads(*heads_case(2, 3, 192, 64, torch.float32), True)


TYPES = {
    **dict.fromkeys(("cos_sin_ptr", "lse_ptr", "sinks_ptr", "bias_ptr", "sums_ptr", "weight_ptr"), "*fp32"),
    **dict.fromkeys(("q_weight_ptr", "kv_weight_ptr", "scales_ptr"), "*fp32"),
    **dict.fromkeys(("request_ptr", "first_position_ptr", "seq_lens_ptr", "states_ptr", "table_ptr"), "*i32"),
    **{"positions_ptr": "*i64", "slots_ptr": "*i64", "eps": "fp32"},
}
ROW = {"WIDTH": 512, "ROPE": 64, "PAIRS": 256}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("cache", ["plain", "u8"])
def test_kernels_compile_for_hopper(dtype: str, cache: str) -> None:
    """Rows move in wide loads and stores, but those of e4m3."""
    types = {**TYPES, "cache_ptr": "*u8" if cache == "u8" else f"*{dtype}", "codes_ptr": "*fp8e4nv"}
    codes = {} if cache == "u8" else {"codes_ptr": None, "scales_ptr": None}
    ptx_for_hopper(kernels.rows_kernel, dtype, {**ROW, "Q_RANK": 1536, "Q_RANK_P": 2048, **codes}, **types)
    if cache == "u8":
        ptx_for_hopper(
            read_pages_kernel, dtype, {"WIDTH": 512, "ROWS": 8, "COLUMNS": 512}, **types, out_ptr=f"*{dtype}"
        )
        ptx_for_hopper(kernels.heads_kernel, dtype, {**ROW, "NUM_HEADS": 64, "ROWS": 1}, **types, out_ptr="*fp8e4nv")
        return
    for kernel, constants in (
        (kernels.query_kernel, {}),
        (kernels.query_kernel, {"eps": None}),
        (kernels.heads_kernel, {"scales_ptr": None}),
    ):
        for rows in (1, 4):
            ptx = ptx_for_hopper(kernel, dtype, {**ROW, "NUM_HEADS": 64, "ROWS": rows, **constants}, **types)
            assert re.search(r"ld\.global\.v[24]\.b32", ptx)
            assert not re.search(r"st\.global\.b(8|16)\b", ptx)
