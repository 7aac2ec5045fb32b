"""Triton kernel that multiplies rows by the weights of their experts (a grouped product), in 16, 8 or 4 bits.

Of few rows the weights are the left, wide side of a product, out^T = W x^T, which wastes little. Weights in 4 bits are
dequantized to x's dtype, exactly; those in fp8 multiply rows in fp8, and each 128 of the depth is scaled by both sides'
scales in float32.
"""

import triton
import triton.language as tl

from dcpmla.parallel.quantized import BLOCK, FP4_GROUP

_BLOCK = tl.constexpr(BLOCK)
_FP4_GROUP = tl.constexpr(FP4_GROUP)


# Two e2m1 codes in a byte, times 2^(scale - 127), as two bfloat16 in 32 bits. A code's three lower bits, as the last of
# bfloat16's exponent and the first of its mantissa, are its size times 2^-126.
_FP4_PAIR = tl.constexpr("""{
    .reg .b32 pair, factor;
    mul.lo.u32 pair, $1, 0x1001;
    and.b32 pair, pair, 0x000F000F;
    mul.lo.u32 pair, pair, 0x1040;
    and.b32 pair, pair, 0x81C081C0;
    mov.b32 factor, 0x7E807E80;
    mul.rn.bf16x2 pair, pair, factor;
    mul.rn.bf16x2 $0, pair, $2;
}""")


@triton.jit
def _dequantize_fp4(codes, scales, dtype: tl.constexpr):
    """Return the values [N, K] of packed e2m1 codes uint8 [N, K / 2] and e8m0 scales uint8 [N, K / 32]."""
    N: tl.constexpr = codes.shape[0]
    K: tl.constexpr = 2 * codes.shape[1]
    factors = scales.to(tl.int32) << 7
    factors = tl.where(factors == 0, 1 << 6, factors)  # 2^-127
    factors = (factors | (factors << 16))[:, :, None].broadcast_to([N, K // _FP4_GROUP, _FP4_GROUP // 2])
    pairs = tl.inline_asm_elementwise(
        _FP4_PAIR, "=r,r,r", [codes.to(tl.int32), factors.reshape(N, K // 2)], tl.int32, is_pure=True, pack=1
    )
    even, odd = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.join(even, odd).reshape(N, K).to(tl.bfloat16, bitcast=True).to(dtype)


@triton.jit
def _load_weights(w_desc, w_scales_ptr, expert, is_own, part, first_column, depth, dtype: tl.constexpr):
    """Load a tile of an expert's weights: [COLUMNS, DEPTH] as they are, but 4 bits dequantized."""
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    NUM_CODES: tl.constexpr = w_desc.block_shape[3]
    PER_CODE: tl.constexpr = 2 if w_desc.dtype == tl.uint8 else 1
    w = w_desc.load([expert, part, first_column, depth // PER_CODE]).reshape(COLUMNS, NUM_CODES)
    if w_desc.dtype == tl.uint8:
        width, num_groups = w_desc.shape[2], w_desc.shape[3] * 2 // _FP4_GROUP
        column = first_column + tl.arange(0, COLUMNS)[:, None]
        group = depth // _FP4_GROUP + tl.arange(0, NUM_CODES * 2 // _FP4_GROUP)[None, :]
        at = ((expert.to(tl.int64) * w_desc.shape[1] + part) * width + column) * num_groups + group
        scales = tl.load(w_scales_ptr + at, mask=(column < tl.where(is_own, width, 0)) & (group < num_groups), other=0)
        w = _dequantize_fp4(w, scales, dtype)
    return w


@triton.jit
def _multiply(w, x, x_scales, w_scales_ptr, scale_at, is_own, acc, TRANSPOSED: tl.constexpr):
    """Return acc + x w^T [ROWS, COLUMNS], or all transposed; in fp8 times the scales of x's rows and of w's block."""
    if w.dtype == tl.float8e4nv:
        scales = x_scales * tl.load(w_scales_ptr + scale_at, mask=is_own, other=0.0)
        product = tl.dot(w, x.T) if TRANSPOSED else tl.dot(x, w.T)
        acc += product * (scales[None, :] if TRANSPOSED else scales[:, None])
    elif TRANSPOSED:
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


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
    TRANSPOSED: tl.constexpr = ROWS < 64
    acc = tl.zeros([COLUMNS, ROWS] if TRANSPOSED else [ROWS, COLUMNS], tl.float32)
    up = acc
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
            x_scales = tl.load(x_scales_ptr + source * (K // _BLOCK) + depth // _BLOCK, mask=is_row, other=0.0)
        row_block = expert * w_desc.shape[1] * (WIDTH // _BLOCK) + first_column // _BLOCK
        scale_at = row_block * (K // _BLOCK) + depth // _BLOCK
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        w = _load_weights(w_desc, w_scales_ptr, expert, is_own, 0, first_column, depth, dtype)
        acc = _multiply(w, x, x_scales, w_scales_ptr, scale_at, is_own, acc, TRANSPOSED)
        if GATED:
            w = _load_weights(w_desc, w_scales_ptr, expert, is_own, 1, first_column, depth, dtype)
            up = _multiply(
                w, x, x_scales, w_scales_ptr, scale_at + (WIDTH // _BLOCK) * (K // _BLOCK), is_own, up, TRANSPOSED
            )
    if TRANSPOSED:
        acc, up = acc.T, up.T
    is_row = routes >= 0
    if GATED:
        gate = acc
        if limit is not None:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        expert_weights = tl.load(expert_weights_ptr + routes, mask=is_row, other=0.0)
        acc = gate / (1.0 + tl.exp(-gate)) * up * expert_weights[:, None]
    column = first_column + tl.arange(0, COLUMNS)
    out_ptrs = out_ptr + (routes // NUM_SUMMED).to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < WIDTH)[None, :])
