"""Values of weights in 4 bits, in the registers of Triton kernels: e2m1 and integers, with scales of any format.

Values are dequantized to bfloat16, which represents those of e2m1 exactly but for their rows' factors, and integers
less zero points. A byte has two columns: kernels multiply its lower half by even columns and its upper half by odd
ones, so that no value has to move.
"""

import triton
import triton.language as tl


def _assembler(convert: str) -> tl.constexpr:
    """Return code that converts four bytes to two times four bfloat16: first the lower halves, then the upper ones.

    $0 to $3 are the results, two a register; $4 is the bytes, $5 and $6 their scales, $7 and $8 zero points. `convert`
    computes a register's values from `pair`, which has a code in the last bits of each half; {0} is its zero points.
    """
    lines = [".reg .b32 first, second, pair, part;"]
    lines += ["prmt.b32 first, $4, 0, 0x4140;", "prmt.b32 second, $4, 0, 0x4342;"]
    for result, (source, shift) in enumerate((("first", 0), ("second", 0), ("first", 4), ("second", 4))):
        lines += [f"shr.b32 pair, {source}, {shift};", convert.format(f"${7 + result % 2}")]
        lines.append(f"mul.rn.bf16x2 ${result}, pair, ${5 + result % 2};")
    return tl.constexpr("{" + "\n".join(lines) + "}")


# A code's three lower bits, as the last of bfloat16's exponent and the first of its mantissa, are its size times
# 2^-126.
_FP4 = _assembler("""
    shl.b32 part, pair, 6; and.b32 part, part, 0x01C001C0;
    shl.b32 pair, pair, 12; lop3.b32 pair, pair, 0x80008000, part, 0xEA;
    mov.b32 part, 0x7E807E80; mul.rn.bf16x2 pair, pair, part;
""")
# A code, as the last bits of the mantissa of 128, is 128 and its zero point too large: 136 without zero points.
_INT4 = _assembler("""
    lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA; mov.b32 part, 0x43084308; sub.rn.bf16x2 pair, pair, part;
""")


_ZEROED = _assembler("""
    lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 pair, pair, {0};
""")


def _fp8_assembler() -> tl.constexpr:
    """Return code that converts four bytes, $2, of codes without zero points to e4m3: $0 has the lower halves, $1 the
    upper ones.

    A byte from 0 to 8 is as many times 2^-9 in e4m3, and the upper bit is the sign. A code of 8 and more is its number
    and 8; of a smaller one, inverting the three lower bits and adding 1 gives the size of its number.
    """
    lines = [".reg .b32 below, flips;"]
    for result, shift in ((0, 0), (1, 4)):
        lines += [
            f"shr.b32 below, $2, {shift + 3};",
            "lop3.b32 below, below, 0x01010101, 0x01010101, 0x6A;",
            "mul.lo.u32 flips, below, 0x87;",
            f"shr.b32 ${result}, $2, {shift};",
            f"lop3.b32 ${result}, ${result}, 0x07070707, flips, 0x6A;",
            f"add.u32 ${result}, ${result}, below;",
        ]
    return tl.constexpr("{" + "\n".join(lines) + "}")


_FP8 = _fp8_assembler()
FP8_UNIT = tl.constexpr(2.0**9)  # the number whose value `to_fp8` returns as 1


@triton.jit
def to_fp8(codes):
    """Return the numbers of packed codes uint8 [N, K / 2], integers without zero points, in units of 1 / FP8_UNIT: e4m3
    [N, K / 2] of the lower halves, and of the upper.
    """
    return tl.inline_asm_elementwise(_FP8, "=&r,=&r,r", [codes], (tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4)


@triton.jit
def dequantize(codes, scales, zeros):
    """Return the values of packed codes uint8 [N, K / 2]: bfloat16 [N, K / 2] of the lower halves, and of the upper.

    scales: [N, groups of the columns]: e8m0 (uint8) or e4m3 of e2m1, bfloat16 or float16 of integers.
    zeros: Integers' zero points, uint8 in the same shape; None for 8.
    """
    N: tl.constexpr = codes.shape[0]
    NUM_BYTES: tl.constexpr = codes.shape[1]
    if scales.dtype == tl.uint8:
        factors = scales.to(tl.uint16) << 7
        factors = tl.where(factors == 0, 1 << 6, factors).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # 2^-127
    else:
        factors = scales.to(tl.bfloat16)
    factors = _spread(factors, N, NUM_BYTES)
    if zeros is not None:
        offsets = _spread((zeros.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True), N, NUM_BYTES)
        return tl.inline_asm_elementwise(
            _ZEROED,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, factors, offsets],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    ASM: tl.constexpr = _FP4 if scales.dtype == tl.uint8 or scales.dtype == tl.float8e4nv else _INT4
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r", [codes, factors], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def _spread(scales, N: tl.constexpr, NUM_BYTES: tl.constexpr):
    """Return each byte's scale."""
    GROUPS: tl.constexpr = scales.shape[1]
    return scales[:, :, None].broadcast_to([N, GROUPS, NUM_BYTES // GROUPS]).reshape(N, NUM_BYTES)
