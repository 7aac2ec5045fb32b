"""Triton kernel of a grouped product whose weights have 4 bits.

The weights are the left side of a product, out^T = W x^T, so that their values stay in the registers in which they are
dequantized (`parallel/kernels/packed.py`). Integers may also multiply rows in e4m3, which represents them exactly: the
sum of each group is multiplied by both sides' scales in float32, as in block fp8.
"""

import triton
import triton.language as tl

from dcpmla.model.kernels.glu import activate
from dcpmla.model.kernels.grouped import find_routes
from dcpmla.parallel.kernels.packed import FP8_UNIT, dequantize, to_fp8


@triton.jit
def _finish(acc):
    """Wait for a product and return it: Triton would let it run on, which keeps its left side's registers in use."""
    return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["x_scales_stride_block"])
def packed_product_kernel(
    x_ptr,
    x_scales_ptr,
    x_scales_stride_row,
    x_scales_stride_block,
    w_desc,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
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
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply rows of a block of routes by their expert's weights; one program per tile of rows and of W's.

    Arguments as in `grouped_product_kernel`, except:
    w_desc: uint8 [E, PARTS, WIDTH, K / 2], in tiles [1, PARTS, COLUMNS, DEPTH / 2]; two parts are gated.
    scales_ptr, zeros_ptr, factors_ptr: Scales and zero points [E, PARTS, WIDTH, K / GROUP], and factors [E, PARTS,
        WIDTH], as in `Quantized`.
    x_ptr: Rows with the even columns first, then the odd ones; a gated result has the same order, unless rows are in
        e4m3. Those have scales for each 128 columns of their own order, as many as a group and a step of the depth.
    """
    PARTS: tl.constexpr = w_desc.block_shape[1]
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    N: tl.constexpr = PARTS * COLUMNS
    HALF: tl.constexpr = DEPTH // 2
    GATED: tl.constexpr = PARTS == 2
    NUM_STEPS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    NUM_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    SUMS: tl.constexpr = routes_ptr is None and not GATED
    IN_FP8: tl.constexpr = x_scales_ptr is not None
    first_column = tl.program_id(0) % NUM_TILES * COLUMNS
    tile = tl.program_id(0) // NUM_TILES
    block, expert, routes = find_routes(experts_ptr, routes_ptr, tile, NUM_SUMMED, ROWS, BLOCK_ROWS)
    is_left_out = (expert < 0) | (expert >= w_desc.shape[0])
    if is_left_out and not SUMS:
        return
    is_row, source = routes >= 0, routes // TOP_K
    weight_row = tl.arange(0, N) // COLUMNS * WIDTH + first_column + tl.arange(0, N) % COLUMNS
    is_weight = first_column + tl.arange(0, N) % COLUMNS < WIDTH
    TILE_GROUPS: tl.constexpr = DEPTH // GROUP if DEPTH > GROUP else 1
    column = tl.arange(0, DEPTH)
    acc = tl.zeros([N, ROWS], tl.float32)
    for step in tl.range(NUM_SUMMED * NUM_STEPS, num_stages=STAGES):
        at = step % NUM_STEPS
        if SUMS:
            # A route that is left out adds nothing: its weights are out of bounds, and are zero without a read.
            source = block + step // NUM_STEPS + tl.arange(0, ROWS)
            expert = tl.load(experts_ptr + block + step // NUM_STEPS)
            is_row = tl.arange(0, ROWS) < tl.where((expert >= 0) & (expert < w_desc.shape[0]), 1, 0)
        codes = w_desc.load([expert, 0, first_column, at * HALF]).reshape(N, HALF)
        group = at * DEPTH // GROUP + tl.arange(0, TILE_GROUPS)
        row = expert.to(tl.int64) * (PARTS * WIDTH) + weight_row
        scales_at = row[:, None] * (K // GROUP) + group[None, :]
        num_groups = tl.where((expert >= 0) & (expert < w_desc.shape[0]), K // GROUP, 0)
        is_scale = is_weight[:, None] & (group < num_groups)[None, :]
        scales, zeros = tl.load(scales_ptr + scales_at, mask=is_scale, other=0.0), None
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + scales_at, mask=is_scale, other=0)
        k = at * HALF + column % HALF
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * K + (k + column // HALF * (K // 2))[None, :]
        x = tl.load(x_ptrs, mask=is_row[:, None] & (k < K // 2)[None, :], other=0.0)
        low, high = to_fp8(codes) if IN_FP8 else dequantize(codes, scales, zeros, x.dtype)
        w = tl.join(low, high).permute(0, 2, 1).reshape(N, DEPTH)
        if IN_FP8:  # a step is a group
            x_scales_at = source * x_scales_stride_row + at * x_scales_stride_block
            # A sum over one column: Triton 3.6 would load a vector by each thread that multiplies by its numbers.
            x_scales = tl.sum(tl.load(x_scales_ptr + x_scales_at[:, None], mask=is_row[:, None], other=0.0), 1)
            acc = tl.fma(_finish(tl.dot(w, x.T)), scales * FP8_UNIT * x_scales[None, :], acc)
        elif factors_ptr is None or not SUMS:
            acc = _finish(tl.dot(w, x.T, acc, input_precision="ieee"))
        else:  # a sum has several experts, each with factors of its own
            factors = tl.load(factors_ptr + row, mask=tl.where(is_weight, num_groups, 0) > 0, other=0.0)
            acc = tl.fma(_finish(tl.dot(w, x.T, input_precision="ieee")), factors[:, None], acc)
    is_row = routes >= 0
    if factors_ptr is not None and not SUMS:
        row = expert.to(tl.int64) * (PARTS * WIDTH) + weight_row
        acc *= tl.load(factors_ptr + row, mask=is_weight, other=0.0)[:, None]
    if GATED:
        gate, up = acc.reshape(2, COLUMNS, ROWS).permute(1, 2, 0).split()
        expert_weights = tl.load(expert_weights_ptr + routes, mask=is_row, other=0.0)
        acc = activate(gate, up, gate_bound, up_bound, IS_SMOOTH) * expert_weights[None, :]
    out = acc.T.to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + (routes // NUM_SUMMED).to(tl.int64)[:, None] * WIDTH
    if GATED and not IN_FP8:
        even, odd = out.reshape(ROWS, COLUMNS // 2, 2).split()
        pair = first_column // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        mask = is_row[:, None] & (pair < WIDTH // 2)
        tl.store(out_ptrs + pair, even, mask=mask)
        tl.store(out_ptrs + WIDTH // 2 + pair, odd, mask=mask)
    else:
        column = first_column + tl.arange(0, COLUMNS)[None, :]
        tl.store(out_ptrs + column, out, mask=is_row[:, None] & (column < WIDTH))
