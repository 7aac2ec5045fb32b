"""The deterministic mode of modules: a token's rows have the same bits whatever else is in the step."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from dcpmla.comm.calls import NormedSum
from dcpmla.comm.norm import add_norm, norm_rows, rms_norm
from dcpmla.comm.terms import Terms, whole
from dcpmla.model.deterministic import make_deterministic
from dcpmla.model.experts import ExpertWeights, compute_experts
from dcpmla.model.glu import SWIGLU
from dcpmla.model.mlp import MLP
from dcpmla.model.moe import Gate, MoE
from dcpmla.model.norm_gate import NormGate
from dcpmla.model.router import Router, split_weight
from dcpmla.parallel.formats import Quantized
from dcpmla.parallel.linear import Linear
from tests.model.test_experts import make_case, on
from tests.parallel.test_deterministic_products import drawn
from tests.support.rows_apart import assert_rows_apart

ROUTERS = (
    Router(scoring="sigmoid", top_k=3, num_groups=2, topk_groups=1, group_score="top2_sum", renormalize=True),
    Router(scoring="softmax", top_k=3),
    Router(scoring="sqrtsoftplus", top_k=3, renormalize=True, routed_scaling_factor=2.5),
)


def new_mlp(hidden: int, width: int, dtype: torch.dtype, device: str) -> MLP:
    mlp = MLP(hidden, width, SWIGLU, dtype, device)
    for seed, linear in enumerate((mlp.gate_up_proj, mlp.down_proj)):
        linear.load(drawn(*linear.weight.shape, seed=seed) * linear.in_features**-0.5)
    return mlp


def new_moe(
    kind: str, hidden: int, width: int, num_experts: int, router: Router, dtype: torch.dtype, device: str
) -> MoE:
    """Return experts, the last two of the router's the identity, with a shared MLP."""
    *_, weights = on(device, make_case(kind, 1, num_experts, 1, hidden, width, dtype))
    gate = Gate(split_weight(drawn(num_experts + 2, hidden, seed=3) * hidden**-0.5, dtype).to(device), router)
    return MoE(gate, weights, 0, new_mlp(hidden, width, dtype, device), SWIGLU, num_experts, True)


def check_modules(device: str, dtype: torch.dtype, kinds: tuple[str, ...], hidden: int, width: int, count: int) -> None:
    x = drawn(300, hidden, dtype=dtype, device=device, seed=9)
    for module in (
        new_mlp(hidden, width, dtype, device),
        *(new_moe(kind, hidden, width, count, router, dtype, device) for kind in kinds for router in ROUTERS),
    ):
        before = module(x)
        make_deterministic(module)
        out = assert_rows_apart(module, x)
        assert (out.double() - before.double()).norm() <= 0.1 * before.double().norm()
    if kinds:
        assert isinstance(module, MoE)
        for index in range(2):
            assert_rows_apart(lambda x: module.gate(x, None)[index], x)  # noqa: B023


def test_modules_on_a_cpu() -> None:
    check_modules("cpu", torch.float32, ("plain", "fp8"), 128, 128, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_modules_on_a_gpu(dtype: torch.dtype) -> None:
    """Of 12 experts, so that steps of few tokens and of many take different kernels."""
    check_modules("cuda", dtype, ("plain", "fp8"), 1024, 512, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_experts_have_the_same_bits_from_every_kernel(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every number of rows per expert, from the kernel that takes so many rows and from the other one; at sizes of
    DeepSeek-V3's slices, of DeepSeek-V2-Lite, and uneven ones.
    """
    from dcpmla.model.kernels import experts as kernels

    for hidden, width in ((7168, 256), (2048, 1408), (640, 384)):
        x, ids, factors, weights = on("cuda", make_case(kind, 4101, 8, 4, hidden, width, dtype))
        all_rows = whole(compute_experts(x, ids, factors, weights, is_deterministic=True))
        for many_rows in (kernels._MANY_ROWS, 0, math.inf):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "_MANY_ROWS", many_rows)
                for size in (1, 3, 7, 40, 64, 130, 300, 900, 4096):
                    rows = slice(5, 5 + size)
                    out = whole(compute_experts(x[rows], ids[rows], factors[rows], weights, is_deterministic=True))
                    differs = (out != all_rows[rows]).sum()
                    assert not differs, f"{size} tokens, above {many_rows} rows by Hopper's: {differs} numbers differ"


def check_norms(device: str, dtype: torch.dtype, width: int) -> None:
    x, residual = drawn(300, width, dtype=dtype, device=device), drawn(300, width, dtype=dtype, device=device, seed=1)
    weight = drawn(width, dtype=dtype, device=device)
    normed = assert_rows_apart(lambda x: norm_rows(x, weight, 1e-6, False)[0], x)
    torch.testing.assert_close(normed, rms_norm(x, weight, 1e-6), atol=1e-5, rtol=2**-7)
    for index in range(2):
        assert_rows_apart(lambda *rows: add_norm(NormedSum(Terms(rows[0]), rows[1], weight, 1e-6))[index], x, residual)  # noqa: B023


def test_norms_on_a_cpu() -> None:
    check_norms("cpu", torch.float32, 136)


@pytest.mark.gpu
def test_norms_on_a_gpu() -> None:
    for width in (128, 1416, 7168):
        check_norms("cuda", torch.bfloat16, width)


def test_refusals() -> None:
    """Modules without such a mode, and weights with scales for groups of inputs, are named."""
    gate = NormGate(torch.zeros(4, 8), torch.zeros(8, 4))
    in_groups = Linear(128, 4, dtype=torch.bfloat16)
    codes = torch.zeros(4, 128, dtype=torch.float8_e4m3fn), torch.full((4, 4), 127, dtype=torch.uint8)
    in_groups.load(Quantized(*codes))
    moe = new_moe("plain", 64, 64, 6, ROUTERS[1], torch.float32, "cpu")
    moe.experts = ExpertWeights(*make_case("fp4", 1, 6, 1, 64, 64)[3])
    cases: list[tuple[Any, str]] = [
        (gate, r"does not support NormGate \(0\)"),
        (in_groups, r"weights with scales for groups of inputs \(0\)"),
        (moe, r"weights with scales for groups of inputs \(0\)"),
        (nn.Linear(2, 2), r"does not support Linear \(0\)"),
    ]
    for module, message in cases:
        with pytest.raises(ValueError, match=message):
            make_deterministic(nn.ModuleList([module]))
