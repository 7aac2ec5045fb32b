"""Triton kernel of a grouped product whose weights have 4 bits.

The weights are the left side of a product, out^T = W x^T, so that their values stay in the registers in which they are
dequantized (`parallel/kernels/packed.py`).
"""

import triton
import triton.language as tl

from dcpmla.model.kernels.glu import activate
from dcpmla.model.kernels.grouped import find_routes
from dcpmla.parallel.kernels.packed import dequantize, finish, subtract_zeros


@triton.jit
def _multiply_groups(codes, zeros, x, GROUPS: tl.constexpr):
    """Multiply each group of columns of integers, less their zero points, by its rows: a sum [GROUPS, N, ROWS] of each
    group, which has no scale yet.

    codes: Packed codes, uint8 [N, GROUPS * columns / 2].
    zeros: Zero points, uint8 [N, GROUPS]; None for 8.
    x: Rows [GROUPS, ROWS, columns], of each group the even columns first.
    """
    N: tl.constexpr = codes.shape[0]
    NUM_BYTES: tl.constexpr = codes.shape[1] // GROUPS
    codes = codes.reshape(N, GROUPS, NUM_BYTES).permute(1, 0, 2)
    if zeros is not None:
        zeros = zeros.to(tl.uint16).T[:, :, None].broadcast_to([GROUPS, N, NUM_BYTES])
    low, high = subtract_zeros(codes, zeros, x.dtype)
    w = tl.join(low, high).permute(0, 1, 3, 2).reshape(GROUPS, N, 2 * NUM_BYTES)
    return tl.dot(w, x.permute(0, 2, 1), input_precision="ieee")


@triton.jit
def _load_groups(x_ptr, at, source, is_row, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Load groups of columns of rows that have the even columns first: [GROUPS, ROWS, GROUP], from the pair `at`."""
    column = tl.arange(0, GROUP)[None, None, :]
    pair = at + tl.arange(0, GROUPS)[:, None, None] * (GROUP // 2) + column % (GROUP // 2)
    x_ptrs = x_ptr + source.to(tl.int64)[None, :, None] * K + pair + column // (GROUP // 2) * (K // 2)
    return tl.load(x_ptrs, mask=is_row[None, :, None] & (pair < K // 2), other=0.0)


@triton.jit
def packed_product_kernel(
    x_ptr,
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
    SCALES_SUMS: tl.constexpr,
):
    """Multiply rows of a block of routes by their expert's weights; one program per tile of rows and of W's.

    Arguments as in `grouped_product_kernel`, except:
    w_desc: uint8 [E, PARTS, WIDTH, K / 2], in tiles [1, PARTS, COLUMNS, DEPTH / 2]; two parts are gated.
    scales_ptr, zeros_ptr, factors_ptr: Scales and zero points [E, PARTS, WIDTH, K / GROUP], and factors [E, PARTS,
        WIDTH], as in `Quantized`.
    x_ptr: Rows with the even columns first, then the odd ones; a gated result has the same order.
    SCALES_SUMS: Whether scales multiply the sums of groups of integers, not the integers; a tile has whole groups then,
        which its warps share.
    """
    PARTS: tl.constexpr = w_desc.block_shape[1]
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    N: tl.constexpr = PARTS * COLUMNS
    HALF: tl.constexpr = DEPTH // 2
    GATED: tl.constexpr = PARTS == 2
    NUM_STEPS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    NUM_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    SUMS: tl.constexpr = routes_ptr is None and not GATED
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
    acc = tl.zeros([TILE_GROUPS, N, ROWS] if SCALES_SUMS else [N, ROWS], tl.float32)
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
        if SCALES_SUMS:
            x = _load_groups(x_ptr, at * HALF, source, is_row, K, GROUP, TILE_GROUPS)
            sums = _multiply_groups(codes, zeros, x, TILE_GROUPS)
            acc = tl.fma(sums, scales.to(tl.float32).T[:, :, None], acc)
        else:
            k = at * HALF + column % HALF
            x_ptrs = x_ptr + source.to(tl.int64)[:, None] * K + (k + column // HALF * (K // 2))[None, :]
            x = tl.load(x_ptrs, mask=is_row[:, None] & (k < K // 2)[None, :], other=0.0)
            low, high = dequantize(codes, scales, zeros, x.dtype)
            w = tl.join(low, high).permute(0, 2, 1).reshape(N, DEPTH)
            if factors_ptr is None or not SUMS:
                acc = finish(tl.dot(w, x.T, acc, input_precision="ieee"))
            else:  # a sum has several experts, each with factors of its own
                factors = tl.load(factors_ptr + row, mask=tl.where(is_weight, num_groups, 0) > 0, other=0.0)
                acc = tl.fma(finish(tl.dot(w, x.T, input_precision="ieee")), factors[:, None], acc)
    if SCALES_SUMS:
        acc = tl.sum(acc, 0)
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
    if GATED:
        even, odd = out.reshape(ROWS, COLUMNS // 2, 2).split()
        pair = first_column // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        mask = is_row[:, None] & (pair < WIDTH // 2)
        tl.store(out_ptrs + pair, even, mask=mask)
        tl.store(out_ptrs + WIDTH // 2 + pair, odd, mask=mask)
    else:
        column = first_column + tl.arange(0, COLUMNS)[None, :]
        tl.store(out_ptrs + column, out, mask=is_row[:, None] & (column < WIDTH))
