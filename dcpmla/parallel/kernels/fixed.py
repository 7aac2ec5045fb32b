"""Triton kernel of products in a fixed order, with its launcher; `parallel/fixed.py` specifies it.

An element of the result is one sum over the depth, from the first column to the last, by one kind of instruction: a
tile has 64 tokens or more, so that Hopper multiplies few rows by wgmma, too. Tiles of any other sizes change no bits:
they decide which program computes an element, not how.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from dcpmla.parallel.quantized import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(8)  # tiles of tokens whose programs are neighbours, and share the weight's rows in the L2
_ENOUGH_PROGRAMS = 112  # about one for each multiprocessor of an H100
_SHARED_BYTES = 196_608  # shared memory that a program's pipeline may take


@triton.jit(do_not_specialize=["num_tokens", "x_scales_stride_block"])
def fixed_linear_kernel(
    x_desc,
    x_scales_ptr,
    weight_desc,
    weight_scales_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_columns,
    x_scales_stride_token,
    x_scales_stride_block,
    weight_scales_stride,
    STAGES: tl.constexpr,
):
    """Multiply a tile of tokens by a tile of the weight's rows; in e4m3 sums of 128 columns are scaled in float32."""
    TOKENS: tl.constexpr = x_desc.block_shape[0]
    ROWS: tl.constexpr = weight_desc.block_shape[0]
    DEPTH: tl.constexpr = x_desc.block_shape[1]
    num_token_tiles, num_row_tiles = tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS)
    group = tl.program_id(0) // (_GROUP * num_row_tiles)
    in_group = tl.program_id(0) % (_GROUP * num_row_tiles)
    group_size = tl.minimum(num_token_tiles - group * _GROUP, _GROUP)
    first_token = (group * _GROUP + in_group % group_size) * TOKENS
    first_row = in_group // group_size * ROWS
    token, row = first_token + tl.arange(0, TOKENS), first_row + tl.arange(0, ROWS)
    is_token = token < num_tokens
    if x_scales_ptr is not None:
        x_scales_ptr += token * x_scales_stride_token
        weight_scales_ptr += first_row // _BLOCK * weight_scales_stride
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for step in tl.range(tl.cdiv(num_columns, DEPTH), num_stages=STAGES):
        x = x_desc.load([first_token, step * DEPTH])
        weight = weight_desc.load([first_row, step * DEPTH])
        if x_scales_ptr is not None:
            scale = tl.load(x_scales_ptr + step * x_scales_stride_block, mask=is_token, other=0.0)
            scale *= tl.load(weight_scales_ptr + step)
            acc += tl.dot(x, weight.T) * scale[:, None]
        else:
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    at = token.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (row < num_rows)[None, :])


class Tile(NamedTuple):
    """A program's tile: tokens, rows of the weight and columns at a time; warps, and stages of the pipeline."""

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int


def choose_tile(num_tokens: int, num_rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a product [num_tokens, K] x [num_rows, K]: as large as leaves enough programs."""
    if dtype == torch.float32:
        return Tile(64, 32, 32, 4, 3)
    is_fp8, tokens = dtype == torch.float8_e4m3fn, 64 if num_tokens <= 64 else 128
    widest = 128 if is_fp8 or tokens == 64 else 256
    num_tiles = triton.cdiv(num_tokens, tokens)
    sizes = (widest >> shift for shift in range(5) if widest >> shift >= 16)
    rows = next((size for size in sizes if num_tiles * triton.cdiv(num_rows, size) >= _ENOUGH_PROGRAMS), 16)
    depth = 128 if is_fp8 or rows < 128 else 64
    num_stages = _SHARED_BYTES // ((tokens + rows) * depth * dtype.itemsize)
    return Tile(tokens, rows, depth, tokens // 16, min(num_stages, 16 if is_fp8 else 8))


def fixed_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `fixed.fixed_linear`."""
    out = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
    multiply(x.flatten(0, -2), None, weight, None, out.view(-1, len(weight)))
    return out


def multiply(x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scale: Tensor | None, out: Tensor) -> None:
    """Write the product of rows x [T, K] and a weight [N, K] into out [T, N]; with scales of both in e4m3, as
    `fp8.fp8_linear` takes them.
    """
    num_tokens, (num_rows, width) = len(x), weight.shape
    if num_tokens == 0:
        return
    tile = choose_tile(num_tokens, num_rows, x.dtype)
    fixed_linear_kernel[(triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, tile.rows),)](
        _describe(x, tile.tokens, tile.depth),
        x_scales,
        _describe(weight, tile.rows, tile.depth),
        weight_scale,
        out,
        num_tokens,
        num_rows,
        width,
        *((0, 0) if x_scales is None else x_scales.stride()),
        0 if weight_scale is None else weight_scale.stride(0),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,  # a compiler may fuse in one tile's code and not in another's
    )


def _describe(rows: Tensor, num_rows: int, depth: int) -> TensorDescriptor:
    """Describe rows [S, K] for loads by TMA, whose rows begin at multiples of 16 bytes; zeros add nothing to a sum."""
    multiple = 16 // rows.element_size()
    if rows.stride(1) != 1 or rows.stride(0) % multiple or rows.data_ptr() % 16:
        rows = F.pad(rows, (0, -rows.shape[1] % multiple)).clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [num_rows, depth])
