"""Quantized outputs: what a layer hands over, operators as tracing sees them, arguments that are refused."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.mla import layer as layer_module
from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from tests.attention.test_compile import MIXED, SMALL, make_layer, run_layer
from tests.attention.test_output_formats import KINDS
from tests.attention.test_output_quant import assert_same, parts_case, unfused
from tests.support.ranks import on_ranks


def test_operators() -> None:
    """Schema, shapes and strides that tracing is told: `torch.library.opcheck`.

    It cannot compare e4m3 that an operator writes into.
    """
    in_place = ("test_autograd_registration", "test_faketensor")
    for num_tokens, quant in ((5, KINDS[0]), (5, KINDS[3]), (5, KINDS[-1]), (0, KINDS[2]), (0, KINDS[-1])):
        parts, w_uv = parts_case(torch.float32, num_tokens, 2, 24, 128)
        call = ValueProjection(parts[0], w_uv)
        x = project_values(call)
        torch.library.opcheck(output_ops.quantize_output.op, (x, *quant))
        torch.library.opcheck(output_ops.project_quantized.op, (*call, *quant))
        result = quant.empty(num_tokens, 256, x.device)
        into = quant.target(*result)
        torch.library.opcheck(output_ops.write_rows_.op, (x, *into), test_utils=in_place)
        torch.library.opcheck(output_ops.project_rows_.op, (*call, *into), test_utils=in_place)


@on_ranks(1)
def test_layer() -> None:
    """Check decodes, a prefill and padding in one step, all kinds; with W_UV after the merge and before it."""
    config = dataclasses.replace(SMALL, num_heads=2, v_head_dim=128)
    layer = make_layer(config, 1, "auto", torch.float32, "cpu")
    layer_module.PROJECT_FIRST_TOKENS = 1

    def compare(*step: Any) -> Tensor:
        plain = layer.heads_output(*step)
        assert isinstance(plain, Tensor)
        assert torch.equal(layer(*step), layer.o_proj(plain))
        assert plain[:-2].any(1).all()
        assert not plain[-2:].any()
        for quant in KINDS:
            assert_same(layer.heads_output(*step, output_quant=quant), unfused(plain, quant))
        return plain

    for project_before_merge, batch in itertools.product((False, True), (MIXED, MIXED[:2], MIXED[2:])):
        layer.dcp = dataclasses.replace(layer.dcp, dcp_project_before_merge=project_before_merge)
        run_layer(layer, batch, compare)


CPU = torch.device("cpu")
SCALE, OUT, W_UV = torch.ones(1), torch.zeros(3, 2, 24), torch.zeros(2, 96, 24)


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        (OutputQuant("int8"), "format is 'int8'; choose one of fp8, fp8_groups, nvfp4"),
        (OutputQuant("nvfp4"), "scale is None; format 'nvfp4' needs one, float32 of one element"),
        (OutputQuant("fp8", torch.ones(2)), r"scale is torch.float32 \(2,\) on cpu; expected torch.float32 of one"),
        (OutputQuant("fp8", SCALE.half()), r"scale is torch.float16 \(1,\) on cpu; expected torch.float32 of one"),
        (OutputQuant("fp8", SCALE.to("meta")), r"scale is torch.float32 \(1,\) on meta; expected .* on cpu"),
        (OutputQuant("fp8_groups", SCALE), "scale is given for format 'fp8_groups'"),
        (OutputQuant("fp8_groups", group_size=32), "group_size is 32; choose one of 64, 128"),
        (OutputQuant("fp8_groups", scale_layout="col"), "scale_layout is 'col'; choose one of row, column, tma"),
    ],
)
def test_mistakes_of_formats_are_named(quant: OutputQuant, message: str) -> None:
    """By all that take a format."""
    for call in (
        lambda: quant.checked(CPU),
        lambda: output_ops.quantize_output(OUT[0], quant),
        lambda: output_ops.project_quantized(ValueProjection(OUT, W_UV), quant),
        lambda: OutputRows(3, W_UV, W_UV.dtype, quant),
    ):
        with pytest.raises(ValueError, match=message):
            call()


FP8, NVFP4, IN_64 = OutputQuant("fp8", SCALE), OutputQuant("nvfp4", SCALE), OutputQuant("fp8_groups", group_size=64)


def quantize(x: Tensor, quant: OutputQuant) -> object:
    return output_ops.quantize_output(x, quant)


def project(w_uv: Tensor, quant: OutputQuant) -> object:
    return output_ops.project_quantized(ValueProjection(OUT, w_uv), quant)


def collect(dtype: torch.dtype, quant: OutputQuant) -> object:
    return OutputRows(3, W_UV, dtype, quant)


@pytest.mark.parametrize(
    ("call", "argument", "quant", "message"),
    [
        (quantize, OUT, FP8, r"x is torch.float32 \(3, 2, 24\); expected \[T, N\] of bfloat16, float16 or"),
        (quantize, OUT[0].double(), FP8, r"x is torch.float64 \(2, 24\); expected \[T, N\] of bfloat16"),
        (quantize, OUT[0], NVFP4, "x has 24 columns; groups of 16 must divide them"),
        (quantize, W_UV[:, :, 0], IN_64, "x has 96 columns; groups of 64 must divide them"),
        (project, W_UV[:1], FP8, r"out has shape \(3, 2, 24\), w_uv \(1, 96, 24\); expected \[T, h, L\]"),
        (project, W_UV.half(), FP8, "out is torch.float32, w_uv torch.float16; expected both in one of"),
        (project, W_UV, IN_64, "w_uv has 96 rows for a head; groups of 64 must divide them, so that none crosses"),
        (project, W_UV[:, :24], NVFP4, "w_uv has 24 rows for a head; groups of 16 must"),
        (collect, torch.float32, OutputQuant("fp8_groups"), "w_uv has 96 rows for a head; groups of 128 must"),
        (collect, torch.float64, FP8, "dtype is torch.float64; outputs of bfloat16, float16 and float32 can be"),
    ],
)
def test_mistakes_are_named(call: Any, argument: Any, quant: OutputQuant, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(argument, quant)
