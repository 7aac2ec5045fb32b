"""Custom ops (`torch.ops.dcpmla`) that write attention's output: quantized or not, alone or as W_UV's product.

`attention/output/formats.py` specifies the bytes of quantized rows and runs on CPUs; GPUs run the kernels of
`attention/output/kernels.py`. W_UV's product is rounded to attention's dtype before it is quantized, so both ways give
the same result if sums in another order round alike. Quantized outputs come from bfloat16, float16 or float32, and are
finite. No gradients.
"""

import torch
from torch import Tensor

from dcpmla.attention.output import formats
from dcpmla.attention.output.formats import TargetRows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_into, project_values
from dcpmla.operators import nothing, operator
from dcpmla.parallel.fp8 import runs_fp8


@operator(
    "write_rows_",
    kernel="dcpmla.attention.output.kernels:quantize_rows",
    fake=nothing,
    runs=lambda x, into: into.values.dtype != x.dtype and runs_fp8(x.device),
    mutates_args=("values", "scales"),
)
def write_rows_(x: Tensor, into: TargetRows) -> None:
    """Write x [n, N] into rows of a result, in its format (`attention/output/formats.py`)."""
    first_row, values, scales, scale, ue8m0 = into
    if values.dtype == x.dtype:
        values[first_row : first_row + len(x)] = x
    elif scales is None:
        assert scale is not None
        formats.write_fp8(x, first_row, values, scale)
    elif scale is None:
        formats.write_fp8_groups(x, first_row, values, scales, ue8m0)
    else:
        formats.write_nvfp4(x, first_row, values, scales, scale)


@operator(
    "project_rows_",
    kernel="dcpmla.attention.output.kernels:project_rows",
    fake=nothing,
    runs=lambda call, into: (
        runs_fp8(call.out.device)
        and (into.values.dtype != call.out.dtype or call.w_scales is not None or call.is_deterministic)
    ),
    mutates_args=("values", "scales"),
)
def project_rows_(call: ValueProjection, into: TargetRows) -> None:
    """Apply `write_rows_` to `project_values`."""
    if into.values.dtype == call.out.dtype:
        project_into(call, into.values[into.first_row : into.first_row + len(call.out)])
    else:
        write_rows_(project_values(call), into)


empty_rows = operator("empty_rows", fake=formats.new_rows)(formats.new_rows)


def _rows_like(x: Tensor, group: int, scale: Tensor | None, scale_layout: str = "") -> tuple[Tensor, Tensor]:
    """Return memory for x [T, N] quantized, with a given scale or in groups with scales of their own."""
    _check_scales(group, scale, scale_layout, x.device)
    formats.check_rows(x, group)
    return formats.new_rows(x.shape[0], x.shape[1], group, scale_layout, x.device)


def _rows_of_product(
    call: ValueProjection, group: int, scale: Tensor | None, scale_layout: str = ""
) -> tuple[Tensor, Tensor]:
    """Return memory for W_UV's product, quantized as by `_rows_like`."""
    _check_scales(group, scale, scale_layout, call.out.device)
    formats.check_projection(call, group)
    num_tokens, (num_heads, value, _) = call.out.shape[0], call.w_uv.shape
    return formats.new_rows(num_tokens, num_heads * value, group, scale_layout, call.out.device)


def _check_scales(group: int, scale: Tensor | None, scale_layout: str, device: torch.device) -> None:
    if scale is None:
        formats.check_groups(group, scale_layout)
    else:
        formats.check_scale("scale" if group == 1 else "global_scale", scale, device)


@operator("quantize_fp8", fake=lambda x, scale: _rows_like(x, 1, scale)[0])
def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize x [T, N] to e4m3 [T, N]: x * (1 / scale), saturated.

    Args:
        scale: Scale, float32 of one element.
    Raises:
        ValueError: Shapes or dtypes do not match.
    """
    values, _ = _rows_like(x, 1, scale)
    write_rows_(x, TargetRows(0, values, scale=scale))
    return values


@operator("quantize_fp8_groups", fake=lambda x, group, layout, _: _rows_like(x, group, None, layout))
def quantize_fp8_groups(x: Tensor, group_size: int, scale_layout: str, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Quantize x [T, N] to e4m3 [T, N] and float32 scales [T, N / G].

    Args:
        group_size: G, 64 or 128 columns that share a scale: their largest / 448.
        scale_layout: "row", "column" (strides 1, T) or "tma" (strides 1, T to the next 4).
        ue8m0: Whether scales are raised to the next power of two.
    Raises:
        ValueError: Shapes or dtypes do not match, or the group size or layout does not exist.
    """
    values, scales = _rows_like(x, group_size, None, scale_layout)
    write_rows_(x, TargetRows(0, values, scales, ue8m0=ue8m0))
    return values, scales


@operator("quantize_nvfp4", fake=lambda x, global_scale: _rows_like(x, formats.NVFP4_GROUP, global_scale))
def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, N] to pairs of e2m1 [T, N / 2] uint8 and their scales, e4m3 [T to the next 128, N / 16 to the
    next 4] in tiles of 128 x 4.

    Args:
        global_scale: Global scale, float32 of one element: 448 * 6 over the largest value that x may hold.
    Raises:
        ValueError: Shapes or dtypes do not match.
    """
    values, scales = _rows_like(x, formats.NVFP4_GROUP, global_scale)
    write_rows_(x, TargetRows(0, values, scales, global_scale))
    return values, scales


@operator("project_values_fp8", fake=lambda call, scale: _rows_of_product(call, 1, scale)[0])
def project_values_fp8(call: ValueProjection, scale: Tensor) -> Tensor:
    """Return `quantize_fp8` of `project_values`, [T, h V].

    Raises:
        ValueError: Shapes or dtypes do not match.
    """
    values, _ = _rows_of_product(call, 1, scale)
    project_rows_(call, TargetRows(0, values, scale=scale))
    return values


@operator(
    "project_values_fp8_groups",
    fake=lambda call, group, layout, _: _rows_of_product(call, group, None, layout),
)
def project_values_fp8_groups(
    call: ValueProjection, group_size: int, scale_layout: str, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """Return `quantize_fp8_groups` of `project_values`, [T, h V] and scales [T, h V / G].

    Raises:
        ValueError: Shapes or dtypes do not match, the group size or layout does not exist, or a group would cross heads
            (V % G != 0).
    """
    values, scales = _rows_of_product(call, group_size, None, scale_layout)
    project_rows_(call, TargetRows(0, values, scales, ue8m0=ue8m0))
    return values, scales


@operator(
    "project_values_nvfp4", fake=lambda call, global_scale: _rows_of_product(call, formats.NVFP4_GROUP, global_scale)
)
def project_values_nvfp4(call: ValueProjection, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return `quantize_nvfp4` of `project_values`, [T, h V / 2] and its scales.

    Raises:
        ValueError: Shapes or dtypes do not match, or a group of 16 would cross heads.
    """
    values, scales = _rows_of_product(call, formats.NVFP4_GROUP, global_scale)
    project_rows_(call, TargetRows(0, values, scales, global_scale))
    return values, scales
