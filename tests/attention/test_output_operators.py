"""Quantized outputs: what a layer hands over, operators as tracing sees them, arguments that are refused, the bench."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.__main__ import main
from dcpmla.attention.mla import layer as layer_module
from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from tests.attention.test_compile import MIXED, SMALL, make_layer, run_layer
from tests.attention.test_output_formats import KINDS, codes
from tests.attention.test_output_quant import parts_case, unfused
from tests.support.ranks import run_ranks


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


def check_layer() -> None:
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
            got, wanted = layer.heads_output(*step, output_quant=quant), unfused(plain, quant)
            assert torch.equal(codes(got.values), codes(wanted[0]))
            assert torch.equal(codes(got.scales), codes(wanted[1]))
        return plain

    for project_before_merge, batch in itertools.product((False, True), (MIXED, MIXED[:2], MIXED[2:])):
        layer.dcp = dataclasses.replace(layer.dcp, dcp_project_before_merge=project_before_merge)
        run_layer(layer, batch, compare)


def test_layer() -> None:
    run_ranks(1, check_layer)


CPU = torch.device("cpu")
SCALE, OUT, W_UV = torch.ones(1), torch.zeros(3, 2, 24), torch.zeros(2, 96, 24)


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        (OutputQuant("int8"), "format is 'int8'; choose one of fp8, fp8_groups, nvfp4"),
        (OutputQuant("nvfp4"), "scale is None; format 'nvfp4' needs one, float32 of one element"),
        (
            OutputQuant("fp8", torch.ones(2)),
            r"scale is torch.float32 \(2,\) on cpu; expected torch.float32 of one element",
        ),
        (
            OutputQuant("fp8", SCALE.half()),
            r"scale is torch.float16 \(1,\) on cpu; expected torch.float32 of one element",
        ),
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


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (
            output_ops.quantize_output,
            (OUT, FP8),
            r"x is torch.float32 \(3, 2, 24\); expected \[T, N\] of bfloat16, float16 or",
        ),
        (
            output_ops.quantize_output,
            (OUT[0].double(), FP8),
            r"x is torch.float64 \(2, 24\); expected \[T, N\] of bfloat16",
        ),
        (output_ops.quantize_output, (OUT[0], NVFP4), "x has 24 columns; groups of 16 must divide them"),
        (output_ops.quantize_output, (W_UV[:, :, 0], IN_64), "x has 96 columns; groups of 64 must divide them"),
        (
            output_ops.project_quantized,
            (ValueProjection(OUT, W_UV[:1]), FP8),
            r"out has shape \(3, 2, 24\), w_uv \(1, 96, 24\); expected \[T, h, L\]",
        ),
        (
            output_ops.project_quantized,
            (ValueProjection(OUT, W_UV.half()), FP8),
            "out is torch.float32, w_uv torch.float16; expected both in one of",
        ),
        (
            output_ops.project_quantized,
            (ValueProjection(OUT, W_UV), IN_64),
            "w_uv has 96 rows for a head; groups of 64 must divide them, so that none crosses heads",
        ),
        (
            output_ops.project_quantized,
            (ValueProjection(OUT, W_UV[:, :24]), NVFP4),
            "w_uv has 24 rows for a head; groups of 16 must",
        ),
        (
            OutputRows,
            (3, W_UV, W_UV.dtype, OutputQuant("fp8_groups")),
            "w_uv has 96 rows for a head; groups of 128 must",
        ),
        (
            OutputRows,
            (3, W_UV, torch.float64, FP8),
            "dtype is torch.float64; outputs of bfloat16, float16 and float32 can be quantized",
        ),
    ],
)
def test_mistakes_are_named(call: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*arguments)


@pytest.mark.usefixtures("one_process_on_cpu")
def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "output.json"
    options = ["--heads", "2", "--tokens", "3,1", "--device", "cpu", "--commit", "abc", "--json", str(out)]
    assert main(["bench", "output", *options]) == 0
    rows = json.loads(out.read_text())["rows"]
    kinds = ["fp8", "fp8 / 128", "fp8 / 128 ue8m0", "fp8 / 64", "nvfp4"]
    assert [(row["tokens"], row["quantization"]) for row in rows] == [
        (num_tokens, kind) for num_tokens in (3, 1) for kind in kinds
    ]
    assert all(row["heads"] == 2 and row["different"] == 0 and not row["in_graph"] for row in rows)
    assert all(row[time] > 0 for row in rows for time in ("project_us", "apart_us", "median_us"))
    lines = capsys.readouterr().out
    assert "heads 2, tokens 3:" in lines
    assert lines.count("0 of 2 wrong") == len(kinds)
    assert main(["bench", "output", "--tokens", "0"]) == 2
    assert "--tokens: '0' is not a whole number" in capsys.readouterr().err
