"""The mixture of sums of outputs: the reference against float64, the kernel against the reference.

The kernel runs on a GPU, in Triton's interpreter without one, and is compiled for Hopper. Whole models are compared
with `tests/support/kimi_k3.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.model.calls import Sums
from dcpmla.model.sums import Mixer, mix_sums
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.kernels import on_both, run_kernels

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_case(num_tokens: int, num_stored: int, width: int, dtype: torch.dtype, has_out: bool) -> tuple[Any, ...]:
    """Return stored sums with a row to spare, which holds NaN, the current sum, an output and weights."""
    generator = torch.Generator().manual_seed(num_tokens + num_stored)
    random = (torch.randn(num_stored + 2, num_tokens, width, generator=generator) * 3).to(dtype)
    stored = torch.cat([random[:num_stored], torch.full_like(random[:1], torch.nan)])
    score, norm = torch.randn(2, width, generator=generator)
    return stored, num_stored, random[-2], random[-1] if has_out else None, score, norm.abs().to(dtype)


def wanted(
    stored: Tensor, num_stored: int, current: Tensor, out: Tensor | None, score: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mixture, normalized, and the new sum, float64."""
    total = current.double() if out is None else (current.double() + out.double()).to(current.dtype).double()
    values = [*stored[:num_stored].double(), total]
    logits = [(value / (value.square().mean(-1, keepdim=True) + EPS).sqrt()) @ score.double() for value in values]
    weights = torch.stack(logits).softmax(0)
    mixed = sum(weight[:, None] * value for weight, value in zip(weights, values, strict=True))
    assert isinstance(mixed, Tensor)
    return mixed / (mixed.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double(), total


def check(function: Any, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens, num_stored, width in ((3, 0, 48), (5, 1, 128), (2, 4, 200)):
            for has_out, stores in ((False, False), (True, False), (True, True), (False, True)):
                case = make_case(num_tokens, num_stored, width, dtype, has_out)
                expected, total = wanted(*case)
                moved = [part.to(device) if isinstance(part, Tensor) else part for part in case]
                x, new = function(Sums(*moved[:4]), *moved[4:], EPS, stores)
                torch.testing.assert_close(x.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
                row = moved[0][num_stored]
                if stores:
                    assert torch.equal(row.double().cpu(), total)
                else:
                    assert row.isnan().all()
                assert new.numel() == 0 if stores or not has_out else torch.equal(new.double().cpu(), total)


def test_against_float64() -> None:
    check(mix_sums, "cpu")


def test_sums_of_groups() -> None:
    """After a group's first output the sum before it is stored, and the group's own begins anew."""
    embedding, outputs = torch.randn(2, 8), torch.randn(4, 2, 8)
    first, later = (Mixer(torch.randn(8), torch.ones(8), EPS, stores) for stores in (True, False))
    sums = Sums(torch.empty(2, 2, 8), 0, embedding)
    for mixer, out in zip((first, later, first, later), outputs, strict=True):
        sums = mixer(sums)[1].add(out)
    assert sums.num_stored == 2
    assert torch.equal(sums.stored[0], embedding)
    torch.testing.assert_close(sums.stored[1], outputs[0] + outputs[1])
    assert torch.equal(sums.current, outputs[2])  # type: ignore[arg-type]
    assert torch.equal(sums.out, outputs[3])  # type: ignore[arg-type]


def test_the_operator() -> None:
    stored, *others = make_case(3, 1, 48, torch.float32, True)
    arguments = stored.nan_to_num(0), *others, EPS, False
    torch.library.opcheck(torch.ops.dcpmla.mix_sums, arguments, test_utils=("test_schema", "test_faketensor"))


def check_kernel(device: str) -> None:
    from dcpmla.model.kernels import sums as kernels

    check(kernels.mix_sums, device)
    empty = make_case(0, 1, 48, torch.float32, True)
    assert kernels.mix_sums(Sums(*empty[:4]), *empty[4:], EPS, False)[0].shape == (0, 48)


@on_both
def test_the_kernel(device: str) -> None:
    run_kernels(device, check_kernel)


@pytest.mark.parametrize("has_out", [False, True])
def test_the_kernel_compiles(has_out: bool) -> None:
    """Kimi-K3's rows stay in registers."""
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.sums import mix_sums_kernel

    names = ("stored_ptr", "current_ptr", "out_ptr", "norm_ptr", "x_ptr", "total_ptr")
    types = dict.fromkeys(names, "*bf16") | {
        "score_ptr": "*fp32",
        "num_rows": "i32",
        "num_stored": "i32",
        "eps": "fp32",
    }
    constants: dict[str, Any] = {"WIDTH": 7168, "COLUMNS": 8192} | ({} if has_out else {"out_ptr": None})
    _, said = compile_for_hopper(mix_sums_kernel, ASTSource, types, constants, num_warps=16)
    assert "0 bytes spill stores" in said
