"""Triton kernel that multiplies rows by the weights of their experts (a grouped product), in 16, 8 or 4 bits.

Of few rows the weights are the left, wide side of a product, out^T = W x^T, which wastes little. Weights in 4 bits are
dequantized to x's dtype, e2m1 exactly, integers by way of bfloat16; those in fp8 multiply rows in fp8, and each 128 of
the depth is scaled by both sides' scales in float32.
"""

import triton
import triton.language as tl

from dcpmla.parallel.quantized import BLOCK, GROUP

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)


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
# Two integers + 8 in a byte, times a scale, as two bfloat16 in 32 bits. A code c, as the last bits of the mantissa of
# 128, is 128 + c; less 136 it is the integer.
_INT4_PAIR = tl.constexpr("""{
    .reg .b32 pair, one, offset, zero;
    mul.lo.u32 pair, $1, 0x1001;
    and.b32 pair, pair, 0x000F000F;
    or.b32 pair, pair, 0x43004300;
    mov.b32 one, 0x3F803F80;
    mov.b32 offset, 0xC308C308;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 pair, pair, one, offset;
    fma.rn.bf16x2 $0, pair, $2, zero;
}""")


@triton.jit
def _dequantize_groups(codes, scales, dtype: tl.constexpr):
    """Return the values [N, K] of packed codes uint8 [N, K / 2]: e2m1 with e8m0 scales, uint8 [N, K / 32], or integers
    with bfloat16 ones.
    """
    N: tl.constexpr = codes.shape[0]
    K: tl.constexpr = 2 * codes.shape[1]
    if scales.dtype == tl.uint8:
        factors = scales.to(tl.int32) << 7
        factors = tl.where(factors == 0, 1 << 6, factors)  # 2^-127
    else:
        factors = scales.to(tl.uint16, bitcast=True).to(tl.int32)
    factors = (factors | (factors << 16))[:, :, None].broadcast_to([N, K // _GROUP, _GROUP // 2])
    PAIR: tl.constexpr = _FP4_PAIR if scales.dtype == tl.uint8 else _INT4_PAIR
    pairs = tl.inline_asm_elementwise(
        PAIR, "=r,r,r", [codes.to(tl.int32), factors.reshape(N, K // 2)], tl.int32, is_pure=True, pack=1
    )
    even, odd = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.join(even, odd).reshape(N, K).to(tl.bfloat16, bitcast=True).to(dtype)


@triton.jit
def _load_weights(w_desc, scales_ptr, expert, part, first_column, depth, dtype: tl.constexpr):
    """Load a tile of an expert's weights [PARTS COLUMNS, DEPTH]: as they are, but 4 bits dequantized."""
    PARTS: tl.constexpr = w_desc.block_shape[1]
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    NUM_CODES: tl.constexpr = w_desc.block_shape[3]
    PER_CODE: tl.constexpr = 2 if w_desc.dtype == tl.uint8 else 1
    w = w_desc.load([expert, part, first_column, depth // PER_CODE]).reshape(PARTS * COLUMNS, NUM_CODES)
    if w_desc.dtype == tl.uint8:
        width, num_groups = w_desc.shape[2].to(tl.int32), w_desc.shape[3].to(tl.int32) * PER_CODE // _GROUP
        column = first_column + tl.arange(0, COLUMNS)[:, None]
        group = depth // _GROUP + tl.arange(0, PER_CODE * NUM_CODES // _GROUP)[None, :]
        at = ((expert * w_desc.shape[1] + part).to(tl.int64) * width + column) * num_groups + group
        num_columns = tl.where((expert >= 0) & (expert < w_desc.shape[0]), width, 0)
        scales = tl.load(scales_ptr + at, mask=(column < num_columns) & (group < num_groups), other=0)
        w = _dequantize_groups(w, scales, dtype)
    return w


@triton.jit
def _multiply(x, x_scales, w, w_scales, acc, TRANSPOSED: tl.constexpr):
    """Return acc + x w^T [ROWS, COLUMNS], or all transposed; fp8 times the scales, in float32."""
    if w.dtype == tl.float8e4nv:
        acc += (tl.dot(w, x.T) if TRANSPOSED else tl.dot(x, w.T)) * (x_scales * w_scales)
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
    limit,
    TOP_K: tl.constexpr,
    NUM_SUMMED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply rows of a block of routes by their expert's weights; one program per tile of rows and of W's.

    w_desc: [E, PARTS, WIDTH, K], in tiles [1, 1, COLUMNS, DEPTH]. Gated, the two parts are gates and what they gate:
        the result is silu(gate) * up, times the route's weight. One part is a plain product. Tiles [1, 2, ..] of few
        rows are one product of both.
    x_ptr: row route // TOP_K is a route's.
    experts_ptr: int32, of each block; a block of an id outside [0, E) is left out.
    routes_ptr: [blocks, BLOCK_ROWS] int32, -1 where a block has fewer; None: block i is route i alone.
    NUM_SUMMED: of a plain product without routes_ptr: so many blocks, one after the other, make one row of the result,
        their sum.
    """
    COLUMNS: tl.constexpr = w_desc.block_shape[2]
    NUM_STEPS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    NUM_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    SUMS: tl.constexpr = routes_ptr is None and not GATED
    TRANSPOSED: tl.constexpr = ROWS < 64 and w_desc.dtype != tl.uint8
    IS_STACKED: tl.constexpr = w_desc.block_shape[1] == 2
    first_column = tl.program_id(0) % NUM_TILES * COLUMNS
    tile = tl.program_id(0) // NUM_TILES
    row = tl.arange(0, ROWS)
    if routes_ptr is None:
        block = tile * NUM_SUMMED
        routes = tl.where(row == 0, block, -1)
    else:
        block = tile * ROWS // BLOCK_ROWS
        routes = tl.load(routes_ptr + tile * ROWS + row)
    expert = tl.load(experts_ptr + block)
    is_left_out = (expert < 0) | (expert >= w_desc.shape[0])
    if is_left_out and not SUMS:
        return
    is_row, source = routes >= 0, routes // TOP_K
    acc = tl.zeros([w_desc.block_shape[1] * COLUMNS, ROWS] if TRANSPOSED else [ROWS, COLUMNS], tl.float32)
    up = acc
    for step in tl.range(NUM_SUMMED * NUM_STEPS, num_stages=STAGES):
        depth = step % NUM_STEPS * DEPTH
        if SUMS:
            # A route that is left out adds nothing: its weights lie past the end, and are zero without a read.
            source = block + step // NUM_STEPS + row
            expert = tl.load(experts_ptr + block + step // NUM_STEPS)
            is_row = row < tl.where((expert >= 0) & (expert < w_desc.shape[0]), 1, 0)
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
        w = _load_weights(w_desc, w_scales_ptr, expert, 0, first_column, depth, x.dtype)
        acc = _multiply(x, x_scales, w, w_scales, acc, TRANSPOSED)
        if GATED and not IS_STACKED:
            w = _load_weights(w_desc, w_scales_ptr, expert, 1, first_column, depth, x.dtype)
            up = _multiply(x, x_scales, w, up_scales, up, TRANSPOSED)
    if IS_STACKED:
        acc, up = acc.reshape(2, COLUMNS, ROWS).permute(1, 2, 0).split()
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
