"""Triton kernels of products in a fixed order, with their launcher; `parallel/fixed.py` specifies them.

The depth has segments, whose width `segment_width` derives from the depth alone. A segment's sum goes from its first
column to its last by one kind of instruction, Hopper's wgmma. The tall operand of 64 rows or more are tokens, or the
weight's rows if tokens are few; both give the same bits. The result is the sum of the segments' sums from the first to
the last. Of many tokens a program computes all segments; of few each segment has programs of its own, and a second
kernel adds the segments' sums. The second kernel needs no counters of arrivals, which products at the same time on
other streams would have to share or to clear. Tiles of any sizes change no bits: they decide which program computes an
element, but not its order of sums.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from dcpmla.parallel.formats import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(8)  # tiles of tokens whose programs are neighbours, and share the weight's rows in the L2
_MAX_SEGMENT = 2048  # columns: narrower segments start more programs, wider ones store and add fewer sums
_MULTIPROCESSORS = 132  # H100s and H200s have as many
_SHARED_BYTES = 221_184  # shared memory of a multiprocessor that the pipelines of its programs may take
# An estimate of times takes these bytes per us (a multiprocessor's loads; stores and loads of segments' sums by the
# whole device) and these us (a program's start and end; the second kernel; the wait for 128 columns). A multiprocessor
# needs _PACE us for 128 columns of one token and one row. An instruction adds the time of 8 rows. A program that could
# share a multiprocessor takes _ALONE times as long alone, because no other program runs while it waits.
_LOADED, _STORED = 1e5, 3e6
_START, _LAUNCH, _WAIT = 2.0, 3.0, 0.1
_PACE, _FP8_PACE, _ALONE = 4.4e-5, 3.45e-5, 1.25


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
    SEGMENT: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a tile of tokens by a tile of the weight's rows; in e4m3 sums of 128 columns are scaled in float32.

    A program sums one segment of SEGMENT columns into out [segments, num_tokens, num_rows] if IS_PARTIAL, and
    otherwise all columns into out [num_tokens, num_rows], segment by segment. SEGMENT is None if there is one only.
    """
    TOKENS: tl.constexpr = x_desc.block_shape[0]
    ROWS: tl.constexpr = weight_desc.block_shape[0]
    DEPTH: tl.constexpr = x_desc.block_shape[1]
    IS_TALL: tl.constexpr = TOKENS < 64  # a wgmma's first operand has 64 rows
    HAS_TOTAL: tl.constexpr = SEGMENT is not None and not IS_PARTIAL
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
    first_step, num_steps = 0, tl.cdiv(num_columns, DEPTH)
    if IS_PARTIAL:
        first_step = tl.program_id(1) * (SEGMENT // DEPTH)
        num_steps = tl.minimum(num_steps - first_step, SEGMENT // DEPTH)
        out_ptr += tl.program_id(1).to(tl.int64) * num_tokens * num_rows
    num_steps = tl.maximum(num_steps, 1)  # if a loop may have no steps, ptxas makes each wgmma wait for the one before
    acc = tl.zeros([ROWS, TOKENS] if IS_TALL else [TOKENS, ROWS], tl.float32)
    total = acc
    for step in tl.range(first_step, first_step + num_steps, num_stages=STAGES):
        x = x_desc.load([first_token, step * DEPTH])
        weight = weight_desc.load([first_row, step * DEPTH])
        if x_scales_ptr is not None:
            scale = tl.load(x_scales_ptr + step * x_scales_stride_block, mask=is_token, other=0.0)
            scale *= tl.load(weight_scales_ptr + step)
            if IS_TALL:
                acc = tl.fma(tl.dot(weight, x.T), tl.broadcast_to(scale[None, :], [ROWS, TOKENS]), acc)
            else:
                acc = tl.fma(tl.dot(x, weight.T), tl.broadcast_to(scale[:, None], [TOKENS, ROWS]), acc)
        elif IS_TALL:
            acc = tl.dot(weight, x.T, acc)
        else:
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")
        if HAS_TOTAL and (step + 1) % (SEGMENT // DEPTH) == 0:
            total += acc
            acc = tl.zeros_like(acc)
    if HAS_TOTAL:
        acc = total + acc
    if IS_TALL:
        acc = acc.T
    at = token.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (row < num_rows)[None, :])


@triton.jit
def sum_segments_kernel(sums_ptr, out_ptr, num_elements, SEGMENTS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Add sums [SEGMENTS, num_elements] in float32, from the first to the last, into out [num_elements]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_element = at < num_elements
    total = tl.zeros([BLOCK_SIZE], tl.float32)
    for _ in tl.static_range(SEGMENTS):
        total += tl.load(sums_ptr + at, mask=is_element, other=0.0)
        sums_ptr += num_elements
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_element)


class Tile(NamedTuple):
    """A program's tile: tokens, rows of the weight and columns at a time; warps, and stages of the pipeline; whether
    the program sums one segment only.
    """

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int
    is_partial: bool


def segment_width(num_columns: int) -> int:
    """Return the columns of a segment: the depth in the fewest equal parts of 2,048 or less, in whole blocks of 128."""
    return triton.cdiv(num_columns, triton.cdiv(num_columns, _MAX_SEGMENT) * BLOCK) * BLOCK


def _list_shapes(num_tokens: int, num_segments: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """List tokens and rows of tiles that were fast for such a product on an H200."""
    is_fp8 = dtype == torch.float8_e4m3fn
    if dtype == torch.float32:
        return [(64, 32)]
    # If tokens are few, tiles of few tokens leave shared memory to the weight. In e4m3 a thread needs the scales of all
    # tokens of a tile, so only the smallest tile pays.
    if num_tokens <= (16 if is_fp8 else 32):
        return [(16 if num_tokens <= 16 else 32, 64)]
    if num_tokens <= 128:
        return [(64, 128), (64, 64)] if is_fp8 else [(64 if num_tokens <= 64 else 128, r) for r in (128, 64, 32, 16)]
    if is_fp8:
        return [(64, 128), (128, 64), (64, 64), (64, 32)]
    return [(128, 256)] * (num_segments == 1) + [(128, 128), (128, 64), (128, 32)]


@lru_cache(1024)
def choose_tile(num_tokens: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a product [num_tokens, num_columns] x [num_rows, num_columns]: the fastest by an estimate.

    Tokens are counted up to a power of two or a number half-way between two, because a warm-up compiles kernels for
    such numbers (`runtime.graph_sizes.warm_up_sizes`).
    """
    power = 1 << (num_tokens - 1).bit_length()
    num_tokens = power if 4 * num_tokens > 3 * power else 3 * power // 4
    num_segments, is_fp8 = triton.cdiv(num_columns, segment_width(num_columns)), dtype == torch.float8_e4m3fn

    def count_programs(tokens: int, rows: int, is_partial: bool) -> int:
        tiles = triton.cdiv(num_tokens, tokens) * triton.cdiv(num_rows, rows)
        return tiles * num_segments if is_partial else tiles

    def count_neighbours(tokens: int, rows: int, is_partial: bool) -> int:
        """Count the programs that a multiprocessor runs at the same time, as its 65,536 registers can hold."""
        num_accumulators = 1 + is_fp8 + (num_segments > 1 and not is_partial)
        registers = num_accumulators * tokens * rows + 28 * 32 * (8 if tokens == 128 else 4)
        num_each = triton.cdiv(count_programs(tokens, rows, is_partial), _MULTIPROCESSORS)
        # Pipelines of scaled products gain nothing by the other half of the memory.
        return max(1, min(max(num_each, 1 + is_fp8), 65_536 // registers, 3 if is_fp8 or num_tokens <= 128 else 2))

    def estimate(candidate: tuple[int, int, bool]) -> float:
        tokens, rows, is_partial = candidate
        load = (min(tokens, num_tokens) + rows) * BLOCK * dtype.itemsize / _LOADED
        turns, neighbours = count_programs(*candidate) / _MULTIPROCESSORS, count_neighbours(*candidate)
        if num_tokens <= 128:
            block = max(load + _WAIT, load * turns)
        else:
            pace = max(load, (_FP8_PACE if is_fp8 else _PACE) * tokens * (rows + 8))
            shared, alone = divmod(math.ceil(turns), neighbours) if neighbours > 1 else (0, math.ceil(turns))
            slower = _ALONE if neighbours > 1 else 1.0
            block = shared * neighbours * pace + alone * max(load + _WAIT, pace * slower)
        time = _START + block * num_columns / BLOCK / (num_segments if is_partial else 1)
        return time + is_partial * (_LAUNCH + 8 * num_tokens * num_rows * num_segments / _STORED)

    shapes = _list_shapes(num_tokens, num_segments, dtype)
    forms = (False, True) if num_segments > 1 else (False,)
    chosen = min(((*shape, is_partial) for is_partial in forms for shape in shapes), key=estimate)
    (tokens, rows, is_partial), neighbours = chosen, count_neighbours(*chosen)
    num_warps = 8 if tokens == 128 and (neighbours == 1 or rows >= 128) else 4
    shared_bytes, column_bytes = _SHARED_BYTES // neighbours, (tokens + rows) * dtype.itemsize
    depth = BLOCK if is_fp8 or tokens < 64 or 4 * BLOCK * column_bytes <= shared_bytes else 64
    depth = 32 if dtype == torch.float32 else depth
    return Tile(tokens, rows, depth, num_warps, min(shared_bytes // (depth * column_bytes), 8), is_partial)


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
    tile, segment = choose_tile(num_tokens, num_rows, width, x.dtype), segment_width(width)
    num_segments = triton.cdiv(width, segment)
    num_tiles = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, tile.rows)
    sums = out.new_empty(num_segments, *out.shape, dtype=torch.float32) if tile.is_partial else out
    fixed_linear_kernel[(num_tiles, num_segments if tile.is_partial else 1)](
        _describe(x, tile.tokens, tile.depth),
        x_scales,
        _describe(weight, tile.rows, tile.depth),
        weight_scale,
        sums,
        num_tokens,
        num_rows,
        width,
        *((0, 0) if x_scales is None else x_scales.stride()),
        0 if weight_scale is None else weight_scale.stride(0),
        SEGMENT=segment if num_segments > 1 else None,
        IS_PARTIAL=tile.is_partial,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,  # a compiler may fuse in one tile's code and not in another's
    )
    if tile.is_partial:
        sum_segments_kernel[(triton.cdiv(out.numel(), 512),)](sums, out, out.numel(), num_segments, BLOCK_SIZE=512)


def _describe(rows: Tensor, num_rows: int, depth: int) -> TensorDescriptor:
    """Describe rows [S, K] for loads by TMA, whose rows begin at multiples of 16 bytes; zeros add nothing to a sum."""
    multiple = 16 // rows.element_size()
    if rows.stride(1) != 1 or rows.stride(0) % multiple or rows.data_ptr() % 16:
        rows = F.pad(rows, (0, -rows.shape[1] % multiple)).clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [num_rows, depth])
