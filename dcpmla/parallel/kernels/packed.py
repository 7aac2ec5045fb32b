"""Values of weights in 4 bits, in the registers of Triton kernels: e2m1 and integers, with scales of any format.

Values are dequantized to bfloat16, which represents those of e2m1 exactly but for their rows' factors, and integers
less zero points; integers to float16 where rows are in float16. A byte has two columns: kernels multiply its lower half
by even columns and its upper half by odd ones, so that no value has to move.
"""

import triton
import triton.language as tl
from torch import Tensor


def _assembler(convert: str, dtype: str = "bf16x2", is_scaled: bool = True) -> tl.constexpr:
    """Return code that converts four bytes to two times four values: first the lower halves, then the upper ones.

    $0 to $3 are the results, two a register; $4 is the bytes, then come two registers of their scales, if any, and two
    of zero points. `convert` computes a register's values from `pair`, which has a code in the last bits of each half;
    {0} is its zero points.
    """
    zeros = 7 if is_scaled else 5
    lines = [".reg .b32 first, second, pair, part;"]
    lines += ["prmt.b32 first, $4, 0, 0x4140;", "prmt.b32 second, $4, 0, 0x4342;"]
    for result, (source, shift) in enumerate((("first", 0), ("second", 0), ("first", 4), ("second", 4))):
        lines += [f"shr.b32 pair, {source}, {shift};", convert.format(f"${zeros + result % 2}")]
        last = f"mul.rn.{dtype} ${result}, pair, ${5 + result % 2};" if is_scaled else f"mov.b32 ${result}, pair;"
        lines.append(last)
    return tl.constexpr("{" + "\n".join(lines) + "}")


# A code's three lower bits, as the last of bfloat16's exponent and the first of its mantissa, are its size times
# 2^-126.
_FP4 = _assembler("""
    shl.b32 part, pair, 6; and.b32 part, part, 0x01C001C0;
    shl.b32 pair, pair, 12; lop3.b32 pair, pair, 0x80008000, part, 0xEA;
    mov.b32 part, 0x7E807E80; mul.rn.bf16x2 pair, pair, part;
""")
# A code in the last bits of the mantissa of 128 (in float16 of 1024) is too large by that number and by its zero point,
# which is 8 in formats without zero points. A register with this 8 took up to twice the time of the instruction's own.
_LESS_8 = """
    lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA; mov.b32 part, 0x43084308; sub.rn.bf16x2 pair, pair, part;
"""
_LESS_8_HALF = """
    lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA; mov.b32 part, 0x64086408; sub.rn.f16x2 pair, pair, part;
"""
_LESS_ZERO = "lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 pair, pair, {0};"
_LESS_ZERO_HALF = "lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 pair, pair, {0};"
_INT4, _INT4_HALF = _assembler(_LESS_8), _assembler(_LESS_8_HALF, "f16x2")
_ZEROED, _ZEROED_HALF = _assembler(_LESS_ZERO), _assembler(_LESS_ZERO_HALF, "f16x2")
_PLAIN, _PLAIN_HALF = _assembler(_LESS_8, is_scaled=False), _assembler(_LESS_8_HALF, is_scaled=False)
_PLAIN_ZEROED = _assembler(_LESS_ZERO, is_scaled=False)
_PLAIN_ZEROED_HALF = _assembler(_LESS_ZERO_HALF, is_scaled=False)


@triton.jit
def subtract_zeros(codes, zeros, dtype: tl.constexpr):
    """Return the integers of packed codes uint8 [.., K / 2] less their zero points, in a dtype: of the lower halves,
    and of the upper.

    zeros: Zero points, uint8 in the same shape; None for 8.
    """
    if zeros is None:
        if dtype == tl.float16:
            low, high = _to_half(_PLAIN_HALF, "=r,=r,=r,=r,r", [codes])
        else:
            low, high = _to_bfloat16(_PLAIN, "=r,=r,=r,=r,r", [codes])
    elif dtype == tl.float16:
        offsets = (zeros.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        low, high = _to_half(_PLAIN_ZEROED_HALF, "=r,=r,=r,=r,r,r,r", [codes, offsets])
    else:
        offsets = (zeros.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        low, high = _to_bfloat16(_PLAIN_ZEROED, "=r,=r,=r,=r,r,r,r", [codes, offsets])
    return low.to(dtype), high.to(dtype)


@triton.jit
def dequantize(codes, scales, zeros, dtype: tl.constexpr):
    """Return the values of packed codes uint8 [N, K / 2] in a dtype: [N, K / 2] of the lower halves, and of the upper.

    scales: [N, groups of the columns]: e8m0 (uint8) or e4m3 of e2m1, bfloat16 or float16 of integers. They are rounded
        to bfloat16, for results of integers in float16 to float16.
    zeros: Integers' zero points, uint8 in the same shape; None for 8.
    """
    N: tl.constexpr = codes.shape[0]
    NUM_BYTES: tl.constexpr = codes.shape[1]
    IS_FP4: tl.constexpr = scales.dtype == tl.uint8 or scales.dtype == tl.float8e4nv
    if scales.dtype == tl.uint8:
        factors = scales.to(tl.uint16) << 7
        factors = tl.where(factors == 0, 1 << 6, factors).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # 2^-127
    else:
        factors = scales.to(tl.bfloat16 if IS_FP4 or dtype != tl.float16 else tl.float16)
    factors = spread(factors, N, NUM_BYTES)
    if IS_FP4:
        low, high = _to_bfloat16(_FP4, "=r,=r,=r,=r,r,r,r", [codes, factors])
    elif zeros is None:
        if dtype == tl.float16:
            low, high = _to_half(_INT4_HALF, "=r,=r,=r,=r,r,r,r", [codes, factors])
        else:
            low, high = _to_bfloat16(_INT4, "=r,=r,=r,=r,r,r,r", [codes, factors])
    else:
        offsets = spread(zeros.to(tl.uint16), N, NUM_BYTES)
        if dtype == tl.float16:
            offsets = (offsets | 0x6400).to(tl.float16, bitcast=True)
            low, high = _to_half(_ZEROED_HALF, "=r,=r,=r,=r,r,r,r,r,r", [codes, factors, offsets])
        else:
            offsets = (offsets | 0x4300).to(tl.bfloat16, bitcast=True)
            low, high = _to_bfloat16(_ZEROED, "=r,=r,=r,=r,r,r,r,r,r", [codes, factors, offsets])
    return low.to(dtype), high.to(dtype)


@triton.jit
def _to_bfloat16(assembler: tl.constexpr, registers: tl.constexpr, arguments):
    return tl.inline_asm_elementwise(assembler, registers, arguments, (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)


@triton.jit
def _to_half(assembler: tl.constexpr, registers: tl.constexpr, arguments):
    return tl.inline_asm_elementwise(assembler, registers, arguments, (tl.float16, tl.float16), is_pure=True, pack=4)


@triton.jit
def spread(scales, N: tl.constexpr, NUM_BYTES: tl.constexpr):
    """Return each byte's scale."""
    GROUPS: tl.constexpr = scales.shape[1]
    return scales[:, :, None].broadcast_to([N, GROUPS, NUM_BYTES // GROUPS]).reshape(N, NUM_BYTES)


@triton.jit
def finish(acc):
    """Wait for a product whose left side is in registers, and return it.

    Triton lets it run on while the next step's values are written into these registers: without this wait products by
    integers in groups of 128 were wrong by 5 % with 65 to 128 rows.
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)


def by_halves(x: Tensor) -> Tensor:
    """Return rows [T, K] in the order in which kernels multiply packed codes: the even columns first, then the odd
    ones.
    """
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
