"""Triton kernels of products with weights in e4m3 that have a scale per 32 columns.

`parallel/group_linear.py` specifies them. Hopper's matrix units take no such scales. Values are dequantized to
bfloat16, which represents them exactly: in registers for few rows, when the weight's bytes take the time, and in memory
for many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from dcpmla.parallel.formats import BLOCK, GROUP, Quantized
from dcpmla.parallel.kernels.linear import NUM_STAGES, NUM_WARPS, TILE_ROWS, choose_tiling, describe, finish_tile

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)
_FEW_TOKENS = 128  # rows up to which the weight is dequantized in registers; not measured


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
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    num_tokens,
    num_rows,
    num_columns,
    group_rows,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a tile of the weight's rows by a tile of tokens, as `linear_kernel` does."""
    ROWS: tl.constexpr = weight_desc.block_shape[0]
    TOKENS: tl.constexpr = x_desc.block_shape[0]
    first_token, first_row = tl.program_id(0) * TOKENS, tl.program_id(1) * ROWS
    num_blocks = num_columns // _BLOCK
    part = tl.cdiv(num_blocks, SPLITS)
    first = tl.program_id(2) * part
    first_x_block = first_row // group_rows * num_blocks
    row = first_row + tl.arange(0, ROWS)
    group = tl.arange(0, _BLOCK // _GROUP)
    weight_scales_ptr += row.to(tl.int64)[:, None] * (num_columns // _GROUP) + group[None, :]
    is_row = (row < num_rows)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in tl.range(first, tl.minimum(first + part, num_blocks), num_stages=STAGES):
        codes = weight_desc.load([first_row, block * _BLOCK])
        x = x_desc.load([first_token, (first_x_block + block) * _BLOCK])
        scales = tl.load(weight_scales_ptr + block * (_BLOCK // _GROUP), mask=is_row, other=0)
        acc = tl.dot(scale_groups(codes, scales, x.dtype), x.T, acc)
    finish_tile(acc, out_ptr, partials_ptr, arrivals_ptr, num_tokens, num_rows, SPLITS)


@triton.jit
def dequantize_groups_kernel(codes_ptr, scales_ptr, out_ptr, num_groups, GROUPS: tl.constexpr):
    """Dequantize a tile of groups."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_group = group < num_groups
    codes = tl.load(codes_ptr + at, mask=is_group)
    scales = tl.load(scales_ptr + group, mask=is_group, other=0)
    tl.store(out_ptr + at, scale_groups(codes, scales, out_ptr.dtype.element_ty), mask=is_group)


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
    num_tokens, (num_rows, width) = len(x), weight.codes.shape
    out = x.new_empty(num_tokens, num_rows)
    if num_tokens == 0:
        return out
    tokens, splits = choose_tiling(num_tokens, num_rows, width)
    grid = triton.cdiv(num_tokens, tokens), triton.cdiv(num_rows, TILE_ROWS), splits
    num_partials = grid[0] * grid[1] * splits * TILE_ROWS * tokens if splits > 1 else 0
    group_linear_kernel[grid](
        describe(x.contiguous(), tokens),
        describe(weight.codes, TILE_ROWS),
        weight.scales,
        out,
        torch.empty(num_partials, dtype=torch.float32, device=x.device),
        arrivals,
        num_tokens,
        num_rows,
        width,
        num_rows * width // x.shape[1],
        SPLITS=splits,
        STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
    )
    return out


def dequantize_groups(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the values of contiguous MXFP8."""
    codes, scales, *_ = weight
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    groups = 64
    dequantize_groups_kernel[(triton.cdiv(scales.numel(), groups),)](codes, scales, out, scales.numel(), GROUPS=groups)
    return out
