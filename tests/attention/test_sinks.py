"""Attention sinks: the reference against a softmax with one more logit, the kernel against the reference.

The kernel runs in Triton's interpreter, on a GPU if there is one, and is compiled for Hopper.
"""

import torch
from torch import Tensor
from triton.compiler import ASTSource

from dcpmla.attention.output.sinks import apply_sinks
from dcpmla.attention.triton import sinks as kernels
from tests.support.hopper import compile_for_hopper
from tests.support.kernels import on_both, run_kernels

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make_case(num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of a wider tensor, LSEs of a transposed one with an empty row, whose output is NaN, and sinks."""
    generator = torch.Generator().manual_seed(num_tokens)
    out = torch.randn(num_tokens, num_heads, width + 8, generator=generator).to(dtype)[..., :width]
    lse = 3 * torch.randn(num_heads, num_tokens, generator=generator).T
    out[:1, -1:], lse[:1, -1:] = torch.nan, -torch.inf
    return out, lse, 3 * torch.randn(num_heads, generator=generator)


def test_a_sink_is_one_more_logit() -> None:
    logits, values = torch.randn(7, 3, 5, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    sinks = torch.tensor([-2.0, 0.0, 40.0])
    expected = torch.cat([logits, sinks.double().expand(7, 3)[..., None]], -1).softmax(-1)[..., :-1] @ values
    out = apply_sinks(logits.softmax(-1) @ values, logits.logsumexp(-1).float(), sinks)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(apply_sinks(*make_case(3, 2, 4, torch.float32))[0, 1], torch.zeros(4))  # an empty row


def test_the_custom_op() -> None:
    torch.library.opcheck(apply_sinks.op, make_case(3, 2, 4, torch.bfloat16))


def check_kernel(device: str) -> None:
    for dtype in TOLERANCE if device == "cuda" else (torch.float32, torch.float16):
        for sizes in ((5, 3, 20), (1, 16, 512), (0, 2, 8), (33, 2, 256)):
            case = make_case(*sizes, dtype)
            scaled = kernels.apply_sinks(*(tensor.to(device) for tensor in case)).cpu()
            expected = apply_sinks(*case)
            torch.testing.assert_close(scaled, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@on_both
def test_the_kernel(device: str) -> None:
    run_kernels(device, check_kernel)


def test_the_kernel_compiles() -> None:
    types = {"out_ptr": "*bf16", "scaled_ptr": "*bf16", "lse_ptr": "*fp32", "sinks_ptr": "*fp32"}
    constants = {"NUM_HEADS": 32, "WIDTH": 512, "COLUMNS": 512, "ROWS": 4}
    _, said = compile_for_hopper(kernels.sinks_kernel, ASTSource, types, constants)
    assert "0 bytes spill stores" in said
