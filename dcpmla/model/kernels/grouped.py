"""Triton kernel that multiplies rows by the weights of their experts (a grouped product), in 16, 8 or 4 bits.

The weights are the left, wide side of every product, so that a tile of few rows wastes little: out^T = W x^T. Weights in
4 bits are dequantized to x's dtype, exactly; those in fp8 multiply rows in fp8, and each 128 of the depth is scaled by
both sides' scales in float32.
"""

import triton
import triton.language as tl

from dcpmla.attention.output.kernels import divide, to_fp8
from dcpmla.parallel.quantized import BLOCK, FP4_GROUP

_BLOCK = tl.constexpr(BLOCK)
_FP4_GROUP = tl.constexpr(FP4_GROUP)


@triton.jit
def _quantize(x):
    """Quantize rows of 128 columns as `write_fp8_groups` does: return codes [ROWS, 128] and scales [ROWS]."""
    x = x.to(tl.float32)
    scales = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), 1e-10), 448.0)
    return to_fp8(divide(x, scales[:, None])), scales


@triton.jit
def _dequantize_fp4(codes, scales, dtype: tl.constexpr):
    """Return the values [N, K] of packed e2m1 codes uint8 [N, K / 2] and e8m0 scales uint8 [N, K / 32]."""
    N: tl.constexpr = codes.shape[0]
    K: tl.constexpr = 2 * codes.shape[1]
    codes = codes.to(tl.int32)
    codes = tl.join(codes, codes >> 4).reshape(N, K // _FP4_GROUP, _FP4_GROUP)
    # The code's three lower bits as the last of float32's exponent and the first of its mantissa: e2m1 times 2^-126.
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    exponents = scales.to(tl.int32) << 23
    exponents = tl.where(exponents == 0, 1 << 22, exponents)  # 2^-127
    return (values * exponents.to(tl.float32, bitcast=True)[:, :, None]).reshape(N, K).to(dtype)


@triton.jit
def _load_weights(
    w_desc, w_scales_ptr, expert, is_own, part, first_column, depth, DEPTH: tl.constexpr, dtype: tl.constexpr
):
    """Load a tile [COLUMNS, DEPTH] of an expert's weights: codes as they are, but 4 bits dequantized."""
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    if w_desc.dtype == tl.uint8:
        codes = w_desc.load([expert, part, first_column, depth // 2]).reshape(COLUMNS, DEPTH // 2)
        width, num_groups = w_desc.shape[2], w_desc.shape[3] * 2 // _FP4_GROUP
        column = first_column + tl.arange(0, COLUMNS)[:, None]
        group = depth // _FP4_GROUP + tl.arange(0, DEPTH // _FP4_GROUP)[None, :]
        at = ((expert.to(tl.int64) * w_desc.shape[1] + part) * width + column) * num_groups + group
        scales = tl.load(w_scales_ptr + at, mask=(column < tl.where(is_own, width, 0)) & (group < num_groups), other=0)
        return _dequantize_fp4(codes, scales, dtype)
    else:
        return w_desc.load([expert, part, first_column, depth]).reshape(COLUMNS, DEPTH)


@triton.jit
def _multiply(w, x, x_scales, w_scales_ptr, scale_at, is_own, acc):
    """Return acc [COLUMNS, ROWS] + w x^T; in fp8 times the scales of x's rows and that of w's block."""
    if w.dtype == tl.float8e4nv:
        w_scale = tl.load(w_scales_ptr + scale_at, mask=is_own, other=0.0)
        return acc + tl.dot(w, x.T) * (w_scale * x_scales)[None, :]
    else:
        return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit
def grouped_product_kernel(
    x_ptr,
    x_scales_ptr,
    w_desc,
    w_scales_ptr,
    experts_ptr,
    routes_ptr,
    expert_weights_ptr,
    out_ptr,
    num_experts,
    limit,
    TOP_K: tl.constexpr,
    NUM_SUMMED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiply the rows of a block of routes by their expert's weights; one program per (block, tile of W's rows).

    w_desc: [E, PARTS, WIDTH, K], in tiles [1, 1, COLUMNS, DEPTH]. Gated, the two parts are gates and what they gate:
        the result is silu(gate) * up, times the route's weight. One part is a plain product.
    x_ptr: row route // TOP_K is a route's.
    routes_ptr: [blocks, ROWS] int32, -1 where a block has fewer; None: block i is route i alone.
    NUM_SUMMED: so many blocks, one after the other, make one row of the result, their sum (without routes_ptr).
    """
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    NUM_STEPS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    NUM_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    first_column = tl.program_id(0) % NUM_TILES * COLUMNS
    block = tl.program_id(0) // NUM_TILES * NUM_SUMMED
    expert = tl.load(experts_ptr + block)
    is_own = (expert >= 0) & (expert < num_experts)
    SUMS: tl.constexpr = not GATED and routes_ptr is None
    if not SUMS:
        if not is_own:
            return
    row = tl.arange(0, ROWS)
    if routes_ptr is not None:
        routes = tl.load(routes_ptr + block * ROWS + row)
    else:
        routes = tl.where(row == 0, block, -1)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(NUM_SUMMED * NUM_STEPS):
        depth = step % NUM_STEPS * DEPTH
        is_row = routes >= 0
        source = routes // TOP_K
        if SUMS:
            # A route of no expert here adds nothing: what it loads lies past the end, and is zero without a read.
            expert = tl.load(experts_ptr + block + step // NUM_STEPS)
            is_own = (expert >= 0) & (expert < num_experts)
            is_row = row < tl.where(is_own, 1, 0)
            source = block + step // NUM_STEPS + row
        k = depth + tl.arange(0, DEPTH)
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * K + k[None, :]
        x = tl.load(x_ptrs, mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        x_scales = None
        if w_desc.dtype == tl.float8e4nv:
            if x_scales_ptr is None:
                x, x_scales = _quantize(x)
            else:
                x_scales = tl.load(x_scales_ptr + source * (K // _BLOCK) + depth // _BLOCK, mask=is_row, other=0.0)
        row_block = expert * w_desc.shape[1] * (WIDTH // _BLOCK) + first_column // _BLOCK
        scale_at = row_block * (K // _BLOCK) + depth // _BLOCK
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        w = _load_weights(w_desc, w_scales_ptr, expert, is_own, 0, first_column, depth, DEPTH, dtype)
        acc = _multiply(w, x, x_scales, w_scales_ptr, scale_at, is_own, acc)
        if GATED:
            w = _load_weights(w_desc, w_scales_ptr, expert, is_own, 1, first_column, depth, DEPTH, dtype)
            up = _multiply(w, x, x_scales, w_scales_ptr, scale_at + (WIDTH // _BLOCK) * (K // _BLOCK), is_own, up)
    is_row = routes >= 0
    if GATED:
        gate = acc
        if limit is not None:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        expert_weights = tl.load(expert_weights_ptr + routes, mask=is_row, other=0.0)
        acc = gate / (1.0 + tl.exp(-gate)) * up * expert_weights[None, :]
    column = first_column + tl.arange(0, COLUMNS)
    out_ptrs = out_ptr + (routes // NUM_SUMMED).to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_ptrs, acc.T.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < WIDTH)[None, :])
