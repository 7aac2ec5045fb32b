"""Penalties, biases, min-p, the least number of new tokens and log probabilities, drafts or not: through the engine,
against transformers' processors and softmax by hand. What counts of tokens cost.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

import dcpmla.runtime.batch as batch_module
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LatentCache
from dcpmla.runtime.penalties import Penalties
from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import EOS, VOCAB_SIZE, HashDrafter, HashModel, Letters, make_engine

TABLE = 3 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


class TableModel(HashModel):
    """A model whose next token depends on the last one alone: it soon runs in circles."""

    def __init__(self, table: Tensor = TABLE) -> None:
        super().__init__()
        self.table = table
        self.num_scored = self.num_requests = 0  # most logits of a step beyond one for each request; requests

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
        self.num_requests = metadata.num_decode_tokens
        self.num_requests += 0 if metadata.prefill is None else len(metadata.prefill.queries.start) - 1
        return self.table[token_ids]

    def logits(self, hidden_states: Tensor) -> Tensor:
        self.num_scored = max(self.num_scored, len(hidden_states) - self.num_requests)
        return hidden_states


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14)


@given(min_p=st.floats(0.01, 1), temperature=st.sampled_from([0.5, 1.0, 3.0]), seed=st.integers(0, 99))
def test_min_p_is_transformers_(min_p: float, temperature: float, seed: int) -> None:
    logits = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(temperature=temperature, min_p=min_p)
    plain = SamplingParams(temperature=temperature)
    requests = [Request([1], params), Request([1], plain)]
    requests.append(Request([1], replace(params, frequency_penalty=0.7), token_ids=[3, 3, 5]))
    expected = logits.clone()
    expected[2, [3, 5]] -= torch.tensor([1.4, 0.7])
    penalties = Penalties()
    shaped = penalties.shape_logits(logits, requests, None)
    assert torch.equal(shaped[1], logits[1])
    for row in (0, 2):
        kept = MinPLogitsWarper(min_p)(None, (expected[row] / temperature)[None])[0] > -math.inf
        assert torch.equal(shaped[row] > -math.inf, kept)
        assert torch.equal(shaped[row][kept], expected[row][kept])
    assert penalties.shape_logits(logits, [requests[1]] * 3, None) is logits  # nothing is launched for nothing


def check_entry(entry: TokenLogprobs, before: int, num_top: int) -> None:
    expected = TABLE[before].double().log_softmax(-1)
    best = expected.topk(num_top)
    assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-5)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@given(
    requests=st.lists(
        st.tuples(prompts, st.sampled_from([None, 0, 2]), st.sampled_from([None, 0, 3]), st.floats(0, 2)),
        min_size=1,
        max_size=5,
    ),
    budget=st.sampled_from([4, 64]),
    max_scored=st.sampled_from([3, 256]),
)
def test_log_probabilities(requests: list[tuple[list[int], Any, Any, float]], budget: int, max_scored: int) -> None:
    """Of prompts as well: cached ones, in pieces, of requests that are computed again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "MAX_SCORED", max_scored)
        model = TableModel()
        engine = make_engine(8, budget, model=model)
        added = []
        for prompt, new, old, temperature in requests:
            params = SamplingParams(
                max_new_tokens=6,
                ignore_eos=True,
                logprobs=new,
                prompt_logprobs=old,
                temperature=temperature,
                presence_penalty=1.0,
                stop_token_ids=(1, 2, 3, 4),
            )
            added += [engine.add(prompt, params), engine.add(prompt, params)]
        list(engine.run())
    assert model.num_scored <= max_scored
    for request in added:
        check_request(request)


def test_log_probabilities_of_a_prompt_that_is_begun_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older request takes the last block while the younger one's prompt is half scored."""
    monkeypatch.setattr(batch_module, "MAX_SCORED", 2)
    engine = make_engine(6, model=TableModel())
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=20, ignore_eos=True))
    young = engine.add(list(range(14)), SamplingParams(max_new_tokens=2, prompt_logprobs=1, ignore_eos=True))
    list(engine.run())
    assert young.num_preemptions > 0
    check_request(young)


def check_request(request: Request) -> None:
    """Compare all entries with the table."""
    new, old = request.params.logprobs, request.params.prompt_logprobs
    sequence = [*request.prompt_token_ids, *request.token_ids]
    num_prompt = len(request.prompt_token_ids)
    assert [entry.token_id for entry in request.logprobs] == ([] if new is None else request.token_ids)
    for position, entry in enumerate(request.logprobs, start=num_prompt):
        check_entry(entry, sequence[position - 1], new or 0)
    assert [entry.token_id for entry in request.prompt_logprobs] == ([] if old is None else request.prompt_token_ids)
    for position, entry in enumerate(request.prompt_logprobs):
        if position == 0:
            assert entry[1:] == (None, ())
        else:
            check_entry(entry, sequence[position - 1], old or 0)


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
    """And they give them up when they finish."""
    penalties, logits = Penalties(), torch.zeros(100, VOCAB_SIZE)
    without = [Request([1], SamplingParams(min_p=0.1, temperature=1.0)) for _ in range(99)]
    penalties.shape_logits(logits, [*without, Request([1], SamplingParams(presence_penalty=1.0))], None)
    assert len(penalties._counts) == 2
    for _ in range(20):
        request = Request([1], SamplingParams(presence_penalty=1.0))
        penalties.shape_logits(logits[:1], [request], None)
        request.finish_reason = "length"
    assert len(penalties._counts) <= 4


tokens = st.integers(0, VOCAB_SIZE - 1)
some_params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(8, 12),
    min_tokens=st.sampled_from([0, 1, 5, 8]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100, -4, 0.5, 3, 100]), max_size=4),
    stop_token_ids=st.lists(st.one_of(tokens, st.just(VOCAB_SIZE + 3)), max_size=8),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.7, 0.8]),
    presence_penalty=st.sampled_from([0, 0, 1.5, -1]),
    frequency_penalty=st.sampled_from([0, 0, 0.7, -0.2]),
    ignore_eos=st.booleans(),
)


def processors(num_prompt: int, params: SamplingParams) -> LogitsProcessorList:
    """Return transformers' processors, in its own order."""
    found = LogitsProcessorList()
    biases: Any = params.logit_bias
    if biases:
        found.append(SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in biases}))
    found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        ends = [token for token in {EOS, *params.stop_token_ids} if token < VOCAB_SIZE]
        found.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, ends))
    return found


def alone(prompt: list[int], params: SamplingParams, table: Tensor) -> list[int]:
    """Return the greedy answer by the definitions."""
    new, process = list[int](), processors(len(prompt), params)
    while len(new) < params.max_new_tokens:
        sequence = [*prompt, *new]
        scores = process(torch.tensor([sequence]), table[sequence[-1]][None].clone())[0]
        for token, count in Counter(new).items():
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
        new.append(int(scores.argmax()))
        if new[-1] in params.stop_token_ids or (new[-1] == EOS and not params.ignore_eos):
            break
    return new


@given(
    requests=st.lists(st.tuples(prompts, some_params), min_size=1, max_size=5),
    budget=st.sampled_from([4, 64]),
    table=st.sampled_from([TABLE, TABLE - 20]),  # all logits of the second are negative
    num_steps=st.integers(0, 12),
)
def test_tokens_are_those_of_transformers(
    requests: list[tuple[list[int], SamplingParams]], budget: int, table: Tensor, num_steps: int
) -> None:
    """Also of the token under way, with prompts in pieces, of requests that are computed again or join others later,
    and after an abort.
    """
    engine, half = make_engine(8, budget, model=TableModel(table)), -(-len(requests) // 2)
    added = [engine.add(prompt, params) for prompt, params in requests[:half]]
    for _ in range(num_steps):
        engine.step()
    engine.abort(added[0])
    added += [engine.add(prompt, params) for prompt, params in requests[half:]]
    list(engine.run())
    for request, (prompt, params) in zip(added, requests, strict=True):
        expected, is_aborted = alone(prompt, params, table), request.finish_reason == "abort"
        assert request.token_ids == (expected[: len(request.token_ids)] if is_aborted else expected)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_drafts_change_nothing(share: float, ahead: bool) -> None:
    """Requests draft with biases, and once they may end: greedy and drawn, as the distribution of sampling says, with
    stop strings and min-p; more of them than rows are drawn or shaped at once.
    """
    bias = {token: 0.4 * (token % 3) for token in range(VOCAB_SIZE)}
    kinds: list[dict[str, Any]] = [
        {"logit_bias": bias},
        {"min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
        {"min_tokens": 7, "stop": ("A", "B", "C", "D", "E", "F", "G")},
        {"min_p": 0.2, "temperature": 0.8},
        {"min_tokens": 12, "logit_bias": bias, "temperature": 0.7},
        {"temperature": 9.0, "top_k": 9},
    ]
    params = [SamplingParams(max_new_tokens=24, seed=seed, **kind) for seed in range(6) for kind in kinds]

    def outcome(drafter: HashDrafter | None) -> list[Any]:
        engine = make_engine(300, 300, 36, with_graph=ahead, drafter=drafter, tokenizer=Letters())
        requests = [engine.add([index % 29, 3], own, keep_logits=True) for index, own in enumerate(params)]
        list(engine.run())
        for request in requests:
            assert len(request.logits) == len(request.token_ids) >= request.params.min_tokens
            ends = {EOS, *request.params.stop_token_ids}
            assert not ends & set(request.token_ids[: request.params.min_tokens])
        if drafter is not None:
            assert [any(each.acceptance.num_drafted for each in requests[kind::6]) for kind in range(6)] == [True] * 6
        return [(request.token_ids, request.text, request.finish_reason) for request in requests]

    assert outcome(HashDrafter(3, share, ahead=ahead, always=True)) == outcome(None)
