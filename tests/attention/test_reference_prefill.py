"""The plain-torch prefill against softmax attention written out in float64, and its chunks of context."""

import weakref
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import DCPConfig, dcp_mla_prefill
from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, select_backend
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.comm.exchange import LocalExchange
from tests.attention.test_reference import SCALE, TOLERANCES, L, P, R, V, attend_heads, check_close
from tests.support.backends import up
from tests.support.prefill_checks import segments


def naive_prefill(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], key_lens: Sequence[int], causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend request by request, query by query."""
    outs, lses = [], []
    for q_i, k_i, v_i in zip(q.split(list(query_lens)), k.split(list(key_lens)), v.split(list(key_lens)), strict=True):
        for index, query in enumerate(q_i):
            visible = index + 1 if causal else len(k_i)
            out, lse = attend_heads(query, k_i[:visible], v_i[:visible], SCALE)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def ragged(
    query_lens: Sequence[int], key_lens: Sequence[int], num_heads: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(query_lens), num_heads, P + R), (sum(key_lens), num_heads, P + R), (sum(key_lens), num_heads, V)]
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


@given(
    query_lens=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_heads=st.integers(1, 3),
    causal=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
    max_scores=st.sampled_from([1, 7, 40, 100, 1 << 25]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_prefill(
    query_lens: list[int],
    num_heads: int,
    causal: bool,
    dtype: torch.dtype,
    max_scores: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Ragged; where not causal, any number of keys, none included. A tile has at least one query's scores."""
    count = len(query_lens)
    key_lens = query_lens if causal else data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    q, k, v = ragged(query_lens, key_lens, num_heads, seed, dtype)
    k[..., P:] = k[:, :1, P:]  # every head has the same rope part
    call = PrefillCall(
        q, k[..., :P], k[:, 0, P:], v, *segments(query_lens, "cpu"), *segments(key_lens, "cpu"), SCALE, causal
    )
    backend = select_backend(PREFILL_BACKENDS, call)
    assert backend.name == "torch"
    sizes, softmax = [0], reference._softmax
    watched = lambda scores: (sizes.append(scores.numel()), softmax(scores))[1]  # noqa: E731
    with patch.multiple(reference, _softmax=watched, _MAX_SCORES=max_scores):
        got = backend.run(call)
    check_close(got, naive_prefill(q, k, v, query_lens, key_lens, causal), dtype)
    assert max(sizes) <= max(max_scores, num_heads * max(key_lens))


def test_many_context_chunks_round_once() -> None:
    """bfloat16 over 64 chunks of context is as near to float64 as over one."""
    tokens, context = 4, 1024
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, 2, P + R, generator=generator).bfloat16()
    latents = torch.randn(context + tokens, L + R, generator=generator).bfloat16()
    w_kv_b = torch.randn(2, P + V, L, generator=generator).bfloat16()
    cache = latents[:context].unflatten(0, (-1, 16)).contiguous()
    table = [list(range(context // 16 + 1))]

    def run(dtype: torch.dtype, workspace: int) -> Tensor:
        dcp = DCPConfig(block_size=16, context_workspace_tokens=workspace)
        prefill = StepBuilder(dcp, 0).build(StepRequests([tokens], [context + tokens], table)).prefill
        new = latents[context:].to(dtype)
        out, _ = dcp_mla_prefill(
            q.to(dtype), new[:, :L], new[:, L:], cache.to(dtype), up(w_kv_b.to(dtype)), prefill, SCALE, LocalExchange()
        )
        return out.double()

    exact = run(torch.float64, context)
    errors = [float((run(torch.bfloat16, workspace) - exact).norm() / exact.norm()) for workspace in (context, 16)]
    assert errors[1] < 1.5 * errors[0]


class Watched(LocalExchange):
    """Writes down what is done, and how many results of gathers are alive as the next thing is done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.results: list[weakref.ref[Tensor]] = []
        self.num_started = 0

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        number, finish = self.num_started, super().start_context(rows, order, tokens)
        self.write(f"start {number}")
        self.num_started += 1

        def finish_watched() -> Tensor:
            self.write(f"wait {number}")
            result = finish()
            self.results.append(weakref.ref(result))
            return result

        return finish_watched

    def write(self, what: str) -> None:
        self.done.append(f"{what}, {sum(result() is not None for result in self.results)} alive")


def test_chunks_begin_ahead_and_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather runs under the attention before it; of keys and values, and of gathered rows, one chunk's are there at a
    time.
    """
    exchange, alive, most_alive = Watched(), list[weakref.ref[Tensor]](), list[int]()
    w_kv_b = torch.randn(2, P + V, L)

    def watched(kv_c: Tensor) -> Tensor:
        exchange.write("attend")
        kv = up(w_kv_b)(kv_c)
        alive.append(weakref.ref(kv))
        most_alive.append(sum(reference() is not None for reference in alive))
        return kv

    dcp = DCPConfig(block_size=4, context_workspace_tokens=16)
    step = StepBuilder(dcp, 0).build(StepRequests([3], [40], [list(range(10))])).prefill
    latents, cache = torch.randn(3, L + R), torch.randn(10, 4, L + R)
    with torch.no_grad():
        dcp_mla_prefill(torch.randn(3, 2, P + R), latents[:, :L], latents[:, L:], cache, watched, step, SCALE, exchange)
    assert most_alive == [1] * (1 + 3)
    assert exchange.done == [
        "start 0, 0 alive",
        "attend, 0 alive",
        "wait 0, 0 alive",
        "start 1, 1 alive",
        "attend, 1 alive",
        "wait 1, 0 alive",
        "start 2, 1 alive",
        "attend, 1 alive",
        "wait 2, 0 alive",
        "attend, 1 alive",
    ]
