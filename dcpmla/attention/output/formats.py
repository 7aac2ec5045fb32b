"""Memory formats of a quantized output [T, N], in plain torch: the specification of every kernel that writes one.

- fp8: e4m3 values [T, N] that share one scale, which is given (static).
- fp8 in groups: e4m3 values [T, N], and float32 scales [T, N / G], each made from G consecutive columns.
- NVFP4: e2m1 values, two in a byte [T, N / 2], the first in the lower half; an e4m3 scale for each 16 columns, in the
  order that matrix products of Blackwell GPUs read (tiles of 128 rows by 4 scales); and a global scale, which is given.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.cache.formats import FP8, FP8_MAX
from dcpmla.parallel.quantized import quantize_groups

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # Rows in these can be quantized.
GROUP_SIZES = (64, 128)
SCALE_LAYOUTS = ("row", "column", "tma")
NVFP4_GROUP = 16  # values that share a scale
_FP4_MAX = 6.0  # largest number of e2m1
# Midpoints between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6, whose codes are 0 to 7: the code increases by one at each
# midpoint in _TIES_UP, and just past each in _TIES_DOWN.
_TIES_UP, _TIES_DOWN = (0.75, 1.75, 3.5), (0.25, 1.25, 2.5, 5.0)


class TargetRows(NamedTuple):
    """The rows of a result that a part of a batch is written to.

    Attributes:
        first_row: First of the rows.
        values, scales: Result, which determines the format: values in a part's dtype take it as it is, others are
            quantized (fp8 has no scales, nvfp4 bytes as values).
        scale: Scale of fp8 and nvfp4; None for other formats.
        ue8m0: Whether scales of groups are raised to the next power of two.
    """

    first_row: int
    values: Tensor
    scales: Tensor | None = None
    scale: Tensor | None = None
    ue8m0: bool = False


def new_rows(num_rows: int, width: int, group: int, scale_layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for quantized rows of `width` values, and for their scales.

    Args:
        group: Columns that share a scale: 1 for fp8, whose scales are empty, 16 for nvfp4, 64 or 128.
        scale_layout: Layout of the scales [num_rows, width / group] of groups of 64 or 128: "row": rows of scales are
            contiguous; "column": columns are; "tma": columns begin at multiples of 16 bytes.
    Returns:
        Values [num_rows, width] e4m3 and float32 scales; nvfp4: values [num_rows, width / 2] uint8 and scales
        [num_rows to the next 128, width / 16 to the next 4] e4m3.
    """
    if group == NVFP4_GROUP:
        num_scales = width // group
        shape = (num_rows + 127) // 128 * 128, (num_scales + 3) // 4 * 4
        # Kernels write rows of padding with the last row, but never columns of padding, so those must be zeros.
        new = torch.empty if num_scales % 4 == 0 else torch.zeros
        return torch.empty(num_rows, width // 2, dtype=torch.uint8, device=device), new(shape, dtype=FP8, device=device)
    values = torch.empty(num_rows, width, dtype=FP8, device=device)
    if group == 1:
        return values, torch.empty(0, device=device)
    check_groups(group, scale_layout)
    num_scales = width // group
    strides = {"row": (num_scales, 1), "column": (1, num_rows), "tma": (1, (num_rows + 3) // 4 * 4)}[scale_layout]
    return values, torch.empty_strided((num_rows, num_scales), strides, dtype=torch.float32, device=device)


def write_fp8(x: Tensor, first_row: int, values: Tensor, scale: Tensor) -> None:
    """Write x * (1 / scale), saturated, into the rows of values from first_row on."""
    values[first_row : first_row + len(x)] = (x.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def write_fp8_groups(x: Tensor, first_row: int, values: Tensor, scales: Tensor, ue8m0: bool) -> None:
    """Write x, quantized in groups, into the rows of values and scales from first_row on.

    Args:
        ue8m0: Whether scales are raised to the next power of two.
    """
    rows = slice(first_row, first_row + len(x))
    values[rows], scales[rows] = quantize_groups(x, x.shape[1] // scales.shape[1], ue8m0)


def write_nvfp4(x: Tensor, first_row: int, values: Tensor, scales: Tensor, global_scale: Tensor) -> None:
    """Write x as NVFP4 into the rows of values and scales from first_row on; with the last row of values also the
    scales' rows of padding, as zeros.

    A value is its code's, times its scale / global_scale. Values that become zero keep their sign.
    Source: NVFP4 as the kernels of vLLM and the conversions of Blackwell GPUs make it.
    """
    end = first_row + len(x)
    groups = x.float().unflatten(1, (-1, NVFP4_GROUP))
    s = (global_scale * groups.abs().amax(-1) / _FP4_MAX).clamp(max=FP8_MAX).to(FP8)
    factor = torch.where(s.float() == 0, 0.0, global_scale / s.float())
    scaled = (groups * factor[..., None]).flatten(1)
    size = scaled.abs()
    code = sum((size >= tie).byte() for tie in _TIES_UP) + sum((size > tie).byte() for tie in _TIES_DOWN)
    code += 8 * scaled.signbit().byte()
    values[first_row:end] = code[:, ::2] + 16 * code[:, 1::2]
    num_padded = (scales.shape[0] if end == len(values) else end) - first_row
    row = torch.arange(first_row, first_row + num_padded, device=x.device)
    padded = pad(s.view(torch.uint8), (0, scales.shape[1] - s.shape[1], 0, num_padded - len(x)))
    swizzled = scales.view(torch.uint8).view(scales.shape[0] // 128, scales.shape[1] // 4, 32, 4, 4)
    swizzled.permute(0, 3, 2, 1, 4)[row // 128, row % 128 // 32, row % 32] = padded.unflatten(1, (-1, 4))


def check_rows(x: Tensor, group: int) -> None:
    """Raise ValueError unless rows [T, N] can be quantized in groups of so many columns."""
    if x.ndim != 2 or x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; expected [T, N] of bfloat16, float16 or float32")
    if x.shape[1] % group:
        raise ValueError(f"x has {x.shape[1]} columns; groups of {group} must divide them")


def check_projection(call: ValueProjection, group: int) -> None:
    """Raise ValueError unless w_uv [h, V, L] can be applied to out [T, h, L], and the result quantized in groups."""
    out, w_uv, w_scales, _ = call
    if out.dtype not in _DTYPES or w_uv.dtype != (out.dtype if w_scales is None else FP8):
        raise ValueError(
            f"out is {out.dtype}, w_uv {w_uv.dtype}; expected both in one of bfloat16, float16 and float32, or w_uv in "
            f"float8_e4m3fn with its scales"
        )
    if out.ndim != 3 or w_uv.ndim != 3 or out.shape[1:] != w_uv.shape[::2]:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, w_uv {tuple(w_uv.shape)}; expected [T, h, L] and [h, V, L]"
        )
    check_heads(w_uv, out.dtype, group)


def check_heads(w_uv: Tensor, dtype: torch.dtype, group: int) -> None:
    """Raise ValueError unless values in dtype, of heads of w_uv's [h, V, L], can be quantized in such groups."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}; outputs of bfloat16, float16 and float32 can be quantized")
    if w_uv.shape[1] % group:
        raise ValueError(
            f"w_uv has {w_uv.shape[1]} rows for a head; groups of {group} must divide them, so that none crosses heads"
        )


def check_scale(name: str, scale: Tensor, device: torch.device) -> None:
    """Raise ValueError unless a scale is float32 of one element on the device."""
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
        raise ValueError(
            f"{name} is {scale.dtype} {tuple(scale.shape)} on {scale.device}; expected torch.float32 of one element on "
            f"{device}"
        )


def check_groups(group_size: int, scale_layout: str) -> None:
    """Raise ValueError for a size of groups or a layout of scales that no kernel writes."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}; choose one of {', '.join(map(str, GROUP_SIZES))}")
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f"scale_layout is {scale_layout!r}; choose one of {', '.join(SCALE_LAYOUTS)}")
