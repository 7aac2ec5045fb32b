"""Kimi Delta Attention: the kernel and chunks against the recurrence, which whole models compare with transformers'."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as theirs
from triton.compiler import ASTSource

from dcpmla.attention.layers.linear.calls import DeltaCall, DeltaRequests, DeltaState, DeltaTokens, DeltaWeights
from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.attention.layers.linear.delta import attend_in_chunks, delta_attention, has_library, log_decay
from dcpmla.attention.layers.linear.kernels import read, recurrence, write
from dcpmla.attention.layers.linear.spec import DeltaSpec
from dcpmla.attention.layers.linear.step import DeltaMetadata, delta_metadata
from dcpmla.attention.step import long_pieces
from dcpmla.attention.step.long_pieces import LONG_PIECE, TOKENS_PER_PIECE
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests, StepTable, StepTraits, TableSizes
from dcpmla.config import DCPConfig
from tests.support.hopper import compile_for_hopper
from tests.support.kernels import run_kernels
from tests.support.step_tables import fill_table, lay_out_step

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
        config = DeltaConfig(hidden_size=8, num_heads=num_heads, head_dim=dim, conv_size=conv_size, rms_norm_eps=EPS)
        self.memory = DeltaSpec(config).memory(DCPConfig(), dtype, NUM_DRAFTS)
        self.dtype, self.new = dtype, {"device": device}
        self.state = self.new_state(torch.nan)

    def new_state(self, value: float) -> DeltaState:
        states = ((NUM_STATES, *state.shape, state.dtype) for state in self.memory.states)
        return DeltaState(*(torch.full(shape, value, dtype=dtype, **self.new) for *shape, dtype in states))

    def run(self, steps: list[tuple[int, int]], attend: Any, decay_floor: float | None) -> list[Tensor]:
        """Return both requests' outputs, computed step by step beside padding and a row of padding."""
        done, outputs = [0, 0], [[], []]
        for new in steps:
            rows = [
                DeltaTokens(*(x[first : first + n] for x in tokens))
                for tokens, first, n in zip(self.tokens, done, new, strict=True)
            ]
            columns = (torch.cat([*parts, parts[0][:1]]) for parts in zip(*rows, strict=True))
            out = torch.full((sum(new) + 1, len(self.weights.decay_bias)), torch.nan, dtype=self.dtype, **self.new)
            numbers = [[0, new[0], sum(new)], [*done, -1], [done[0] + new[0], done[1] + new[1], 0], [3, 1, -1]]
            requests = DeltaRequests(*(torch.tensor(column, dtype=torch.int32, **self.new) for column in numbers))
            attend(DeltaCall(out, DeltaTokens(*columns), self.weights, self.state, EPS, decay_floor), requests)
            assert out[-1].isnan().all()  # padding
            for output, part in zip(outputs, out[:-1].split(new), strict=True):
                output.append(part)
            done = [before + n for before, n in zip(done, new, strict=True)]
        return [torch.cat(parts) for parts in outputs]


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


def check_kernel(_: str) -> None:
    compare(recurrence.delta_attention, torch.float32, "cpu", (2, 16), 1e-5, (SHORT,), (-5.0,))
    compare(recurrence.delta_attention, torch.bfloat16, "cpu", (1, 24), 0.02, (SHORT,), (None,))


def test_kernel_in_the_interpreter() -> None:
    run_kernels("cpu", check_kernel)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_kernel_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    compare(delta_attention, dtype, "cuda", (3, 128), tolerance)


def metadata_of(
    requests: StepRequests, num_reqs: int, num_tokens: int, takes_chunks: bool, device: torch.device | str = "cpu"
) -> DeltaMetadata:
    """Return what layers read of a step that is padded to sizes."""
    sizes = TableSizes(num_reqs, num_tokens, 0, has_pieces=takes_chunks)
    layout = StepBuilder(DCPConfig(), 0, "cpu", StepTraits(num_states=NUM_STATES, has_slots=False)).layout
    step = lay_out_step(fill_table(requests, sizes), sizes, layout)
    return delta_metadata(replace(step, table=StepTable(*(column.to(device) for column in step.table))))


def attend_by_chunks(attend_long: Any) -> Any:
    """Return a function like `delta_attention`, which calls attend_long for long pieces."""

    def attend(call: DeltaCall, requests: DeltaRequests) -> None:
        out = call.out
        _, first, end, states = (column.tolist() for column in requests)
        lens = [last - begin for begin, last in zip(first, end, strict=True)]
        metadata = metadata_of(StepRequests(lens, end, [], states), len(lens) + 1, len(out) + 3, True, out.device)
        delta_attention(call, metadata.recurrent)
        if metadata.pieces is not None:
            attend_long(call, metadata.pieces)

    return attend


def imitate_library() -> None:
    """Put transformers' function in the place of the library's, with its arguments."""

    def chunk_kda_fwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        assert options["use_gate_in_kernel"]
        assert options["use_graph"]
        weights = DeltaWeights(q, options["A_log"], options["dt_bias"], q)
        g = log_decay(g[0].flatten(1), weights, options["lower_bound"])[None]
        ends, out = options["cu_seqlens"].tolist(), torch.full_like(v, torch.nan)
        after = options["initial_state"].clone()
        expected = [[i, n] for i, (one, end) in enumerate(pairwise(ends)) for n in range(-(-(end - one) // 64))]
        assert [chunk for chunk in options["chunk_indices"].tolist() if chunk[0] >= 0] == expected
        assert options["chunk_offsets"].tolist()[-1] == len(expected)
        for index, (first, last) in enumerate(pairwise(ends)):
            if first == last:
                continue
            rows = slice(first, last)
            out[:, rows], after[index] = theirs.chunk_kimi_delta_attention(
                *(x[:, rows].float() for x in (q, k, v)),
                g=g[:, rows],
                beta=beta[:, rows],
                initial_state=options["initial_state"][index : index + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        return out, after

    module = ModuleType("fla.ops.kda.chunk_fwd")
    module.chunk_kda_fwd = chunk_kda_fwd  # type: ignore[attr-defined]
    sys.modules["fla.ops.kda.chunk_fwd"] = module


def check_chunks(_: str) -> None:
    imitate_library()
    from dcpmla.attention.layers.linear.kernels.chunks import attend_in_chunks as launch

    compare(attend_by_chunks(launch), torch.float32, "cpu", (2, 16), 1e-5, (LONG,), (-5.0,))
    compare(attend_by_chunks(launch), torch.bfloat16, "cpu", (1, 24), 0.02, (LONG,), (None,))
    long_pieces.MAX_PIECES = 1  # the shorter piece goes through the recurrence
    compare(attend_by_chunks(launch), torch.float32, "cpu", (2, 16), 1e-5, (LONG,), (None,))


def test_chunks_in_the_interpreter() -> None:
    run_kernels("cpu", check_chunks)


@pytest.mark.parametrize("max_pieces", [1, 32])
def test_chunks(max_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_pieces, "MAX_PIECES", max_pieces)
    compare(attend_by_chunks(attend_in_chunks), torch.float32, "cpu", (2, 16), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not has_library(), reason="flash-linear-attention is not installed")
def test_chunks_on_a_gpu() -> None:
    compare(attend_by_chunks(attend_in_chunks), torch.bfloat16, "cuda", (3, 128), 0.03)


@given(
    lens=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 300)), min_size=1, max_size=6),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 300)),
    takes_chunks=st.booleans(),
)
def test_layout(lens: list[tuple[int, int]], padding: tuple[int, int], takes_chunks: bool) -> None:
    new, ends = [number for number, _ in lens], [number + context for number, context in lens]
    num_reqs, num_tokens = len(lens) + padding[0], sum(new) + padding[1]
    requests = StepRequests(new, ends, [()] * len(lens), range(len(lens)))
    recurrent, pieces = metadata_of(requests, num_reqs, num_tokens, takes_chunks)
    assert recurrent.first_position.tolist() == [*(context for _, context in lens), *[0] * padding[0]]
    assert recurrent.end.tolist() == [*ends, *[0] * padding[0]]
    assert recurrent.start.tolist()[: len(lens)] == [sum(new[:index]) for index in range(len(lens))]
    assert recurrent.state.tolist()[len(lens) :] == [-1] * padding[0]
    chosen = [] if pieces is None else [state for state in pieces.state.tolist() if state >= 0]
    assert recurrent.state.tolist()[: len(lens)] == [-1 if index in chosen else index for index in range(len(lens))]
    if pieces is None:
        assert not takes_chunks or num_tokens < LONG_PIECE
        return
    longest = sorted(new)[-len(chosen) :] if chosen else []
    assert sorted(new[index] for index in chosen) == longest
    assert len(pieces.state) == min(num_reqs, long_pieces.MAX_PIECES, max(1, num_tokens // TOKENS_PER_PIECE))
    assert len(chosen) == min(len(pieces.state), sum(number >= LONG_PIECE for number in new))
    assert pieces.start_loc.diff().tolist()[: len(chosen)] == [new[index] for index in chosen]
    assert pieces.token.tolist()[: len(chosen)] == [sum(new[:index]) for index in chosen]
    assert pieces.start_loc.tolist()[len(chosen) :] == [sum(longest)] * (1 + len(pieces.state) - len(chosen))
    assert set(map(tuple, pieces.chunks.tolist())) - {(-1, -1)} == {
        (order, chunk) for order, index in enumerate(chosen) for chunk in range(-(-new[index] // 64))
    }


SIZES = {"HEADS": 32, "DIM": 128, "WIDTH": 128}
STATE = {"NUM_RECENT": 3, "NUM_COPIES": 1}
PIECES = {"PIECES": 32, "ROWS": 16}
RECURRENT = {"CONV": 4, "NORM_EPS": 1e-6, "LINEAR_FROM": 20.0, **STATE}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (recurrence._attend, {**RECURRENT, "HAS_FLOOR": False}),
        (recurrence._attend, {**RECURRENT, "HAS_FLOOR": True}),
        (read._read_tokens, {**PIECES, "CONV": 4, "NUM_RECENT": 3, "NORM_EPS": 1e-6}),
        (read._read_memory, {"NUM_COPIES": 1}),
        (write._write_state, STATE),
        (write._write_outputs, PIECES),
    ],
)
def test_kernels_compile(kernel: Any, constants: dict[str, Any]) -> None:
    """A head's memory stays in registers."""
    types = dict.fromkeys(("start", "start_loc", "token", "first_position", "end", "state"), "*i32")
    types |= dict.fromkeys(("memory", "memory_after", "before", "beta_out", "log_rate", "decay_bias"), "*fp32")
    types |= dict.fromkeys(("q", "k", "v", "qkv", "decay", "decay_out", "beta", "conv", "recent"), "*bf16")
    types |= dict.fromkeys(("out", "attended", "gate", "norm"), "*bf16") | {"eps": "fp32", "floor": "fp32"}
    _, log = compile_for_hopper(kernel, ASTSource, types, {**SIZES, **constants}, num_warps=4)
    assert "0 bytes spill stores" in log
