"""Kernels that quantize and dequantize, bit by bit with torch on a CPU: denormals, the ends of ranges, zeros.

They run on a GPU, and in Triton's interpreter without one.
"""

import itertools

import torch
from torch import Tensor

from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output.formats import OutputQuant, TargetRows
from dcpmla.parallel.formats import Quantized, dequantize
from dcpmla.parallel.quantized import quantize_groups
from tests.attention.test_output_formats import codes
from tests.support.kernels import on_both, run_kernels

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH = 256
OUTPUTS = (
    OutputQuant("fp8_groups"),
    OutputQuant("fp8_groups", group_size=64, ue8m0=True),
    *(OutputQuant("fp8", scale=torch.tensor([scale])) for scale in (1.0, 1e-3, 1e30)),
    *(OutputQuant("nvfp4", scale=torch.tensor([scale])) for scale in (1.0, 1e4)),
)


def extreme_rows(dtype: torch.dtype) -> Tensor:
    """Return rows [9, 256] of numbers that round, saturate or vanish."""
    column = torch.arange(1, WIDTH + 1, dtype=torch.float64)
    sign = 1 - 2 * (column % 2)
    rows = [
        torch.zeros_like(column),
        1e-45 * column,  # denormals of float32
        1e-41 * column,  # denormals of bfloat16
        1e-38 * column,
        1e-10 * column / WIDTH,  # no magnitude above the smallest that sets a scale
        2.0 ** (column % 24 - 16),  # codes of e4m3 down to its denormals
        (column + 0.5) / 16,  # ties
        448 * column / 128,
        torch.where(column % 128 == 5, torch.finfo(dtype).max, 1e-3),
    ]
    return (torch.stack(rows) * sign).to(dtype)


def check_rows(device: str) -> None:
    """Compare rows quantized as a projection's input and as attention's output."""
    from dcpmla.attention.output import kernels as output_kernels
    from dcpmla.parallel.kernels import quantize as kernels

    for dtype in DTYPES:
        x = extreme_rows(dtype)
        values, scales = kernels.quantize_rows(x.to(device))
        expected = quantize_groups(x, 128)
        assert torch.equal(values.cpu().float(), expected[0].float()), dtype  # -0 may become 0
        assert torch.equal(scales.cpu(), expected[1]), dtype
        for quant in OUTPUTS:
            wanted, got = (quant.empty(len(x), WIDTH, torch.device(where)) for where in ("cpu", device))
            scale = None if quant.scale is None else quant.scale.to(device)
            for run, rows, into, factor in (
                (output_ops.write_rows_.reference, x, wanted, quant.scale),
                (output_kernels.quantize_rows, x.to(device), got, scale),
            ):
                scales = None if quant.format == "fp8" else into.scales
                run(rows, TargetRows(0, into.values, scales, factor, quant.ue8m0))
            if quant.format == "nvfp4":
                assert torch.equal(codes(got.values), codes(wanted.values)), (quant, dtype)
            else:
                assert torch.equal(got.values.cpu().float(), wanted.values.float()), (quant, dtype)
            if quant.format == "fp8_groups":
                assert torch.equal(got.scales.cpu(), wanted.scales), (quant, dtype)


def check_weights(device: str) -> None:
    """Compare all codes of e4m3 under all scales of groups, and under the ends of float32's range."""
    from dcpmla.parallel.kernels import group_linear
    from dcpmla.parallel.kernels import quantize as kernels

    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = every[~every.float().isnan()]
    row = torch.cat([numbers, numbers[:2]])  # 256
    exponents = torch.arange(255, dtype=torch.uint8)
    groups = Quantized(row.view(torch.uint8).repeat(len(exponents), 1).view(FP8), exponents[:, None].repeat(1, 8))
    scales = torch.tensor([1e-45, 1e-40, 2.0**-126, 1e-30, 1.0, 1e30, 3e38, 0.0])
    block = Quantized(row.view(torch.uint8).repeat(8 * 128, 1).view(FP8), scales[:, None].repeat(1, 2))
    for dtype, (weight, run) in itertools.product(
        DTYPES,
        (
            (groups, group_linear.dequantize_groups),
            (block, lambda weight, dtype: kernels.dequantize(*weight[:2], dtype)),
        ),
    ):
        got = run(weight.map(lambda part: part.to(device)), dtype).cpu()
        expected = dequantize(weight, dtype)
        assert got.dtype == dtype
        assert torch.equal(got.isnan(), expected.isnan()), dtype
        assert torch.equal(got.nan_to_num(0), expected.nan_to_num(0)), dtype


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_rows, check_weights)
