"""Triton kernels that write quantized outputs, from rows or from W_UV's product; `output/formats.py` specifies them.

The product with a W_UV in fp8 may also be written without quantization.

The product keeps a tile of one head's tokens in registers from the first multiplication to the last rounding, so its
values are never in memory in 16 bits. A tile holds whole groups. GPUs of compute capability 8.9 and later.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.output.formats import NVFP4_GROUP, TargetRows
from dcpmla.attention.output.store import store_rows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.triton.device import describe, shared_memory
from dcpmla.parallel.formats import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_ROWS, _COLUMNS = 8, 512  # tile of a program that quantizes rows


@triton.jit(do_not_specialize=["num_rows", "first_row", "padded_end", "scales_stride_group"])
def quantize_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    scale_ptr,
    num_rows,
    first_row,
    padded_end,
    width,
    x_stride,
    scales_stride_row,
    scales_stride_group,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize given rows; one program per tile of rows and columns."""
    first_column = tl.program_id(1) * COLUMNS
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = first + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=(row < num_rows) & (column < width), other=0.0)
    # fmt: off
    store_rows(
        x.to(tl.float32), first_row + first, first_row + num_rows, padded_end, first_column, width - first_column,
        width, values_ptr, scales_ptr, scale_ptr, scales_stride_row, scales_stride_group, GROUP, UE8M0,
    )
    # fmt: on


@triton.jit(do_not_specialize=["num_tokens", "first_row", "padded_end", "scales_stride_group"])
def project_kernel(
    out_desc,
    w_uv_desc,
    w_scales_ptr,
    values_ptr,
    scales_ptr,
    scale_ptr,
    num_tokens,
    num_heads,
    first_row,
    padded_end,
    w_scales_stride_head,
    w_scales_stride_block,
    scales_stride_row,
    scales_stride_group,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """Multiply by W_UV and quantize; one program per (tile of tokens, head, tile of its columns).

    All heads of some tokens come before the next tokens, because they share output rows.
    """
    TOKENS: tl.constexpr = out_desc.block_shape[1]
    COLUMNS: tl.constexpr = w_uv_desc.block_shape[1]
    DEPTH: tl.constexpr = w_uv_desc.block_shape[2]
    NUM_TILES: tl.constexpr = (VALUE + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    first_column, head = program % NUM_TILES * COLUMNS, program // NUM_TILES % num_heads
    first_token = program // NUM_TILES // num_heads * TOKENS
    acc = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for depth in range(0, RANK, DEPTH):
        latents = out_desc.load([head, first_token, depth]).reshape(TOKENS, DEPTH)
        w_uv = w_uv_desc.load([head, first_column, depth]).reshape(COLUMNS, DEPTH)
        if w_scales_ptr is not None:  # one block contains the tile
            block = head * w_scales_stride_head + first_column // _BLOCK * w_scales_stride_block + depth // _BLOCK
            w_uv = (w_uv.to(tl.float32) * tl.load(w_scales_ptr + block)).to(latents.dtype)
        acc = tl.dot(latents, w_uv.T, acc, input_precision="ieee")
    x = acc.to(out_desc.dtype).to(tl.float32)
    first = first_row + first_token.to(tl.int64)
    # fmt: off
    store_rows(
        x, first, first_row + num_tokens, padded_end, head * VALUE + first_column, VALUE - first_column,
        num_heads * VALUE, values_ptr, scales_ptr, scale_ptr, scales_stride_row, scales_stride_group, GROUP, UE8M0,
    )
    # fmt: on


class Tiling(NamedTuple):
    """A tiling of the product: tokens and depth of a tile, warps of a program, stages of its pipeline."""

    tokens: int
    depth: int
    num_warps: int
    num_stages: int


# Smallest first; the largest tiling that leaves enough programs is chosen. With few tokens W_UV's loads dominate, and
# more stages keep more loads in flight. Measured on H200s.
_ENOUGH_PROGRAMS = 128  # about one a multiprocessor
TILINGS = (Tiling(16, 128, 4, 5), Tiling(32, 128, 4, 5), Tiling(64, 64, 4, 4), Tiling(128, 64, 8, 3))
_FIRST_TALL = 2  # tilings from here on use one instruction of Hopper, so that tokens have the same bits in each


def quantize_rows(x: Tensor, into: TargetRows) -> None:
    """Compute `ops.write_rows_` in one kernel."""
    (num_rows, width), (first_row, values, scales, scale, ue8m0) = x.shape, into
    if num_rows == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    quantize_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _COLUMNS))](
        x,
        values,
        scales,
        scale,
        num_rows,
        first_row,
        _padded_end(first_row + num_rows, values),
        width,
        x.stride(0),
        *_strides(scales),
        GROUP=_group_of(values, scales),
        UE8M0=ue8m0,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )


def project_rows(call: ValueProjection, into: TargetRows) -> None:
    """Compute `ops.project_rows_` in one kernel."""
    (out, w_uv, w_scales, is_deterministic), (first_row, values, scales, scale, ue8m0) = call, into
    (num_tokens, num_heads, rank), value = out.shape, w_uv.shape[1]
    if num_tokens == 0:
        return
    columns = min(128, max(16, triton.next_power_of_2(value)))
    num_tiles = num_heads * triton.cdiv(value, columns)
    tilings = TILINGS[_FIRST_TALL:] if is_deterministic else TILINGS
    enough = (
        tiling for tiling in reversed(tilings) if triton.cdiv(num_tokens, tiling.tokens) * num_tiles >= _ENOUGH_PROGRAMS
    )
    tiling = next((tiling for tiling in enough if tiling.tokens < 2 * num_tokens), tilings[0])
    depth = min(tiling.depth, max(16, triton.next_power_of_2(rank)))
    stage_bytes = (tiling.tokens + columns) * depth * out.element_size()
    project_kernel[(triton.cdiv(num_tokens, tiling.tokens) * num_tiles,)](
        describe(out.transpose(0, 1), [1, tiling.tokens, depth]),
        describe(w_uv, [1, columns, depth]),
        w_scales,
        values,
        scales,
        scale,
        num_tokens,
        num_heads,
        first_row,
        _padded_end(first_row + num_tokens, values),
        *((0, 0) if w_scales is None else w_scales.stride()[:2]),
        *_strides(scales),
        VALUE=value,
        RANK=rank,
        GROUP=0 if values.dtype == out.dtype else _group_of(values, scales),
        UE8M0=ue8m0,
        num_warps=tiling.num_warps,
        num_stages=max(1, min(tiling.num_stages, (shared_memory(out.device) - 1024) // stage_bytes)),
    )


def project_values(call: ValueProjection) -> Tensor:
    """Compute `projections.project_values` in one kernel."""
    values = call.new_values()
    project_rows(call, TargetRows(0, values))
    return values


def _group_of(values: Tensor, scales: Tensor | None) -> int:
    """Return how many columns share a scale; 1, the kernels' word for fp8, where one scale is given for all."""
    if scales is None:
        return 1
    return NVFP4_GROUP if values.dtype == torch.uint8 else values.shape[1] // scales.shape[1]


def _strides(scales: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if scales is None else scales.stride()


def _padded_end(end: int, values: Tensor) -> int:
    """Return the row up to which a write that ends before row `end` sets nvfp4's scales."""
    return triton.cdiv(end, 128) * 128 if end == len(values) else end
