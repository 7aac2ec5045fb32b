"""Triton kernel of products with block-quantized weights, with its launcher; `parallel/fp8.py` specifies it."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.kernels import fixed
from dcpmla.parallel.kernels.quantize import quantize_rows
from dcpmla.parallel.quantized import Fp8Product

_BLOCK = tl.constexpr(BLOCK)
# Rows, and numbers of a result, past which cuBLAS fills an H200 and is faster than the Triton kernel.
SCALED_MM_TOKENS, SCALED_MM_SIZE = 128, 3 << 17


@triton.jit(do_not_specialize=["num_tokens", "x_scales_stride_block"])
def linear_kernel(
    x_desc,
    x_scales_ptr,
    weight_desc,
    weight_scales_ptr,
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    num_tokens,
    num_rows,
    num_columns,
    group_rows,
    x_scales_stride_token,
    x_scales_stride_block,
    weight_scales_stride,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a tile of the weight's rows by a tile of tokens, over one of SPLITS parts of the columns.

    The weight is the wide operand: a few tokens fill no tile of a matrix unit's tall side. With several parts, the
    last program to arrive at a tile sums all parts in a fixed order, so the order of arrival changes no result.
    """
    ROWS: tl.constexpr = weight_desc.block_shape[0]
    TOKENS: tl.constexpr = x_desc.block_shape[0]
    first_token, first_row = tl.program_id(0) * TOKENS, tl.program_id(1) * ROWS
    num_blocks = num_columns // _BLOCK
    part = tl.cdiv(num_blocks, SPLITS)
    first = tl.program_id(2) * part
    first_x_block = first_row // group_rows * num_blocks
    token = first_token + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    x_scales_ptr += token * x_scales_stride_token + first_x_block * x_scales_stride_block
    weight_scales_ptr += first_row // _BLOCK * weight_scales_stride
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in tl.range(first, tl.minimum(first + part, num_blocks), num_stages=STAGES):
        weight = weight_desc.load([first_row, block * _BLOCK])
        x = x_desc.load([first_token, (first_x_block + block) * _BLOCK])
        scale = tl.load(x_scales_ptr + block * x_scales_stride_block, mask=is_token, other=0.0)
        scale *= tl.load(weight_scales_ptr + block)
        acc += tl.dot(weight, x.T) * scale[None, :]
    finish_tile(acc, out_ptr, partials_ptr, arrivals_ptr, num_tokens, num_rows, SPLITS)


@triton.jit
def finish_tile(acc, out_ptr, partials_ptr, arrivals_ptr, num_tokens, num_rows, SPLITS: tl.constexpr):
    """Store a tile [ROWS, TOKENS] of the result [num_tokens, num_rows], or a part of its sum and, in the last program
    to arrive, the sum.
    """
    ROWS: tl.constexpr = acc.shape[0]
    TOKENS: tl.constexpr = acc.shape[1]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    is_last = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        partials_ptr += tile * (SPLITS * ROWS * TOKENS)
        partials_ptr += tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(partials_ptr + tl.program_id(2) * (ROWS * TOKENS), acc)
        tl.debug_barrier()  # all threads store before one thread signals the arrival
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrivals_ptr + tile, 0)  # the next launch starts at 0
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            for split in tl.static_range(SPLITS):
                acc += tl.load(partials_ptr + split * (ROWS * TOKENS), cache_modifier=".cg")
    if is_last:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        at = token.to(tl.int64)[:, None] * num_rows + row[None, :]
        is_stored = is_token[:, None] & (row < num_rows)[None, :]
        tl.store(out_ptr + at, acc.T.to(out_ptr.dtype.element_ty), mask=is_stored)


class Tiling(NamedTuple):
    """A tiling of the product: tokens of a tile, parts of the columns."""

    tokens: int
    splits: int


TILE_ROWS, NUM_WARPS, NUM_STAGES = 64, 4, 4  # the same in every program
_PART = 7  # minimum blocks per part


def choose_tiling(num_tokens: int, num_rows: int, width: int) -> Tiling:
    """Return the tiling for a product [num_tokens, width] x [num_rows, width]. Measured on an H200.

    Small tiles in many parts keep most loads in flight. A tile of 128 tokens is large enough to hide its loads by its
    products, and costly to sum.
    """
    if num_tokens > BLOCK:
        return Tiling(BLOCK, 1)
    if num_tokens > 64:
        tokens, max_programs = BLOCK, 256
    else:
        tokens, max_programs = (16 if num_tokens <= 32 else 32), 640
    num_tiles = triton.cdiv(num_rows, TILE_ROWS) * triton.cdiv(num_tokens, tokens)
    splits = 1
    while 2 * splits * _PART <= width // BLOCK and 2 * splits * num_tiles <= max_programs:
        splits *= 2
    return Tiling(tokens, splits)


def fp8_linear(call: Fp8Product) -> Tensor:
    """Compute `fp8.fp8_linear`: large products by cuBLAS, others in one kernel."""
    x, x_scales, weight, weight_scale, arrivals, dtype, is_deterministic = call
    if x_scales is None:
        x, x_scales = quantize_rows(x)
    if is_deterministic:
        out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
        fixed.multiply(x, x_scales, weight, weight_scale, out)
        return out
    is_large = len(x) > SCALED_MM_TOKENS or len(x) * len(weight) >= SCALED_MM_SIZE
    is_plain = x.shape[1] == weight.shape[1] and dtype == torch.bfloat16 and len(weight) % 16 == 0
    if is_large and is_plain and _has_scaled_mm(x.device):
        return _scaled_mm(x, x_scales, weight, weight_scale)
    return multiply(x, x_scales, weight, weight_scale, arrivals, dtype)


def multiply(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scale: Tensor, arrivals: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute `fp8.fp8_linear` of quantized rows by the Triton kernel."""
    num_tokens, (num_rows, width) = len(x), weight.shape
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    tokens, splits = choose_tiling(num_tokens, num_rows, width)
    grid = triton.cdiv(num_tokens, tokens), triton.cdiv(num_rows, TILE_ROWS), splits
    num_partials = grid[0] * grid[1] * splits * TILE_ROWS * tokens if splits > 1 else 0
    linear_kernel[grid](
        describe(x.contiguous(), tokens),
        x_scales,
        describe(weight, TILE_ROWS),
        weight_scale,
        out,
        torch.empty(num_partials, dtype=torch.float32, device=x.device),
        arrivals,
        num_tokens,
        num_rows,
        width,
        num_rows * width // x.shape[1],
        *x_scales.stride(),
        weight_scale.stride(0),
        SPLITS=splits,
        STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
    )
    return out


def describe(rows: Tensor, num_rows: int, num_columns: int = BLOCK) -> TensorDescriptor:
    """Describe contiguous rows for TMA loads of num_rows rows of one block, or of other columns."""
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [num_rows, num_columns])


@cache
def _has_scaled_mm(device: torch.device) -> bool:
    """Return whether torch multiplies tiles of 1 x 128 by blocks of 128 x 128: by cuBLAS 12.9 and later on Hopper."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def _scaled_mm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Compute `fp8_linear` in bfloat16 by cuBLAS, which needs a multiple of 4 rows, and scales column by column."""
    num_tokens = len(x)
    padding = -num_tokens % 4
    if padding:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, padding)).view(x.dtype)
    if padding or x_scales.stride() != (1, len(x)):
        x_scales = F.pad(x_scales.t(), (0, padding)).contiguous().t()
    blocks = weight_scale.t()
    wanted = -(-len(blocks) // 4) * 4  # columns of a block row's scales
    if blocks.stride(1) != wanted:
        blocks = F.pad(weight_scale, (0, wanted - len(blocks))).t()
    else:
        blocks = blocks.as_strided((wanted, blocks.shape[1]), (1, wanted))
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(x, weight.t(), x_scales, recipes[0], blocks, recipes[1], output_dtype=torch.bfloat16)
    return out[:num_tokens]
