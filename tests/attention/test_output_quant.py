"""Quantized outputs: kernels against plain torch, what a layer hands over.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dcpmla.__main__ import main
from dcpmla.attention import layer as layer_module
from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output import rows as rows_module
from dcpmla.attention.output.quant import OutputQuant
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.projections import project_values
from dcpmla.cache.formats import FP8
from dcpmla.parallel.fp8 import QuantizedRows
from tests.attention.test_compile import MIXED, SMALL, make_layer, run_layer
from tests.attention.test_output_formats import KINDS, TIES, codes, randn, unswizzle
from tests.support.ranks import run_ranks


def parts_case(dtype: torch.dtype, num_tokens: int, heads: int, rank: int, value: int) -> tuple[list[Tensor], Tensor]:
    """Attention over latents as a view, values with a stride, padding; W_UV as it lies under W_UK."""
    out = randn(num_tokens, heads, rank + 16, dtype=dtype)[..., :rank]
    values = randn(6, heads * value + 24, dtype=dtype, seed=1)[:, : heads * value] * 3
    values[0, :16] = torch.tensor(TIES)  # with a global scale of 256 they are what is rounded
    w_uv = (randn(heads, value + 16, rank, seed=2) / rank**0.5).to(dtype)[:, 16:]
    return [out, values, torch.zeros(3, heads * value, dtype=dtype)], w_uv


def num_padding(parts: Sequence[Tensor]) -> int:
    """Count the rows of the last part, if it is all zeros."""
    return len(parts[-1]) if len(parts) > 1 and not parts[-1].any() else 0


def written(parts: Sequence[Tensor], w_uv: Tensor, quant: OutputQuant | None, padding: int | None = None) -> Any:
    """Append parts as a layer does, and leave the rows of padding, which the last part may be, to `finish`."""
    padding = num_padding(parts) if padding is None else padding  # given where no one may wait for the GPU
    rows = OutputRows(sum(map(len, parts)), w_uv, w_uv.dtype, quant)
    for part in parts[:-1] if padding else parts:
        if part.ndim == 3:
            rows.project(part)
        else:
            rows.append(part)
    return rows.finish()


def test_plain_parts_are_written_once() -> None:
    """Parts beside each other are rows of one result; one that is the whole result is neither copied nor written."""
    for dtype in (torch.float64, torch.bfloat16):
        parts, w_uv = parts_case(dtype, 7, 3, 24, 128)
        projected = project_values(parts[0], w_uv)
        assert torch.equal(written(parts, w_uv, None), torch.cat([projected, *parts[1:]]))
        assert torch.equal(written(parts[::-1], w_uv, None), torch.cat([*parts[:0:-1], projected]))
        assert torch.equal(written(parts[:1], w_uv, None), projected)
        assert written(parts[1:2], w_uv, None) is parts[1]
        with patch.object(rows_module, "project_rows_") as write:
            written(parts[:1], w_uv, None)
        assert not write.called


def test_parts_and_fused_operators_are_the_quantized_whole() -> None:
    for quant, dtype in itertools.product(KINDS, (torch.float32, torch.bfloat16)):
        parts, w_uv = parts_case(dtype, 7, 3, 24, 128)
        projected = project_values(parts[0], w_uv)
        for got, plain in (
            (written(parts, w_uv, quant), torch.cat([projected, *parts[1:]])),
            (written(parts[:1], w_uv, quant), projected),
        ):
            wanted = unfused(plain, quant)
            assert torch.equal(codes(got.values), codes(wanted[0]))
            assert torch.equal(codes(got.scales), codes(wanted[1]))
            assert got.scales.stride() == wanted[1].stride()
        assert all(
            torch.equal(codes(mine), codes(theirs))
            for mine, theirs in zip(fused(parts[0], w_uv, quant), got, strict=True)
        )


def unfused(x: Tensor, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    """By the operators that take rows."""
    if quant.kind == "fp8_groups":
        return output_ops.quantize_fp8_groups(x, quant.group_size, quant.scale_layout, quant.ue8m0)
    assert quant.scale is not None
    return (
        output_ops.quantize_nvfp4(x, quant.scale)
        if quant.kind == "nvfp4"
        else (output_ops.quantize_fp8(x, quant.scale), quant.scale)
    )


def fused(out: Tensor, w_uv: Tensor, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    """Quantize by the operators that apply W_UV first."""
    if quant.kind == "fp8_groups":
        return output_ops.project_values_fp8_groups(out, w_uv, quant.group_size, quant.scale_layout, quant.ue8m0)
    assert quant.scale is not None
    if quant.kind == "nvfp4":
        return output_ops.project_values_nvfp4(out, w_uv, quant.scale)
    return output_ops.project_values_fp8(out, w_uv, quant.scale), quant.scale


def move(x: Tensor, device: str) -> Tensor:
    """Copy to a device with the strides it had."""
    base = x if x._base is None else x._base
    return base.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def numbers(values: Tensor) -> Tensor:
    """Codes -> whole numbers in the order of what they stand for."""
    if values.dtype == torch.uint8:
        values = torch.stack([values & 15, values >> 4], -1)
    code, sign = values.view(torch.uint8).int(), 8 if values.dtype == torch.uint8 else 128
    return torch.where(code >= sign, sign - code, code)


def check_kernels(device: str, dtype: torch.dtype, num_tokens: int, heads: int, rank: int, value: int) -> None:
    """All kinds that take such heads, into memory that holds other bytes, against plain torch on the CPU.

    Rows as they are: every byte. After W_UV: sums of another order round to another number of 16 bits at times,
    which has another code more rarely.
    """
    from dcpmla.attention.output import kernels

    for quant in KINDS:
        if value % quant.group:
            continue
        parts, w_uv = parts_case(dtype, num_tokens, heads, rank, value)
        projected = project_values(parts[0].float(), w_uv.float()).to(dtype)
        wanted: QuantizedRows = written([projected, *parts[1:]], w_uv, quant)
        got = quant.empty(num_tokens + 9, heads * value, torch.device(device))
        got.values.view(torch.uint8).fill_(0x7F)
        scale, scales = (
            None if quant.scale is None else quant.scale.to(device),
            None if quant.kind == "fp8" else got.scales,
        )
        if scales is not None and heads * value % 64 == 0:  # columns of padding are zeros from the start
            scales.fill_(torch.nan)
        first_row = 0
        for part in parts:
            into = first_row, got.values, scales, scale, quant.ue8m0
            if part.ndim == 3:
                kernels.project_rows(move(part, device), move(w_uv, device), *into)
            else:
                kernels.quantize_rows(move(part, device), *into)
            first_row += len(part)
        assert torch.equal(codes(got.values)[num_tokens:], codes(wanted.values)[num_tokens:])
        difference = (numbers(got.values.cpu()) - numbers(wanted.values)).abs()
        assert difference.max() <= 1
        assert (difference > 0).double().mean() < 5e-4
        if quant.kind == "nvfp4":
            mine, theirs = (torch.from_numpy(unswizzle(x.cpu())) for x in (got.scales, wanted.scales))
            assert torch.equal(mine[num_tokens:], theirs[num_tokens:])
            assert (mine != theirs).double().mean() < 5e-4
        elif quant.kind == "fp8_groups":
            assert torch.equal(got.scales[num_tokens:].cpu(), wanted.scales[num_tokens:])
            torch.testing.assert_close(got.scales.cpu(), wanted.scales, rtol=1e-2, atol=0)


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: Triton decides to interpret when a kernel is defined."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = """
import torch
from tests.support.interpreter import convert_as_torch
from tests.attention.test_output_quant import check_kernels
convert_as_torch()
check_kernels("cpu", torch.float16, 19, 3, 72, 128)
check_kernels("cpu", torch.float16, 131, 1, 16, 192)
check_kernels("cpu", torch.float32, 5, 5, 40, 48)
check_kernels("cpu", torch.float32, 0, 3, 40, 20)
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=Path(__file__).parent, timeout=200)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels(dtype: torch.dtype) -> None:
    for num_tokens in (0, 1, 17, 33, 128, 300):
        check_kernels("cuda", dtype, num_tokens, 16, 512, 128)
    check_kernels("cuda", dtype, 70, 5, 512, 256)
    check_kernels("cuda", dtype, 9, 3, 256, 192)
    check_kernels("cuda", dtype, 20, 5, 72, 48)


@pytest.mark.gpu
def test_operators_run_the_kernels() -> None:
    """Compare the operators on a GPU, into one result and apart, at DeepSeek's sizes; then replayed in a graph."""
    for quant in KINDS:
        scale = None if quant.scale is None else quant.scale.cuda()
        on_gpu = OutputQuant(
            kind=quant.kind,
            scale=scale,
            group_size=quant.group_size,
            scale_layout=quant.scale_layout,
            ue8m0=quant.ue8m0,
        )
        parts, w_uv = parts_case(torch.bfloat16, 130, 16, 512, 128)
        moved, w_uv = [move(part, "cuda") for part in parts], move(w_uv, "cuda")
        got = written(moved, w_uv, on_gpu)
        alone = fused(moved[0], w_uv, on_gpu)
        assert torch.equal(codes(got.values)[:130], codes(alone[0]))
        rows = torch.cat([project_values(moved[0], w_uv), *moved[1:]])
        difference = (numbers(got.values) - numbers(unfused(rows, on_gpu)[0])).abs()
        assert difference.max() <= 1
        assert (difference > 0).double().mean() < 5e-4
        graph, padding = torch.cuda.CUDAGraph(), num_padding(moved)
        with torch.cuda.graph(graph):
            captured = written(moved, w_uv, on_gpu, padding)
        captured.values.view(torch.uint8).fill_(0)
        graph.replay()
        assert torch.equal(codes(captured.values), codes(got.values))
        assert torch.equal(codes(captured.scales), codes(got.scales))


@pytest.mark.gpu
def test_offsets_past_2_to_the_31() -> None:
    from dcpmla.attention.output import kernels

    parts, w_uv = parts_case(torch.bfloat16, 3, 128, 512, 128)
    scale, first_row = torch.ones(1, device="cuda"), 2**31 // (128 * 128)
    values = torch.zeros(first_row + 9, 128 * 128, dtype=FP8, device="cuda")
    kernels.project_rows(move(parts[0], "cuda"), move(w_uv, "cuda"), first_row, values, None, scale, False)
    kernels.quantize_rows(move(parts[1], "cuda"), first_row + 3, values, None, scale, False)
    wanted = written(parts[:2], w_uv, OutputQuant(kind="fp8", scale=scale.cpu())).values
    assert (codes(values[first_row:]) != codes(wanted)).double().mean() < 5e-4
    assert not codes(values[:9]).any()


def compile_for_hopper(kernel: Any, constants: dict[str, Any], options: dict[str, int], **types: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if name.endswith(("_ptr", "width", "heads"))
    }
    source = ASTSource(
        kernel,
        signature,
        constexprs=constants,
        attrs={at: how for at, how in aligned.items() if kernel.arg_names[at[0]] not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("group", "ue8m0", "tiles", "w_uv"),
    [
        (1, False, (1,), "bf16"),
        (128, False, (3,), "bf16"),
        (128, False, (0, 3), "fp8e4nv"),
        (64, True, (2,), "bf16"),
        (16, False, (0,), "bf16"),
    ],
)
def test_kernels_compile_for_hopper(group: int, ue8m0: bool, tiles: tuple[int, ...], w_uv: str) -> None:
    pytest.importorskip("triton")
    from dcpmla.attention.output.kernels import TILINGS, project_kernel, quantize_kernel

    values, scales = {1: ("fp8e4nv", "fp32"), 16: ("u8", "fp8e4nv")}.get(group, ("fp8e4nv", "fp32"))
    types = {"x_ptr": "*bf16", "values_ptr": f"*{values}", "scales_ptr": f"*{scales}", "scale_ptr": "*fp32"}
    constants = {
        "GROUP": group,
        "UE8M0": ue8m0,
        **({"scales_ptr": None} if group == 1 else {"scale_ptr": None} if group > 16 else {}),
    }
    compiled = compile_for_hopper(quantize_kernel, {**constants, "ROWS": 8, "COLUMNS": 512}, {}, **types)
    assert "sm_90a" in compiled.asm["ptx"]
    sizes = {"VALUE": 128, "RANK": 512, **({} if w_uv == "fp8e4nv" else {"w_scales_ptr": None})}
    for tiling in (TILINGS[tile] for tile in tiles):
        types["out_desc"] = f"tensordesc<bf16[1, {tiling.tokens}, {tiling.depth}]>"
        types["w_uv_desc"] = f"tensordesc<{w_uv}[1, 128, {tiling.depth}]>"
        types |= {"w_scales_ptr": "*fp32"} if w_uv == "fp8e4nv" else {}
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        compiled = compile_for_hopper(project_kernel, {**constants, **sizes}, options, **types)
        assert ("wgmma" in compiled.asm["ptx"]) == (tiling.tokens >= 64)
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 232_448


def test_operators() -> None:
    """Schema, shapes and strides that tracing is told: `torch.library.opcheck`.

    It cannot compare e4m3 that an operator writes into.
    """
    in_place = ("test_autograd_registration", "test_faketensor")
    for num_tokens, quant in ((5, KINDS[0]), (5, KINDS[3]), (5, KINDS[-1]), (0, KINDS[2]), (0, KINDS[-1])):
        parts, w_uv = parts_case(torch.float32, num_tokens, 2, 24, 128)
        x, groups = project_values(parts[0], w_uv), (quant.group_size, quant.scale_layout, quant.ue8m0)
        more: tuple[Any, ...] = groups if quant.scale is None else (quant.scale,)
        torch.library.opcheck(getattr(output_ops, f"quantize_{quant.kind}"), (x, *more))
        torch.library.opcheck(getattr(output_ops, f"project_values_{quant.kind}"), (parts[0], w_uv, *more))
        result = quant.empty(num_tokens, 256, x.device)
        into = 0, result.values, None if quant.kind == "fp8" else result.scales, quant.scale, quant.ue8m0
        torch.library.opcheck(output_ops.write_rows_, (x, *into), test_utils=in_place)
        torch.library.opcheck(output_ops.project_rows_, (parts[0], w_uv, *into), test_utils=in_place)


def check_layer() -> None:
    """Check decodes, a prefill and padding in one step, all kinds; with W_UV after the merge and before it."""
    config = dataclasses.replace(SMALL, num_heads=2, v_head_dim=128)
    layer = make_layer(config, 1, "auto", torch.float32, "cpu")
    layer_module.PROJECT_FIRST_TOKENS = 1

    def compare(*step: Any) -> Tensor:
        plain = layer.attend(*step)
        assert isinstance(plain, Tensor)
        assert torch.equal(layer(*step), layer.o_proj(plain))
        assert plain[:-2].any(1).all()
        assert not plain[-2:].any()
        for quant in KINDS:
            got, wanted = layer.attend(*step, output_quant=quant), unfused(plain, quant)
            assert torch.equal(codes(got.values), codes(wanted[0]))
            assert torch.equal(codes(got.scales), codes(wanted[1]))
        return plain

    for project_before_merge, batch in itertools.product((False, True), (MIXED, MIXED[:2], MIXED[2:])):
        layer.dcp = dataclasses.replace(layer.dcp, dcp_project_before_merge=project_before_merge)
        run_layer(layer, batch, compare)


def test_layer() -> None:
    run_ranks(1, check_layer)


SCALE, OUT, W_UV = torch.ones(1), torch.zeros(3, 2, 24), torch.zeros(2, 96, 24)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OutputQuant(kind="int8"), "kind is 'int8'; choose one of fp8, fp8_groups, nvfp4"),
        (lambda: OutputQuant(kind="nvfp4"), "scale is None; kind 'nvfp4' needs one, float32 of one element"),
        (
            lambda: OutputQuant(kind="fp8", scale=torch.ones(2)),
            r"scale is torch.float32 \(2,\) on cpu; expected torch.float32 of one element on cpu",
        ),
        (
            lambda: OutputQuant(kind="fp8", scale=SCALE.half()),
            r"scale is torch.float16 \(1,\) on cpu; expected torch.float32 of one element",
        ),
        (lambda: OutputQuant(kind="fp8_groups", scale=SCALE), "scale is given for kind 'fp8_groups'"),
        (lambda: OutputQuant(kind="fp8_groups", group_size=32), "group_size is 32; choose one of 64, 128"),
        (
            lambda: OutputQuant(kind="fp8_groups", scale_layout="col"),
            "scale_layout is 'col'; choose one of row, column, tma",
        ),
        (
            lambda: output_ops.quantize_fp8(OUT, SCALE),
            r"x is torch.float32 \(3, 2, 24\); expected \[T, N\] of bfloat16, float16 or",
        ),
        (
            lambda: output_ops.quantize_fp8(OUT[0].double(), SCALE),
            r"x is torch.float64 \(2, 24\); expected \[T, N\] of bfloat16",
        ),
        (
            lambda: output_ops.quantize_fp8(OUT[0], torch.ones(3, 2)),
            r"scale is torch.float32 \(3, 2\) on cpu; expected",
        ),
        (
            lambda: output_ops.quantize_fp8(OUT[0], SCALE.to("meta")),
            r"scale is torch.float32 \(1,\) on meta; expected .* on cpu",
        ),
        (lambda: output_ops.quantize_nvfp4(OUT[0], SCALE), "x has 24 columns; groups of 16 must divide them"),
        (lambda: output_ops.quantize_nvfp4(W_UV[0].T, SCALE.double()), r"global_scale is torch.float64 \(1,\)"),
        (
            lambda: output_ops.quantize_fp8_groups(W_UV[:, :, 0], 64, "row", False),
            "x has 96 columns; groups of 64 must divide them",
        ),
        (lambda: output_ops.quantize_fp8_groups(W_UV[0], 16, "row", False), "group_size is 16; choose one of 64, 128"),
        (
            lambda: output_ops.project_values_fp8(OUT, W_UV[:1], SCALE),
            r"out has shape \(3, 2, 24\), w_uv \(1, 96, 24\); expected \[T, h, L\]",
        ),
        (
            lambda: output_ops.project_values_fp8(OUT, W_UV.half(), SCALE),
            "out is torch.float32, w_uv torch.float16; expected both in one of",
        ),
        (
            lambda: output_ops.project_values_fp8_groups(OUT, W_UV, 64, "row", False),
            "w_uv has 96 rows for a head; groups of 64 must divide them, so that none crosses heads",
        ),
        (
            lambda: output_ops.project_values_nvfp4(OUT, W_UV[:, :24], SCALE),
            "w_uv has 24 rows for a head; groups of 16 must",
        ),
        (
            lambda: OutputRows(3, W_UV, W_UV.dtype, OutputQuant(kind="fp8_groups")),
            "w_uv has 96 rows for a head; groups of 128 must",
        ),
        (
            lambda: OutputRows(3, W_UV, torch.float64, OutputQuant(kind="fp8", scale=SCALE)),
            "dtype is torch.float64; outputs of bfloat16, float16 and float32 can be quantized",
        ),
        (
            lambda: OutputRows(3, W_UV, W_UV.dtype, OutputQuant(kind="fp8", scale=SCALE.to("meta"))),
            r"scale is torch.float32 \(1,\) on meta; expected .* on cpu",
        ),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


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
    assert "2 heads, 3 tokens" in lines
    assert "WRONG" not in lines
    assert main(["bench", "output", "--tokens", "0"]) == 2
    assert "--tokens: '0' is not a whole number" in capsys.readouterr().err
