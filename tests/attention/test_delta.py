"""Kimi Delta Attention: the recurrence against transformers' layers, the kernel and chunks against the recurrence."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as theirs

from dcpmla.attention.linear import step as step_module
from dcpmla.attention.linear.cache import HybridPlan
from dcpmla.attention.linear.calls import DeltaRequests, DeltaState, DeltaTokens, DeltaWeights
from dcpmla.attention.linear.chunked import attend_in_chunks, has_library
from dcpmla.attention.linear.config import DeltaConfig
from dcpmla.attention.linear.delta import delta_attention, log_decay
from dcpmla.attention.linear.step import HybridStepBuilder
from dcpmla.attention.step import StepRequests
from dcpmla.cache.latent import LatentPlan
from dcpmla.config import DCPConfig
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.shared_memory import run_interpreted

NUM_STATES, NUM_DRAFTS, EPS = 5, 2, 1e-5
# Steps of two requests: new tokens of each. The first needs tokens of no earlier step, of one, and of several.
ALL_AT_ONCE, IN_STEPS = [(25, 15)], [(10, 5), (1, 1), (2, 3), (1, 3), (11, 3)]
LONG, SHORT = [(70, 80), (40, 1), (1, 20)], [(6, 2), (1, 1), (3, 3)]


def randn(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class Model:
    """Random projections of two requests' tokens, weights, and states full of NaN."""

    def __init__(self, num_heads: int, dim: int, dtype: torch.dtype, device: str, conv_size: int = 4) -> None:
        width = num_heads * dim
        shapes = ((3 * width,), (width,), (num_heads,), (width,))
        self.tokens = [
            DeltaTokens(*(randn(120, *shape, seed=7 * request + i, device=device) for i, shape in enumerate(shapes)))
            for request in range(2)
        ]
        self.tokens = [DeltaTokens(*(x.to(dtype) for x in tokens)) for tokens in self.tokens]
        self.weights = DeltaWeights(
            conv=randn(3 * width, conv_size, seed=20, device=device).to(dtype) / 2,
            log_rate=randn(num_heads, seed=21, device=device) / 2 - 1,
            decay_bias=randn(width, seed=22, device=device) / 3,
            norm=randn(dim, seed=23, device=device).to(dtype),
        )
        self.plan = HybridPlan(
            num_blocks=1,
            dcp_size=1,
            dtype=dtype,
            num_states=NUM_STATES,
            latents=LatentPlan(num_blocks=1, dcp_size=1, dtype=dtype, num_layers=1, block_size=1024, row_width=1),
            delta=DeltaConfig(hidden_size=8, num_heads=num_heads, head_dim=dim, conv_size=conv_size, rms_norm_eps=EPS),
            num_heads=num_heads,
            is_linear=(False, True),
            state_dtype=dtype,
            num_drafts=NUM_DRAFTS,
        )
        self.new = {"device": device}
        self.state = self.new_state(torch.nan)

    def new_state(self, value: float) -> DeltaState:
        recent = torch.full(self.plan.recent_shape, value, dtype=self.plan.state_dtype, **self.new)
        return DeltaState(recent, torch.full(self.plan.memory_shape, value, **self.new))

    def run(self, steps: list[tuple[int, int]], attend: Any, decay_floor: float | None) -> list[Tensor]:
        """Return both requests' outputs, computed step by step beside padding and a row of padding."""
        done, outputs = [0, 0], [[], []]
        for new in steps:
            rows = [
                DeltaTokens(*(x[first : first + n] for x in tokens))
                for tokens, first, n in zip(self.tokens, done, new, strict=True)
            ]
            columns = (torch.cat([*parts, parts[0][:1]]) for parts in zip(*rows, strict=True))
            out = torch.full((sum(new) + 1, len(self.weights.decay_bias)), torch.nan, dtype=self.plan.dtype, **self.new)
            numbers = [[0, new[0], sum(new)], [*done, -1], [done[0] + new[0], done[1] + new[1], 0], [3, 1, -1]]
            requests = DeltaRequests(*(torch.tensor(column, dtype=torch.int32, **self.new) for column in numbers))
            attend(out, DeltaTokens(*columns), self.weights, self.state, requests, EPS, decay_floor)
            assert (out[-1] == 0).all()
            for output, part in zip(outputs, out[:-1].split(new), strict=True):
                output.append(part)
            done = [before + n for before, n in zip(done, new, strict=True)]
        return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("steps", [ALL_AT_ONCE, IN_STEPS])
def test_transformers_layer(steps: list[tuple[int, int]]) -> None:
    config = transformers.KimiLinearConfig(hidden_size=64, linear_head_dim=16, linear_num_heads=4, num_hidden_layers=4)
    torch.manual_seed(0)
    layer = theirs.KimiLinearDeltaAttention(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = Model(4, 16, torch.float32, "cpu")
    gate, eps = layer.forget_gate, config.rms_norm_eps
    rates = gate.A_log.flatten()
    model.weights = DeltaWeights(layer.conv1d.weight[:, 0], rates, gate.dt_bias, layer.o_norm.weight)
    with torch.inference_mode():
        hidden = [randn(1, 25, 64, seed=1), randn(1, 15, 64, seed=2)]
        model.tokens = [
            DeltaTokens(
                torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1),
                gate.f_b_proj(gate.f_a_proj(x)),
                layer.b_proj(x),
                layer.g_b_proj(layer.g_a_proj(x)),
            )
            for (x,) in hidden
        ]
        attend = lambda *arguments: delta_attention(*arguments[:-2], eps, None)  # noqa: E731
        for x, out in zip(hidden, model.run(steps, attend, None), strict=True):
            torch.testing.assert_close(layer.o_proj(out), layer(x)[0], atol=1e-4, rtol=0)


def compare(
    attend: Any,
    dtype: torch.dtype,
    device: str,
    sizes: tuple[int, int],
    tolerance: float,
    cases: Sequence[list[tuple[int, int]]] = (ALL_AT_ONCE, IN_STEPS, LONG),
    decay_floors: Sequence[float | None] = (None, -5.0),
) -> None:
    """Compare outputs and states with the recurrence in float32 over the same rounded numbers."""
    for steps in cases:
        for decay_floor in decay_floors:
            reference, model = Model(*sizes, torch.float32, device), Model(*sizes, dtype, device)
            reference.tokens = [DeltaTokens(*(x.float() for x in tokens)) for tokens in model.tokens]
            reference.weights = DeltaWeights(*(x.float() for x in model.weights))
            expected = reference.run(steps, delta_attention.reference, decay_floor)
            found = model.run(steps, attend, decay_floor)
            for one, other in zip(found, expected, strict=True):
                assert float((one.float() - other).norm() / other.norm()) < tolerance
            torch.testing.assert_close(model.state.recent.float(), reference.state.recent, equal_nan=True)
            for number in (1, 3):
                position = sum(new[number == 1] for new in steps) - 1
                one, other = (x.state.memory[number, position % (1 + NUM_DRAFTS)] for x in (model, reference))
                assert float((one - other).norm() / other.norm()) < tolerance


def check_in_the_interpreter() -> None:
    from dcpmla.attention.linear.kernels import delta_attention as launch
    from tests.support.interpreter import convert_as_torch

    convert_as_torch()
    compare(launch, torch.float32, "cpu", (2, 16), 1e-5, (SHORT,))
    compare(launch, torch.bfloat16, "cpu", (1, 24), 0.02, (SHORT,), (None,))


def test_kernel_in_the_interpreter() -> None:
    run_interpreted(1, check_in_the_interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_kernel_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    compare(delta_attention, dtype, "cuda", (3, 128), tolerance)


def attend_by_chunks(model_plan: HybridPlan) -> Any:
    """Return a function like `delta_attention`, which attends with long pieces in chunks."""

    def attend(out: Tensor, tokens: DeltaTokens, weights: Any, state: Any, requests: DeltaRequests, *rest: Any) -> None:
        starts, first, end, states = (column.tolist() for column in requests)
        lens = [last - begin for last, begin in zip(end[:-1], first[:-1], strict=True)]
        order = sorted(range(len(lens)), key=lambda index: lens[index])  # the longest last, as in a step
        builder = HybridStepBuilder(model_plan, DCPConfig(block_size=1024), 0, out.device)
        step = StepRequests([lens[i] for i in order], [end[i] for i in order], [], [states[i] for i in order])
        pieces = builder._pieces(step)
        recurrent = order[: len(order) if pieces is None else pieces.num_requests]
        for index in recurrent:
            one = DeltaRequests(*(column[index : index + 1] for column in requests))
            rows = slice(starts[index], starts[index] + lens[index])
            one = one._replace(start=torch.zeros_like(one.start))
            delta_attention(out[rows], DeltaTokens(*(x[rows] for x in tokens)), weights, state, one, *rest)
        if pieces is not None:
            rows = torch.cat([torch.arange(starts[i], starts[i] + lens[i]) for i in order[pieces.num_requests :]])
            part = out[: len(rows)].clone()
            attend_in_chunks(part, DeltaTokens(*(x[rows] for x in tokens)), weights, state, pieces, *rest)
            out[rows] = part
        out[sum(lens) :] = 0

    return attend


def imitate_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put transformers' functions in the place of the library's, with its arguments."""

    def causal_conv1d(
        x: Tensor, weight: Tensor, initial_state: Tensor, activation: str, cu_seqlens: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        assert activation == "silu"
        parts = []
        for piece, before in zip(x[0].split(cu_seqlens.diff().tolist()), initial_state, strict=True):
            inputs = torch.cat([before[:, 1:], piece.T], 1)
            parts.append(F.silu(F.conv1d(inputs, weight[:, None], groups=len(weight))).T)
        return torch.cat(parts)[None], None

    def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        assert options["use_gate_in_kernel"]
        assert options["use_beta_sigmoid_in_kernel"]
        weights = DeltaWeights(q, options["A_log"], options["dt_bias"], q)
        g, beta, outs, states = (
            log_decay(g[0].flatten(1), weights, options["lower_bound"])[None],
            beta.sigmoid(),
            [],
            [],
        )
        ends = options["cu_seqlens"].tolist()
        for index, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
            out, state = theirs.chunk_kimi_delta_attention(
                *(x[:, first:last] for x in (q, k, v)),
                g=g[:, first:last],
                beta=beta[:, first:last],
                initial_state=options["initial_state"][index : index + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            outs.append(out)
            states.append(state)
        return torch.cat(outs, 1), torch.cat(states)

    convolution, chunks = ModuleType("fla.modules.causal_conv1d"), ModuleType("fla.ops.kda")
    convolution.causal_conv1d, chunks.chunk_kda = causal_conv1d, chunk_kda  # type: ignore[attr-defined]
    for name, module in (("fla.modules.causal_conv1d", convolution), ("fla.ops.kda", chunks)):
        monkeypatch.setitem(sys.modules, name, module)


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "LONG_PIECE", 64)
    imitate_library(monkeypatch)
    plan = Model(2, 16, torch.float32, "cpu").plan
    compare(attend_by_chunks(plan), torch.float32, "cpu", (2, 16), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not has_library(), reason="flash-linear-attention is not installed")
def test_chunks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "LONG_PIECE", 64)
    plan = Model(3, 128, torch.bfloat16, "cuda").plan
    compare(attend_by_chunks(plan), torch.bfloat16, "cuda", (3, 128), 0.03)


def test_pieces_are_the_last_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "LONG_PIECE", 64)
    plan = Model(2, 16, torch.float32, "cpu").plan
    builder = HybridStepBuilder(plan, DCPConfig(block_size=1024), 0, takes_chunks=True)
    assert builder._pieces(StepRequests([1, 63], [9, 63], [], [0, 1])) is None
    pieces = builder._pieces(StepRequests([1, 64, 100], [9, 64, 700], [], [0, 1, 2]))
    assert pieces is not None
    assert (pieces.num_requests, pieces.first_row) == (1, 1)
    assert pieces.host_start_loc.tolist() == [0, 64, 164]
    assert pieces.has_memory.tolist() == [False, True]
    assert pieces.has_before.sum(1).tolist() == [0, 4]
    assert np.diff(pieces.kept_rows.numpy())[:4].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("has_floor", [False, True])
def test_the_kernel_compiles(has_floor: bool) -> None:
    """A head's memory stays in registers."""
    pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from dcpmla.attention.linear.kernels import _attend

    halves = ("out", "qkv", "decay", "beta", "gate", "conv", "norm", "recent")
    types = dict.fromkeys(halves, "*bf16") | dict.fromkeys(("log_rate", "decay_bias", "memory"), "*fp32")
    types |= dict.fromkeys(("start", "first_position", "end", "state"), "*i32") | {"eps": "fp32", "floor": "fp32"}
    constants = {"HAS_FLOOR": has_floor, "HEADS": 32, "DIM": 128, "WIDTH": 128, "CONV": 4, "NUM_RECENT": 3}
    constants |= {"NUM_COPIES": 1, "NORM_EPS": 1e-6, "LINEAR_FROM": 20.0}
    _, log = compile_for_hopper(_attend, ASTSource, types, constants, num_warps=4)
    assert "0 bytes spill stores" in log
