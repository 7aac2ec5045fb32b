"""Device functions that quantize a tile of an output and store it; `output/formats.py` specifies the bytes."""

import triton
import triton.language as tl

from dcpmla.attention.output.formats import NVFP4_GROUP
from dcpmla.parallel.kernels.quantize import divide, group_scale, to_fp8

_NVFP4 = tl.constexpr(NVFP4_GROUP)
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _round_as_fp8(x):
    """Round numbers from 0 to 448 to e4m3's numbers, in float32."""
    small = (x + 16384.0) - 16384.0  # at 2^14 float32 has the spacing of e4m3's smallest numbers, 2^-9
    bits = x.to(tl.int32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(x < 0.015625, small, large)


@triton.jit
def _fp4_code(x):
    """Return the code of the nearest e2m1 number, ties to even: the sign's bit above 3 bits of magnitude."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Float32 has spacing 1/2 from 2^22 on, as e2m1 has below 1: adding 2^22 rounds to it.
    small = (size + 4194304.0).to(tl.int32, bitcast=True) & 7
    # For sizes from 1 on, the code is the exponent and the first bit of the mantissa.
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    return tl.where(size < 1.0, small, large) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _swizzled(row, group, groups_padded):
    """Return the index of a row's group scale, in tiles of 128 rows by 4 scales."""
    return (row // 128 * (groups_padded // 4) + group // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


@triton.jit
def store_rows(
    x,
    first,
    end,
    padded_end,
    first_column,
    num_columns,
    width,
    values_ptr,
    scales_ptr,
    scale_ptr,
    scales_stride_row,
    scales_stride_group,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """Quantize a float32 tile [ROWS, COLUMNS] and store it at (first, first_column), up to row end and num_columns.

    GROUP: 0 for values as they are, 1 for fp8, 16 for nvfp4. padded_end: nvfp4 scales of rows from end up to it become
    0.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    PACKED: tl.constexpr = 2 if GROUP == _NVFP4 else 1
    row = first + tl.arange(0, ROWS)[:, None]
    is_row, is_last = row < end, first + ROWS >= end
    column = tl.arange(0, COLUMNS // PACKED)[None, :]
    if GROUP == 0:
        codes = x.to(values_ptr.dtype.element_ty)
    elif GROUP == 1:
        codes = to_fp8(x * tl.div_rn(1.0, tl.load(scale_ptr)))
    else:
        group = tl.arange(0, COLUMNS // GROUP)[None, :]
        is_group = group < num_columns // GROUP
        group += first_column // GROUP
        if GROUP == _NVFP4:
            # The two columns of a byte are split first: split as codes, Triton 3.6 mixes them up in some layouts.
            low, high = tl.split(x.reshape(ROWS, COLUMNS // 2, 2))
            low, high = (
                low.reshape(ROWS, COLUMNS // GROUP, GROUP // 2),
                high.reshape(ROWS, COLUMNS // GROUP, GROUP // 2),
            )
            amax = tl.maximum(tl.max(tl.abs(low), 2), tl.max(tl.abs(high), 2))
            global_scale = tl.load(scale_ptr)
            s = _round_as_fp8(tl.minimum(tl.div_rn(global_scale * amax, 6.0), _FP8_MAX))
            factor = tl.where(s == 0.0, 0.0, tl.div_rn(global_scale, s))[:, :, None]
            codes = (_fp4_code(low * factor) | (_fp4_code(high * factor) << 4)).to(tl.uint8).reshape(ROWS, COLUMNS // 2)
            groups_padded = tl.cdiv(width, 64) * 4
            tl.store(scales_ptr + _swizzled(row, group, groups_padded), s.to(tl.float8e4nv), mask=is_row & is_group)
            if is_last:
                for later in range(end, padded_end, ROWS):
                    padding = later + tl.arange(0, ROWS)[:, None]
                    zeros = tl.zeros([ROWS, COLUMNS // GROUP], tl.float8e4nv)
                    tl.store(
                        scales_ptr + _swizzled(padding, group, groups_padded),
                        zeros,
                        mask=(padding < padded_end) & is_group,
                    )
        else:
            x = x.reshape(ROWS, COLUMNS // GROUP, GROUP)
            s = group_scale(tl.max(tl.abs(x), 2))
            if UE8M0:
                exponent = (s.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # rounded up
                s = (exponent << 23).to(tl.float32, bitcast=True)
                scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, :, None]  # its inverse
            else:
                scaled = divide(x, s[:, :, None])
            codes = to_fp8(scaled).reshape(ROWS, COLUMNS)
            tl.store(scales_ptr + row * scales_stride_row + group * scales_stride_group, s, mask=is_row & is_group)
    at = row * (width // PACKED) + first_column // PACKED + column
    tl.store(values_ptr + at, codes, mask=is_row & (column < num_columns // PACKED))
