"""Gates of attention's output: the torch code and the kernel against float64.

The kernel runs in Triton's interpreter, on a GPU if there is one, and is compiled for Hopper.
"""

import pytest
import torch
from torch import Tensor
from triton.compiler import ASTSource

from dcpmla.attention.output.gates import apply_gates
from dcpmla.attention.triton import gates as kernels
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import quantize_groups
from tests.support.hopper import compile_for_hopper
from tests.support.kernels import on_both, run_kernels

SIZES = ((1, 48, 3), (3, 48, 48), (2, 1152, 9), (2, 1280, 1280))  # tokens, columns, gates
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make_rows(num_tokens: int, width: int, num_gates: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    shapes = (num_tokens, width), (num_tokens, num_gates)
    out, logits = ((3 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes)
    return out, logits


def test_the_operator() -> None:
    out, logits = make_rows(3, 256, 2, torch.bfloat16)
    rows = apply_gates(out, logits)
    assert isinstance(rows, Tensor)
    for part, expected in zip(apply_gates(out, logits, quantizes=True), quantize_rows(rows), strict=True):
        assert torch.equal(part, expected)
    for quantizes in (False, True):
        tests = "test_schema", "test_faketensor"
        torch.library.opcheck(torch.ops.dcpmla.apply_gates, (out, logits, quantizes), test_utils=tests)


def check_kernel(device: str) -> None:
    for dtype in TOLERANCE if device == "cuda" else (torch.float32, torch.bfloat16):
        for sizes in (*SIZES, (0, 8, 2)):
            out, logits = (tensor.to(device) for tensor in make_rows(*sizes, dtype))
            rows, *empty = kernels.apply_gates(out, logits, False)
            assert [part.numel() for part in empty] == [0, 0]
            tolerance = TOLERANCE[dtype]
            gates = logits.double().sigmoid().repeat_interleave(sizes[1] // sizes[2], 1)
            expected = (out.double() * gates).to(dtype)
            for found in (rows, apply_gates(out.cpu(), logits.cpu())):
                torch.testing.assert_close(found.cpu(), expected.cpu(), atol=tolerance, rtol=tolerance)
            if sizes[1] % 128 == 0:
                codes = kernels.apply_gates(out, logits, True)[1:]
                for part, expected in zip(codes, quantize_groups(rows.cpu(), 128), strict=True):
                    assert torch.equal(part.cpu().float(), expected.float())


@on_both
def test_the_kernel(device: str) -> None:
    run_kernels(device, check_kernel)


@pytest.mark.parametrize("quantizes", [False, True])
def test_the_kernel_compiles(quantizes: bool) -> None:
    types = dict.fromkeys(("out_ptr", "logits_ptr", "gated_ptr"), "*bf16")
    types |= {"gated_ptr": "*fp8e4nv", "scales_ptr": "*fp32"} if quantizes else {}
    constants = {"WIDTH": 4096, "NUM_GATES": 4096} | ({} if quantizes else {"scales_ptr": None})
    _, said = compile_for_hopper(kernels.gates_kernel, ASTSource, types, constants, num_warps=4)
    assert "0 bytes spill stores" in said
