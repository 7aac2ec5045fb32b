"""The activation of MLPs: torch's own functions, and the kernel against them."""

import pytest
import torch
from torch.nn import functional

from dcpmla.model.mlp import swiglu
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import quantize_groups
from tests.support.shared_memory import run_interpreted

WIDTHS = (1, 48, 128, 1025, 1152)


def wanted(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up


def random_rows(width: int) -> torch.Tensor:
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(width)) * 3
    gate_up[1, 0], gate_up[2, width] = torch.nan, torch.inf
    return gate_up


@pytest.mark.parametrize("limit", [None, 0.7])
def test_values(limit: float | None) -> None:
    for width in WIDTHS:
        gate_up = random_rows(width)
        torch.testing.assert_close(swiglu(gate_up, limit), wanted(gate_up, limit).float(), equal_nan=True)
        rounded = swiglu(gate_up.bfloat16(), limit)
        torch.testing.assert_close(rounded, wanted(gate_up.bfloat16(), limit).bfloat16(), equal_nan=True)


def check_kernel(device: str) -> None:
    from dcpmla.model.kernels import swiglu as kernels

    for width in WIDTHS:
        for limit in (None, 0.7):
            gate_up = random_rows(width)
            out, *nothing = kernels.swiglu(gate_up.to(device), limit, False)
            assert [part.numel() for part in nothing] == [0, 0]
            torch.testing.assert_close(out.cpu(), wanted(gate_up, limit).float(), equal_nan=True)
            if width % 128 == 0:
                gate_up = gate_up.nan_to_num(0.0, 9.0).bfloat16().to(device)
                rows, codes = kernels.swiglu(gate_up, limit, False)[0], kernels.swiglu(gate_up, limit, True)[1:]
                for found, expected in zip(codes, quantize_groups(rows.cpu(), 128), strict=True):
                    assert torch.equal(found.cpu().float(), expected.float())
    assert kernels.swiglu(torch.empty(0, 8, device=device), None, False)[0].shape == (0, 4)


def test_the_operator() -> None:
    gate_up = random_rows(128).nan_to_num(0.0, 9.0)
    out, quantized = swiglu(gate_up, 0.7), swiglu(gate_up, 0.7, quantizes=True)
    assert isinstance(out, torch.Tensor)
    for found, expected in zip(quantized, quantize_rows(out), strict=True):
        assert torch.equal(found, expected)
    for quantizes in (False, True):
        arguments = gate_up, None, quantizes
        torch.library.opcheck(torch.ops.dcpmla.swiglu, arguments, test_utils=("test_schema", "test_faketensor"))


def check_in_the_interpreter() -> None:
    from tests.support.interpreter import convert_as_torch

    convert_as_torch()
    check_kernel("cpu")


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted(1, check_in_the_interpreter)


@pytest.mark.gpu
def test_the_kernel() -> None:
    check_kernel("cuda")
