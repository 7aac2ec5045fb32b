"""The activation of MLPs: torch's own functions, and the kernel against them."""

import pytest
import torch
from torch.nn import functional

from dcpmla.model.mlp import swiglu
from tests.support.shared_memory import run_interpreted

WIDTHS = (1, 48, 1025)


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
            out = kernels.swiglu(gate_up.to(device), limit).cpu()
            torch.testing.assert_close(out, wanted(gate_up, limit).float(), equal_nan=True)
    assert kernels.swiglu(torch.empty(0, 8, device=device), None).shape == (0, 4)


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted(1, check_kernel, "cpu")


@pytest.mark.gpu
def test_the_kernel() -> None:
    check_kernel("cuda")
