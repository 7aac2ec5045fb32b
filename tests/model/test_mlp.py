"""The activation of MLPs: torch's own functions, and the kernel against them."""

import pytest
import torch
from torch.nn import functional

from dcpmla.model.glu import SWIGLU, Glu, clamp_after_silu
from dcpmla.model.mlp import activate_rows
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import quantize_groups
from tests.support.glu import GLUS, glu_of
from tests.support.kernels import on_both, run_kernels

WIDTHS = (1, 48, 128, 1025, 1152)


def wanted(gate_up: torch.Tensor, glu: Glu) -> torch.Tensor:
    return glu_of(*gate_up.chunk(2, -1), glu)


def random_rows(width: int) -> torch.Tensor:
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(width)) * 3
    gate_up[1, 0], gate_up[2, width] = torch.nan, torch.inf
    return gate_up


@pytest.mark.parametrize("glu", GLUS)
def test_values(glu: Glu) -> None:
    for width in WIDTHS:
        gate_up = random_rows(width)
        torch.testing.assert_close(activate_rows(gate_up, glu), wanted(gate_up, glu).float(), equal_nan=True)
        rounded = activate_rows(gate_up.bfloat16(), glu)
        torch.testing.assert_close(rounded, wanted(gate_up.bfloat16(), glu).bfloat16(), equal_nan=True)


@pytest.mark.parametrize("limit", [1e-3, 0.05, 0.3, 1.0, 4.0, 7.0, 1e3])
def test_bounds_after_silu(limit: float) -> None:
    gate_up = torch.cat([random_rows(1025) * scale * max(limit, 0.1) for scale in (0.3, 1.0, 10.0)])
    gate, up = gate_up.double().chunk(2, -1)
    expected = functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    out = activate_rows(gate_up, clamp_after_silu(limit))
    torch.testing.assert_close(out, expected.float(), equal_nan=True)
    assert clamp_after_silu(0) == SWIGLU


def check_kernel(device: str) -> None:
    from dcpmla.model.kernels import glu as kernels

    for width in WIDTHS:
        for glu in GLUS:
            gate_up = random_rows(width)
            out, *nothing = kernels.activate_rows(gate_up.to(device), glu, False)
            assert [part.numel() for part in nothing] == [0, 0]
            torch.testing.assert_close(out.cpu(), wanted(gate_up, glu).float(), equal_nan=True)
            if width % 128 == 0:
                gate_up = gate_up.nan_to_num(0.0, 9.0).bfloat16().to(device)
                rows = kernels.activate_rows(gate_up, glu, False)[0]
                codes = kernels.activate_rows(gate_up, glu, True)[1:]
                for found, expected in zip(codes, quantize_groups(rows.cpu(), 128), strict=True):
                    assert torch.equal(found.cpu().float(), expected.float())
    assert kernels.activate_rows(torch.empty(0, 8, device=device), SWIGLU, False)[0].shape == (0, 4)


def test_the_operator() -> None:
    gate_up = random_rows(128).nan_to_num(0.0, 9.0)
    out, quantized = activate_rows(gate_up, GLUS[1]), activate_rows(gate_up, GLUS[1], quantizes=True)
    assert isinstance(out, torch.Tensor)
    for found, expected in zip(quantized, quantize_rows(out), strict=True):
        assert torch.equal(found, expected)
    for quantizes in (False, True):
        arguments = gate_up, *SWIGLU, quantizes
        torch.library.opcheck(torch.ops.dcpmla.glu, arguments, test_utils=("test_schema", "test_faketensor"))


@on_both
def test_the_kernel(device: str) -> None:
    run_kernels(device, check_kernel)
