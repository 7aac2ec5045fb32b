"""Counts of tokens on the device equal counts of all tokens anew, whatever requests join, wait, end or are aborted."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from dcpmla.runtime.penalties import Penalties
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams

VOCAB_SIZE = 12
tokens = st.integers(0, VOCAB_SIZE - 1)
params = st.builds(
    SamplingParams,
    max_new_tokens=st.just(6),
    temperature=st.sampled_from([0.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.3]),
    presence_penalty=st.sampled_from([0, 0, 1.5, -1]),
    frequency_penalty=st.sampled_from([0, 0, 0.7, -0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.7, 0.8]),
)


def shape(logits: Tensor, request: Request, in_flight: list[int]) -> Tensor:
    """Return logits [vocab] of a request by the definitions, from all of its tokens."""
    own, scores = request.params, logits
    if not own.shapes_logits:
        return logits
    counts = torch.zeros(VOCAB_SIZE)
    for token, count in Counter(request.token_ids + in_flight).items():
        counts[token] = count
    seen = counts > 0
    seen[request.prompt_token_ids] = True
    penalized = torch.where(scores > 0, scores / own.repetition_penalty, scores * own.repetition_penalty)
    scores = torch.where(seen, penalized, scores)
    scores = scores - own.frequency_penalty * counts - own.presence_penalty * (counts > 0)
    lowest = own.temperature * math.log(own.min_p) if own.min_p else -math.inf
    return scores.where(scores - scores.max() >= lowest, -torch.inf)


class Steps(RuleBasedStateMachine):
    """Random steps, launched before the tokens of the step before them are known."""

    @initialize()
    def start(self) -> None:
        self.penalties, self.alive = Penalties(), list[Request]()
        self.pending: list[tuple[Request, int]] = []
        self.num_steps, self.most_alive = 0, 0

    @rule(prompt=st.lists(tokens, min_size=1, max_size=5), own=params)
    def join(self, prompt: list[int], own: SamplingParams) -> None:
        self.alive.append(Request(prompt, own))
        self.most_alive = max(self.most_alive, len(self.alive))

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Run any of the requests; the others are preempted, or wait."""
        requests = [
            request
            for request in self.alive
            if request.num_new_tokens < request.params.max_new_tokens and data.draw(st.booleans())
        ]
        newest = torch.tensor([token for _, token in self.pending], dtype=torch.int64)
        rows = {request: row for row, (request, _) in enumerate(self.pending)}
        previous: Any = SimpleNamespace(rows=rows, newest=newest) if self.pending else None
        self.num_steps += 1
        logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(self.num_steps))
        shaped = self.penalties.shape_logits(logits, requests, previous)
        for row, request in enumerate(requests):
            in_flight = [token for other, token in self.pending if other is request]
            assert torch.equal(shaped[row], shape(logits[row], request, in_flight))
        sampled = [(request, data.draw(tokens)) for request in requests]
        for request, _ in sampled:
            request.num_in_flight += 1
        self.collect()
        self.pending = sampled

    @rule()
    def collect(self) -> None:
        """Wait for the step under way."""
        for request, token in self.pending:
            request.num_in_flight -= 1
            if not request.finish_reason:
                request.append(token, frozenset([0]))
            if request.finish_reason and request in self.alive:
                self.alive.remove(request)
        self.pending = []

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1))).finish_reason = "abort"

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "penalties"):
            assert len(self.penalties._counts) <= 2 * (1 + self.most_alive)


TestSteps = Steps.TestCase


class CountedTokens(list[int]):
    """Tokens that count how often they are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        read = super().__getitem__(index)
        self.num_read += len(read) if isinstance(index, slice) else 1
        return read

    def __iter__(self) -> Any:
        self.num_read += len(self)
        return super().__iter__()


def test_a_step_reads_only_new_tokens() -> None:
    prompt, new = CountedTokens(range(VOCAB_SIZE)), CountedTokens(VOCAB_SIZE * list(range(VOCAB_SIZE)))
    request = Request(prompt, SamplingParams(max_new_tokens=999, presence_penalty=1.0), token_ids=new)
    penalties, num_known = Penalties(), len(new)
    for number in range(20):
        penalties.shape_logits(torch.zeros(1, VOCAB_SIZE), [request], None)
        assert new.num_read == num_known + number
        new.append(number % VOCAB_SIZE)
    assert prompt.num_read <= 2 * len(prompt)


def test_only_requests_with_penalties_have_rows() -> None:
    penalties, logits = Penalties(), torch.zeros(100, VOCAB_SIZE)
    without = [Request([1], SamplingParams(min_p=0.1, temperature=1.0)) for _ in range(99)]
    penalties.shape_logits(logits, [*without, Request([1], SamplingParams(presence_penalty=1.0))], None)
    assert len(penalties._counts) == 2
