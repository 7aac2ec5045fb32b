"""Triton kernel of a grouped product whose weights have 4 bits: e2m1 as DeepSeek-V4 ships it, integers as Kimi does.

The weights are the left side of a product, out^T = W x^T, so that their values stay in the registers in which they are
dequantized, to bfloat16. A byte has two columns of W: its lower half is multiplied by x's even columns, its upper half
by the odd ones, so that no value has to move.
"""

import triton
import triton.language as tl

from dcpmla.model.kernels.glu import activate
from dcpmla.model.kernels.grouped import find_routes
from dcpmla.parallel.formats import GROUP

_GROUP = tl.constexpr(GROUP)


def _assembler(convert: str) -> tl.constexpr:
    """Return code that converts four bytes to two times four bfloat16: first the lower halves, then the upper ones.

    $0 to $3 are the results, two a register; $4 is the bytes, $5 and $6 their scales. `convert` computes a register's
    values from `pair`, which has a code in the last bits of each half.
    """
    lines = [".reg .b32 first, second, pair, part;"]
    lines += ["prmt.b32 first, $4, 0, 0x4140;", "prmt.b32 second, $4, 0, 0x4342;"]
    for result, (source, shift) in enumerate((("first", 0), ("second", 0), ("first", 4), ("second", 4))):
        lines += [f"shr.b32 pair, {source}, {shift};", convert, f"mul.rn.bf16x2 ${result}, pair, ${5 + result % 2};"]
    return tl.constexpr("{" + "\n".join(lines) + "}")


# A code's three lower bits, as the last of bfloat16's exponent and the first of its mantissa, are its size times
# 2^-126.
_FP4 = _assembler("""
    shl.b32 part, pair, 6; and.b32 part, part, 0x01C001C0;
    shl.b32 pair, pair, 12; lop3.b32 pair, pair, 0x80008000, part, 0xEA;
    mov.b32 part, 0x7E807E80; mul.rn.bf16x2 pair, pair, part;
""")
# An integer + 8, as the last bits of the mantissa of 128, is 136 too large.
_INT4 = _assembler("""
    lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA; mov.b32 part, 0x43084308; sub.rn.bf16x2 pair, pair, part;
""")


@triton.jit
def _dequantize(codes, scales, dtype: tl.constexpr):
    """Return the values of packed codes uint8 [N, K / 2], of the lower halves and of the upper halves: e2m1 with e8m0
    scales, uint8 [N, K / 32], or integers with bfloat16 ones.
    """
    N: tl.constexpr = codes.shape[0]
    NUM_BYTES: tl.constexpr = codes.shape[1]
    if scales.dtype == tl.uint8:
        factors = scales.to(tl.uint16) << 7
        factors = tl.where(factors == 0, 1 << 6, factors).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # 2^-127
    else:
        factors = scales
    factors = factors[:, :, None].broadcast_to([N, 2 * NUM_BYTES // _GROUP, _GROUP // 2]).reshape(N, NUM_BYTES)
    ASM: tl.constexpr = _FP4 if scales.dtype == tl.uint8 else _INT4
    low, high = tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r", [codes, factors], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
    return tl.join(low, high).permute(0, 2, 1).reshape(N, 2 * NUM_BYTES).to(dtype)


@triton.jit
def _finish(acc):
    """Wait for a product and return it: Triton would let it run on, which keeps its left side's registers in use."""
    return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)


@triton.jit
def packed_product_kernel(
    x_ptr,
    w_desc,
    scales_ptr,
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
    STAGES: tl.constexpr,
):
    """Multiply rows of a block of routes by their expert's weights; one program per tile of rows and of W's.

    Arguments as in `grouped_product_kernel`, except:
    w_desc: uint8 [E, PARTS, WIDTH, K / 2], in tiles [1, PARTS, COLUMNS, DEPTH / 2]; two parts are gated.
    scales_ptr: [E, PARTS, WIDTH, K / 32], e8m0 or bfloat16.
    x_ptr: Rows with the even columns first, then the odd ones; a gated result has the same order.
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
        group = at * (DEPTH // _GROUP) + tl.arange(0, DEPTH // _GROUP)
        scales_at = (expert.to(tl.int64) * (PARTS * WIDTH) + weight_row)[:, None] * (K // _GROUP) + group[None, :]
        num_groups = tl.where((expert >= 0) & (expert < w_desc.shape[0]), K // _GROUP, 0)
        scales = tl.load(scales_ptr + scales_at, mask=is_weight[:, None] & (group < num_groups)[None, :], other=0)
        k = at * HALF + column % HALF
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * K + (k + column // HALF * (K // 2))[None, :]
        x = tl.load(x_ptrs, mask=is_row[:, None] & (k < K // 2)[None, :], other=0.0)
        acc = _finish(tl.dot(_dequantize(codes, scales, x.dtype), x.T, acc, input_precision="ieee"))
    is_row = routes >= 0
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
