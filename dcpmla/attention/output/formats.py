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
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.quantized import QuantizedRows, quantize_groups

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # Rows in these can be quantized.
GROUP_SIZES = (64, 128)
_SCALE_LAYOUTS = ("row", "column", "tma")
NVFP4_GROUP = 16  # values that share a scale
_FORMATS = ("fp8", "fp8_groups", "nvfp4")
_FP4_MAX = 6.0  # largest number of e2m1
# Midpoints between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6, whose codes are 0 to 7: the code increases by one at each
# midpoint in _TIES_UP, and just past each in _TIES_DOWN.
_TIES_UP, _TIES_DOWN = (0.75, 1.75, 3.5), (0.25, 1.25, 2.5, 5.0)


class OutputQuant(NamedTuple):
    """How attention's output is quantized.

    Attributes:
        format: "fp8", "fp8_groups" or "nvfp4".
        scale: Scale, float32 of one element on the output's device. fp8: value = scale x code; nvfp4: global scale,
            448 * 6 over the largest expected value; None for fp8_groups, which compute their scales.
        group_size, scale_layout, ue8m0: Options of fp8_groups alone: 64 or 128 columns that share a scale; "row",
            "column" or "tma"; whether scales are raised to the next power of two.
    """

    format: str
    scale: Tensor | None = None
    group_size: int = 128
    scale_layout: str = "row"
    ue8m0: bool = False

    def checked(self, device: torch.device) -> "OutputQuant":
        """Return the options if they match each other and an output on a device.

        Raises:
            ValueError: The format, group size or layout does not exist; the scale is missing, superfluous, on another
                device, or of another dtype or size.
        """
        if self.format not in _FORMATS:
            raise ValueError(f"format is {self.format!r}; choose one of {', '.join(_FORMATS)}")
        if self.format == "fp8_groups":
            if self.group_size not in GROUP_SIZES:
                raise ValueError(f"group_size is {self.group_size}; choose one of {', '.join(map(str, GROUP_SIZES))}")
            if self.scale_layout not in _SCALE_LAYOUTS:
                raise ValueError(f"scale_layout is {self.scale_layout!r}; choose one of {', '.join(_SCALE_LAYOUTS)}")
            if self.scale is not None:
                raise ValueError("scale is given for format 'fp8_groups', which makes its scales; leave it out")
        elif self.scale is None:
            raise ValueError(f"scale is None; format {self.format!r} needs one, float32 of one element")
        elif (self.scale.dtype, self.scale.numel(), self.scale.device) != (torch.float32, 1, device):
            raise ValueError(
                f"scale is {self.scale.dtype} {tuple(self.scale.shape)} on {self.scale.device}; expected torch.float32 "
                f"of one element on {device}"
            )
        return self

    @property
    def group(self) -> int:
        """Return the number of columns that share a computed scale; 1 for fp8, whose one scale is given."""
        return {"fp8": 1, "fp8_groups": self.group_size, "nvfp4": NVFP4_GROUP}[self.format]

    def empty(self, num_rows: int, width: int, device: torch.device) -> QuantizedRows:
        """Return uninitialized memory for num_rows rows of width columns."""
        values, scales = new_rows(num_rows, width, self, device)
        return QuantizedRows(values, self.scale if self.format == "fp8" and self.scale is not None else scales)

    def target(self, values: Tensor, scales: Tensor, first_row: int = 0) -> "TargetRows":
        """Return rows of such memory, for an operator that writes them."""
        return TargetRows(first_row, values, None if self.format == "fp8" else scales, self.scale, self.ue8m0)

    @property
    def is_linears(self) -> bool:
        """Return whether rows are quantized as linear layers quantize their inputs (`quantize_rows`)."""
        return (self.format, self.group_size, self.scale_layout, self.ue8m0) == ("fp8_groups", BLOCK, "tma", False)


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


def new_rows(num_rows: int, width: int, quant: OutputQuant, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for rows of `width` values, and for their scales.

    Returns:
        Values [num_rows, width] e4m3 and float32 scales: none for fp8, [num_rows, width / group_size] for fp8_groups,
        whose rows are contiguous in the layout "row", columns in "column", columns that begin at multiples of 16 bytes
        in "tma". nvfp4: values [num_rows, width / 2] uint8 and scales [num_rows to the next 128, width / 16 to the next
        4] e4m3.
    """
    group = quant.group
    if group == NVFP4_GROUP:
        num_scales = width // group
        shape = (num_rows + 127) // 128 * 128, (num_scales + 3) // 4 * 4
        # Kernels write rows of padding with the last row, but never columns of padding, so those must be zeros.
        new = torch.empty if num_scales % 4 == 0 else torch.zeros
        return torch.empty(num_rows, width // 2, dtype=torch.uint8, device=device), new(shape, dtype=FP8, device=device)
    values = torch.empty(num_rows, width, dtype=FP8, device=device)
    if group == 1:
        return values, torch.empty(0, device=device)
    num_scales = width // group
    strides = {"row": (num_scales, 1), "column": (1, num_rows), "tma": (1, (num_rows + 3) // 4 * 4)}[quant.scale_layout]
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
    check_heads(w_uv.shape[1], out.dtype, group)


def check_heads(num_rows: int, dtype: torch.dtype, group: int) -> None:
    """Raise ValueError unless values in dtype can be quantized, heads of num_rows rows of w_uv in whole groups."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}; outputs of bfloat16, float16 and float32 can be quantized")
    if num_rows % group:
        raise ValueError(
            f"w_uv has {num_rows} rows for a head; groups of {group} must divide them, so that none crosses heads"
        )
