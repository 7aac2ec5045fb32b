"""Quantized outputs: parts of a result and kernels against plain torch.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dcpmla.attention.output import kernels
from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output import rows as rows_module
from dcpmla.attention.output.formats import OutputQuant, TargetRows
from dcpmla.attention.output.gates import apply_gates
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.cache.formats import FP8
from dcpmla.parallel.quantized import QuantizedRows
from tests.attention.test_output_formats import KINDS, TIES, codes, unswizzle
from tests.support.hopper import compile_source, new_source
from tests.support.kernels import on, on_both, randn, run_kernels


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
    """Append parts as a layer does, and leave the rows of padding, which the last part may be, to `pad`."""
    padding = num_padding(parts) if padding is None else padding  # given where no one may wait for the GPU
    rows = OutputRows(sum(map(len, parts)), w_uv, w_uv.dtype, quant)
    for part in parts[:-1] if padding else parts:
        if part.ndim == 3:
            rows.project(part)
        else:
            rows.append(part)
    rows.pad()
    return rows.rows()


def test_plain_parts_are_written_once() -> None:
    """Parts beside each other are rows of one result; one that is the whole result is neither copied nor written."""
    for dtype in (torch.float64, torch.bfloat16):
        parts, w_uv = parts_case(dtype, 7, 3, 24, 128)
        projected = project_values(ValueProjection(parts[0], w_uv))
        assert torch.equal(written(parts, w_uv, None), torch.cat([projected, *parts[1:]]))
        assert torch.equal(written(parts[::-1], w_uv, None), torch.cat([*parts[:0:-1], projected]))
        assert torch.equal(written(parts[:1], w_uv, None), projected)
        assert written(parts[1:2], w_uv, None) is parts[1]
        with patch.object(rows_module, "project_rows_") as write:
            written(parts[:1], w_uv, None)
        assert not write.called


def test_parts_and_fused_operators_are_the_quantized_whole() -> None:
    """With gates, too, after which rows are quantized; padding is zeros."""
    for quant, dtype in itertools.product(KINDS, (torch.float32, torch.bfloat16)):
        parts, w_uv = parts_case(dtype, 7, 3, 24, 128)
        projected = project_values(ValueProjection(parts[0], w_uv))
        for got, plain in (
            (written(parts, w_uv, quant), torch.cat([projected, *parts[1:]])),
            (written(parts[:1], w_uv, quant), projected),
        ):
            wanted = unfused(plain, quant)
            assert_same(got, wanted)
            assert got.scales.stride() == wanted[1].stride()
        assert_same(fused(parts[0], w_uv, quant), got)
        logits = randn(7, 3 * 128, dtype=dtype, seed=3)
        gated = torch.cat([apply_gates(projected, logits), parts[2][:2]])  # type: ignore[list-item]
        for of_parts in (True, False):  # whether parts bring the gates' logits, or `rows` takes them
            rows = OutputRows(9, w_uv, dtype, quant, has_gates=True)
            rows.project(parts[0], None, logits.unflatten(1, (3, -1)) if of_parts else None)
            rows.pad()
            padded = torch.cat([logits, torch.zeros_like(logits[:2])])
            assert_same(rows.rows(None if of_parts else padded), unfused(gated, quant))


def assert_same(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(codes(mine), codes(theirs))


def unfused(x: Tensor, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    """By the operator that takes rows."""
    return with_scale(output_ops.quantize_output(x, quant), quant)


def fused(out: Tensor, w_uv: Tensor, quant: OutputQuant) -> tuple[Tensor, Tensor]:
    """Quantize by the operator that applies W_UV first."""
    return with_scale(output_ops.project_quantized(ValueProjection(out, w_uv), quant), quant)


def with_scale(rows: tuple[Tensor, Tensor], quant: OutputQuant) -> tuple[Tensor, Tensor]:
    """Operators return no scales for fp8, whose scale is an option."""
    return (rows[0], quant.scale) if quant.format == "fp8" and quant.scale is not None else rows


def numbers(values: Tensor) -> Tensor:
    """Codes -> whole numbers in the order of what they stand for."""
    if values.dtype == torch.uint8:
        values = torch.stack([values & 15, values >> 4], -1)
    code, sign = values.view(torch.uint8).int(), 8 if values.dtype == torch.uint8 else 128
    return torch.where(code >= sign, sign - code, code)


def check_kernels(device: str) -> None:
    """All kinds that take such heads, into memory that holds other bytes, against plain torch on the CPU.

    Rows as they are: every byte. After W_UV: sums of another order round to another number of 16 bits at times,
    which has another code more rarely.
    """
    half = torch.float16
    cases = [(half, 19, 3, 72, 128), (half, 131, 1, 16, 192)]
    cases += [(torch.float32, 5, 5, 40, 48), (torch.float32, 0, 3, 40, 20)]
    if device == "cuda":
        sizes = [(num_tokens, 16, 512, 128) for num_tokens in (0, 1, 17, 33, 128, 300)]
        sizes += [(70, 5, 512, 256), (9, 3, 256, 192), (20, 5, 72, 48)]
        cases = [(dtype, *each) for dtype in (torch.bfloat16, half, torch.float32) for each in sizes]
    for case in cases:
        check_kinds(device, *case)


def check_kinds(device: str, dtype: torch.dtype, num_tokens: int, heads: int, rank: int, value: int) -> None:
    for quant in KINDS:
        if value % quant.group:
            continue
        parts, w_uv = parts_case(dtype, num_tokens, heads, rank, value)
        projected = project_values(ValueProjection(parts[0].float(), w_uv.float())).to(dtype)
        wanted: QuantizedRows = written([projected, *parts[1:]], w_uv, quant)
        got = quant.empty(num_tokens + 9, heads * value, torch.device(device))
        got.values.view(torch.uint8).fill_(0x7F)
        scale = None if quant.scale is None else quant.scale.to(device)
        scales = None if quant.format == "fp8" else got.scales
        if scales is not None and heads * value % 64 == 0:  # columns of padding are zeros from the start
            scales.fill_(torch.nan)
        first_row = 0
        for part in parts:
            into = TargetRows(first_row, got.values, scales, scale, quant.ue8m0)
            if part.ndim == 3:
                kernels.project_rows(ValueProjection(on(device, part), on(device, w_uv)), into)
            else:
                kernels.quantize_rows(on(device, part), into)
            first_row += len(part)
        assert torch.equal(codes(got.values)[num_tokens:], codes(wanted.values)[num_tokens:])
        difference = (numbers(got.values.cpu()) - numbers(wanted.values)).abs()
        assert difference.max() <= 1
        assert (difference > 0).double().mean() < 5e-4
        if quant.format == "nvfp4":
            mine, theirs = (torch.from_numpy(unswizzle(x.cpu())) for x in (got.scales, wanted.scales))
            assert torch.equal(mine[num_tokens:], theirs[num_tokens:])
            assert (mine != theirs).double().mean() < 5e-4
        elif quant.format == "fp8_groups":
            assert torch.equal(got.scales[num_tokens:].cpu(), wanted.scales[num_tokens:])
            torch.testing.assert_close(got.scales.cpu(), wanted.scales, rtol=1e-2, atol=0)


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_kernels)


@pytest.mark.gpu
def test_operators_run_the_kernels() -> None:
    """Compare the operators on a GPU, into one result and apart, at DeepSeek's sizes; then replayed in a graph."""
    for quant in KINDS:
        scale = None if quant.scale is None else quant.scale.cuda()
        on_gpu = quant._replace(scale=scale)
        parts, w_uv = parts_case(torch.bfloat16, 130, 16, 512, 128)
        moved, w_uv = on("cuda", parts), on("cuda", w_uv)
        got = written(moved, w_uv, on_gpu)
        alone = fused(moved[0], w_uv, on_gpu)
        assert torch.equal(codes(got.values)[:130], codes(alone[0]))
        rows = torch.cat([project_values(ValueProjection(moved[0], w_uv)), *moved[1:]])
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
    parts, w_uv = parts_case(torch.bfloat16, 3, 128, 512, 128)
    scale, first_row = torch.ones(1, device="cuda"), 2**31 // (128 * 128)
    values = torch.zeros(first_row + 9, 128 * 128, dtype=FP8, device="cuda")
    call = ValueProjection(on("cuda", parts[0]), on("cuda", w_uv))
    kernels.project_rows(call, TargetRows(first_row, values, scale=scale))
    kernels.quantize_rows(on("cuda", parts[1]), TargetRows(first_row + 3, values, scale=scale))
    wanted = written(parts[:2], w_uv, OutputQuant("fp8", scale=scale.cpu())).values
    assert (codes(values[first_row:]) != codes(wanted)).double().mean() < 5e-4
    assert not codes(values[:9]).any()


MULTIPLES = "(width|heads)$"


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
    values, scales = {1: ("fp8e4nv", "fp32"), 16: ("u8", "fp8e4nv")}.get(group, ("fp8e4nv", "fp32"))
    types = {"x_ptr": "*bf16", "values_ptr": f"*{values}", "scales_ptr": f"*{scales}", "scale_ptr": "*fp32"}
    constants = {
        "GROUP": group,
        "UE8M0": ue8m0,
        **({"scales_ptr": None} if group == 1 else {"scale_ptr": None} if group > 16 else {}),
    }
    compile_source(new_source(kernels.quantize_kernel, types, {**constants, "ROWS": 8, "COLUMNS": 512}, MULTIPLES))
    sizes = {"VALUE": 128, "RANK": 512, **({} if w_uv == "fp8e4nv" else {"w_scales_ptr": None})}
    for tiling in (kernels.TILINGS[tile] for tile in tiles):
        types["out_desc"] = f"tensordesc<bf16[1, {tiling.tokens}, {tiling.depth}]>"
        types["w_uv_desc"] = f"tensordesc<{w_uv}[1, 128, {tiling.depth}]>"
        types |= {"w_scales_ptr": "*fp32"} if w_uv == "fp8e4nv" else {}
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        compiled = compile_source(new_source(kernels.project_kernel, types, {**constants, **sizes}, MULTIPLES), options)
        assert ("wgmma" in compiled.asm["ptx"]) == (tiling.tokens >= 64)
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 232_448
