"""Triton kernels of products with weights that have scales for groups of columns: e4m3 (MXFP8), and 4 bits.

`parallel/group_linear.py` specifies them. Hopper's matrix units take no such scales, so values are dequantized to
16 bits. With few rows the kernel does so in registers; with many rows a whole weight is dequantized into memory first.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from dcpmla.parallel.formats import BLOCK, GROUP, Quantized
from dcpmla.parallel.kernels.linear import NUM_WARPS, TILE_ROWS, describe, finish_tile
from dcpmla.parallel.kernels.packed import by_halves, dequantize, finish, spread, subtract_zeros

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)


class Tiling(NamedTuple):
    """A tiling of a product with few rows.

    Attributes:
        tokens: Rows of a tile.
        stages: Stages of its pipeline.
        programs: Maximum programs that share the columns.
        by_halves: Whether rows come in the order of packed codes, which takes a kernel; else a tile puts them in order.
        num_warps: Warps of a program for packed codes.
    """

    tokens: int
    stages: int
    programs: int
    by_halves: bool = True
    num_warps: int = NUM_WARPS


# Measured on an H200 for weights in 4 bits, like the number of rows up to which the weight is dequantized in registers.
# A tile has room for all rows, because each tile dequantizes the weight anew. Two warps take `mma`, whose left side
# comes from shared memory in 32 bits instead of the 16 of `wgmma`: 24 to 34 % fewer instructions.
_TILINGS = Tiling(16, 4, 640, False, 2), Tiling(32, 3, 640), Tiling(64, 3, 400), Tiling(128, 3, 320)
_FEW_TOKENS = _TILINGS[-1].tokens
_LEAST_BLOCKS = 7  # blocks of columns of a part
_DEQUANTIZED = 8192  # values of a program


@triton.jit
def scale_groups(codes, scales, dtype: tl.constexpr):
    """Return the values of codes e4m3 [N, K] with e8m0 scales, uint8 [N, K / 32]."""
    N: tl.constexpr = codes.shape[0]
    K: tl.constexpr = codes.shape[1]
    factors = scales.to(tl.uint32) << 23
    factors = tl.where(factors == 0, 1 << 22, factors).to(tl.uint32).to(tl.float32, bitcast=True)  # 2^-127
    factors = factors[:, :, None].broadcast_to([N, K // _GROUP, _GROUP]).reshape(N, K)
    return (codes.to(tl.float32) * factors).to(dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def group_linear_kernel(
    x_desc,
    weight_desc,
    weight_scales_ptr,
    weight_zeros_ptr,
    weight_factors_ptr,
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    num_tokens,
    num_rows,
    num_columns,
    group_rows,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a tile of the weight's rows by a tile of tokens, as `linear_kernel` does.

    x_desc: Rows in tiles of 128 columns; for uint8 also in tiles of 64, in the order of `by_halves`.
    weight_desc: Codes e4m3 in tiles [ROWS, 128], or uint8 in tiles [ROWS, 64].
    weight_scales_ptr, weight_zeros_ptr, weight_factors_ptr: The fields of `Quantized`, in groups of GROUP columns.
    """
    IS_PACKED: tl.constexpr = weight_desc.dtype == tl.uint8
    TILE_BYTES: tl.constexpr = weight_desc.block_shape[1]
    ROWS: tl.constexpr = weight_desc.block_shape[0]
    TOKENS: tl.constexpr = x_desc.block_shape[0]
    # A scale multiplies its group's sum, which is less work for few tokens than multiplying each value of the weight.
    SCALES_SUMS: tl.constexpr = IS_PACKED and GROUP == _BLOCK and TOKENS <= 32
    first_token, first_row = tl.program_id(0) * TOKENS, tl.program_id(1) * ROWS
    num_blocks, num_groups = tl.cdiv(num_columns, _BLOCK), num_columns // GROUP
    part = tl.cdiv(num_blocks, SPLITS)
    first = tl.program_id(2) * part
    first_x_block = first_row // group_rows * num_blocks
    row = first_row + tl.arange(0, ROWS)
    group = tl.arange(0, _BLOCK // GROUP)
    scales_at = row.to(tl.int64)[:, None] * num_groups + group[None, :]
    is_row = (row < num_rows)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in tl.range(first, tl.minimum(first + part, num_blocks), num_stages=STAGES):
        codes = weight_desc.load([first_row, block * TILE_BYTES])
        x = x_desc.load([first_token, first_x_block * _BLOCK + block * x_desc.block_shape[1]])
        first_group = block * (_BLOCK // GROUP)
        is_scale = is_row & (first_group + group < num_groups)[None, :]
        scales, zeros = tl.load(weight_scales_ptr + scales_at + first_group, mask=is_scale, other=0.0), None
        if weight_zeros_ptr is not None:
            zeros = tl.load(weight_zeros_ptr + scales_at + first_group, mask=is_scale, other=0)
        if IS_PACKED:
            if SCALES_SUMS:
                if weight_zeros_ptr is not None:
                    zeros = spread(zeros, ROWS, TILE_BYTES)
                low, high = subtract_zeros(codes, zeros, x.dtype)
            else:
                low, high = dequantize(codes, scales, zeros, x.dtype)
            if x_desc.block_shape[1] == TILE_BYTES:
                even, odd = x, x_desc.load([first_token, num_columns // 2 + block * TILE_BYTES])
            else:
                even, odd = x.reshape(TOKENS, TILE_BYTES, 2).split()
            if SCALES_SUMS:
                acc = tl.fma(tl.dot(high, odd.T, tl.dot(low, even.T)), scales.to(tl.float32), acc)
            else:
                acc = finish(tl.dot(high, odd.T, tl.dot(low, even.T, acc)))
        else:
            acc = finish(tl.dot(scale_groups(codes, scales, x.dtype), x.T, acc))
    if weight_factors_ptr is not None:
        acc *= tl.load(weight_factors_ptr + row, mask=row < num_rows, other=0)[:, None]
    finish_tile(acc, out_ptr, partials_ptr, arrivals_ptr, num_tokens, num_rows, SPLITS)


@triton.jit
def dequantize_groups_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    out_ptr,
    num_groups,
    groups_per_row,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Dequantize a tile of groups."""
    GROUP_BYTES: tl.constexpr = GROUP // 2 if codes_ptr.dtype.element_ty == tl.uint8 else GROUP
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    is_group = group < num_groups
    # A thread loads the codes of the eight values that it stores at once: none moves to another thread.
    codes_ptr += group * GROUP_BYTES + tl.arange(0, GROUP_BYTES)[None, :]
    codes = tl.load(tl.max_contiguous(codes_ptr, (1, 8 * GROUP_BYTES // GROUP)), mask=is_group)
    scales, zeros = tl.load(scales_ptr + group, mask=is_group, other=0.0), None
    if GROUP_BYTES == GROUP:
        values = scale_groups(codes, scales, out_ptr.dtype.element_ty)
    else:
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + group, mask=is_group, other=0)
        low, high = dequantize(codes, scales, zeros, out_ptr.dtype.element_ty)
        values = tl.join(low, high).reshape(GROUPS, GROUP)
    if factors_ptr is not None:
        values = values.to(tl.float32) * tl.load(factors_ptr + group // groups_per_row, mask=is_group, other=0)
    at = group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=is_group)


def group_linear(x: Tensor, weight: Quantized, arrivals: Tensor) -> Tensor:
    """Compute `group_linear.group_linear`: many rows by cuBLAS, few in one kernel."""
    if len(x) <= _FEW_TOKENS:
        return multiply(x, weight, arrivals)
    values = dequantize_groups(weight, x.dtype)
    num_groups = x.shape[1] // values.shape[1]
    if num_groups == 1:
        return F.linear(x, values)
    parts = x.unflatten(1, (num_groups, -1)), values.unflatten(0, (num_groups, -1))
    return torch.einsum("tgk,gnk->tgn", *parts).flatten(1)


def multiply(x: Tensor, weight: Quantized, arrivals: Tensor) -> Tensor:
    """Compute `group_linear.group_linear` by the Triton kernel."""
    num_tokens, num_rows, held = len(x), len(weight.codes), weight.format
    width = weight.codes.shape[1] * (1 + held.is_packed)
    out = x.new_empty(num_tokens, num_rows)
    if num_tokens == 0:
        return out
    tiling = next((each for each in _TILINGS if num_tokens <= each.tokens), _TILINGS[-1])
    tokens, stages, programs, is_ordered, num_warps = tiling
    is_ordered &= held.is_packed
    num_tiles, splits = triton.cdiv(num_tokens, tokens) * triton.cdiv(num_rows, TILE_ROWS), 1
    # The counters of arrivals are enough for one tile of tokens.
    while num_tokens <= tokens and 2 * splits * _LEAST_BLOCKS <= width // BLOCK and 2 * splits * num_tiles <= programs:
        splits *= 2
    grid = triton.cdiv(num_tokens, tokens), triton.cdiv(num_rows, TILE_ROWS), splits
    num_partials = num_tiles * splits * TILE_ROWS * tokens if splits > 1 else 0
    group_linear_kernel[grid](
        describe(by_halves(x) if is_ordered else x.contiguous(), tokens, BLOCK // (1 + is_ordered)),
        describe(weight.codes, TILE_ROWS, BLOCK // (1 + held.is_packed)),
        *weight[1:],
        out,
        torch.empty(num_partials, dtype=torch.float32, device=x.device),
        arrivals,
        num_tokens,
        num_rows,
        width,
        num_rows * width // x.shape[1],
        GROUP=held.columns,
        SPLITS=splits,
        STAGES=stages,
        num_warps=num_warps if held.is_packed else NUM_WARPS,
    )
    return out


def dequantize_groups(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the values of a contiguous weight."""
    (num_rows, groups_per_row), columns = weight.scales.shape, weight.format.columns
    tile = _DEQUANTIZED // columns  # groups
    out = torch.empty(num_rows, groups_per_row * columns, dtype=dtype, device=weight.codes.device)
    sizes = weight.scales.numel(), groups_per_row
    grid = (triton.cdiv(sizes[0], tile),)
    dequantize_groups_kernel[grid](*weight, out, *sizes, GROUP=columns, GROUPS=tile)
    return out
