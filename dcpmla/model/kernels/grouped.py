"""Triton kernel that multiplies rows by the weights of their experts (a grouped product), in 16 or 8 bits.

For few rows the weights are the left, wide side of a product, out^T = W x^T, which wastes little. Weights in fp8
multiply rows in fp8, and each 128 of the depth is scaled by both sides' scales in float32.
"""

import triton
import triton.language as tl

from dcpmla.model.kernels.glu import activate
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.kernels.packed import finish

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def find_routes(experts_ptr, routes_ptr, tile, NUM_SUMMED: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the first block of a tile, and its expert and routes [ROWS] int32, -1 for none; arguments as
    `grouped_product_kernel`'s.
    """
    row = tl.arange(0, ROWS)
    if routes_ptr is None:
        block = tile * NUM_SUMMED
        routes = tl.where(row == 0, block, -1)
    else:
        block = tile * ROWS // BLOCK_ROWS
        routes = tl.load(routes_ptr + tile * ROWS + row)
    return block, tl.load(experts_ptr + block), routes


@triton.jit
def _multiply(x, x_scales, w, w_scales, acc, TRANSPOSED: tl.constexpr):
    """Return acc + x w^T [ROWS, COLUMNS], or all transposed; fp8 times the scales, in float32.

    `model.hopper.consumers` takes the same steps in the same order: a result has the same bits from either kernel.
    """
    if w.dtype == tl.float8e4nv:
        acc = tl.fma(tl.dot(w, x.T) if TRANSPOSED else tl.dot(x, w.T), x_scales * w_scales, acc)
    elif TRANSPOSED:
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["x_scales_stride_block"])
def grouped_product_kernel(
    x_ptr,
    x_scales_ptr,
    x_scales_stride_row,
    x_scales_stride_block,
    w_desc,
    w_scales_ptr,
    experts_ptr,
    routes_ptr,
    expert_weights_ptr,
    out_ptr,
    gate_bound,
    up_bound,
    TOP_K: tl.constexpr,
    NUM_SUMMED: tl.constexpr,
    IS_SMOOTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply rows of a block of routes by their expert's weights; one program per tile of rows and of W's.

    w_desc: [E, PARTS, WIDTH, K], in tiles [1, 1, COLUMNS, DEPTH]. With GATED, the two parts are gate and up of a
        gated linear unit, whose result takes the route's weight. One part is a plain product. Tiles [1, 2, ..] of few
        rows are one product of both.
    x_ptr: Rows; a route reads row route // TOP_K.
    experts_ptr: int32, expert of each block; a block of an id outside [0, E) is left out.
    routes_ptr: [blocks, BLOCK_ROWS] int32, -1 where a block has fewer; None: block i is route i alone.
    NUM_SUMMED: Number of consecutive blocks that are summed to one row of the result, in a plain product without
        routes_ptr.
    """
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    NUM_STEPS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    NUM_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    SUMS: tl.constexpr = routes_ptr is None and not GATED
    TRANSPOSED: tl.constexpr = ROWS < 64
    IS_STACKED: tl.constexpr = w_desc.block_shape[1] == 2
    N: tl.constexpr = w_desc.block_shape[1] * COLUMNS
    first_column = tl.program_id(0) % NUM_TILES * COLUMNS
    tile = tl.program_id(0) // NUM_TILES
    block, expert, routes = find_routes(experts_ptr, routes_ptr, tile, NUM_SUMMED, ROWS, BLOCK_ROWS)
    is_left_out = (expert < 0) | (expert >= w_desc.shape[0])
    if is_left_out and not SUMS:
        return
    is_row, source = routes >= 0, routes // TOP_K
    acc = tl.zeros([N, ROWS] if TRANSPOSED else [ROWS, COLUMNS], tl.float32)
    up = acc
    for step in tl.range(NUM_SUMMED * NUM_STEPS, num_stages=STAGES):
        depth = step % NUM_STEPS * DEPTH
        if SUMS:
            # A route that is left out adds nothing: its weights are out of bounds, and are zero without a read.
            source = block + step // NUM_STEPS + tl.arange(0, ROWS)
            expert = tl.load(experts_ptr + block + step // NUM_STEPS)
            is_row = tl.arange(0, ROWS) < tl.where((expert >= 0) & (expert < w_desc.shape[0]), 1, 0)
        k = depth + tl.arange(0, DEPTH)
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * K + k[None, :]
        x = tl.load(x_ptrs, mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        x_scales, w_scales, up_scales = None, None, None
        if w_desc.dtype == tl.float8e4nv:
            num_blocks: tl.constexpr = K // _BLOCK
            x_scales_ptrs = x_scales_ptr + source * x_scales_stride_row + depth // _BLOCK * x_scales_stride_block
            x_scales = tl.load(x_scales_ptrs, mask=is_row, other=0.0)
            x_scales = x_scales[None, :] if TRANSPOSED else x_scales[:, None]
            row_block = expert * w_desc.shape[1].to(tl.int32) * (WIDTH // _BLOCK) + first_column // _BLOCK
            scale_ptr = w_scales_ptr + row_block * num_blocks + depth // _BLOCK
            is_expert = (expert >= 0) & (expert < w_desc.shape[0])
            w_scales = tl.load(scale_ptr, mask=is_expert, other=0.0)
            if GATED:
                up_scales = tl.load(scale_ptr + WIDTH // _BLOCK * num_blocks)
            if IS_STACKED:
                w_scales = tl.where(tl.arange(0, 2 * COLUMNS) < COLUMNS, w_scales, up_scales)[:, None]
        w = w_desc.load([expert, 0, first_column, depth]).reshape(N, DEPTH)
        acc = _multiply(x, x_scales, w, w_scales, acc, TRANSPOSED)
        if IS_STACKED:
            acc = finish(acc)  # both parts' tiles become one in registers
        elif GATED:
            w = w_desc.load([expert, 1, first_column, depth]).reshape(N, DEPTH)
            up = _multiply(x, x_scales, w, up_scales, up, TRANSPOSED)
    if IS_STACKED:
        acc, up = acc.reshape(2, COLUMNS, ROWS).permute(1, 2, 0).split()
    if TRANSPOSED:
        acc, up = acc.T, up.T
    is_row = routes >= 0
    if GATED:
        expert_weights = tl.load(expert_weights_ptr + routes, mask=is_row, other=0.0)
        acc = activate(acc, up, gate_bound, up_bound, IS_SMOOTH) * expert_weights[:, None]
    column = first_column + tl.arange(0, COLUMNS)
    out_ptrs = out_ptr + (routes // NUM_SUMMED).to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < WIDTH)[None, :])
