"""Custom ops (`torch.ops.dcpmla`) that write attention's output: quantized or not, alone or as W_UV's product.

`attention/output/formats.py` specifies the bytes of quantized rows and runs on CPUs; GPUs run the kernels of
`attention/output/kernels.py`. W_UV's product is rounded to attention's dtype before it is quantized, so both ways give
the same result if sums in another order round alike. Quantized outputs come from bfloat16, float16 or float32, and are
finite. No gradients.
"""

from torch import Tensor

from dcpmla.attention.output import formats
from dcpmla.attention.output.formats import OutputQuant, TargetRows
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


def _rows_like(x: Tensor, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    formats.check_rows(x, quant.checked(x.device).group)
    return formats.new_rows(x.shape[0], x.shape[1], quant, x.device)


def _rows_of_product(call: ValueProjection, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    formats.check_projection(call, quant.checked(call.out.device).group)
    num_tokens, (num_heads, value, _) = call.out.shape[0], call.w_uv.shape
    return formats.new_rows(num_tokens, num_heads * value, quant, call.out.device)


@operator("quantize_output", fake=_rows_like)
def quantize_output(x: Tensor, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    """Quantize x [T, N]; return the values and their scales (`new_rows`).

    Raises:
        ValueError: Shapes, dtypes or options do not match.
    """
    values, scales = _rows_like(x, quant)
    write_rows_(x, quant.target(values, scales))
    return values, scales


@operator("project_quantized", fake=_rows_of_product)
def project_quantized(call: ValueProjection, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    """Return `quantize_output` of `project_values`, [T, h V].

    Raises:
        ValueError: Shapes, dtypes or options do not match, or a group would cross heads.
    """
    values, scales = _rows_of_product(call, quant)
    project_rows_(call, quant.target(values, scales))
    return values, scales
