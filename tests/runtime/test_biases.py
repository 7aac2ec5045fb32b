"""Penalties, biases and the least number of new tokens through the engine, against transformers' processors, drafts or
not.
"""

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
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from dcpmla.runtime.penalties import Penalties
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.runtime.test_penalties import TABLE, TableModel, prompts
from tests.support.hash_model import EOS, VOCAB_SIZE, HashDrafter, Letters, make_engine, next_token

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


def alone(prompt: list[int], params: SamplingParams, table: Tensor = TABLE) -> list[int]:
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


@given(requests=st.lists(st.tuples(prompts, some_params), min_size=1, max_size=5), budget=st.sampled_from([4, 64]))
def test_tokens_are_those_of_transformers(requests: list[tuple[list[int], SamplingParams]], budget: int) -> None:
    """Also of the token under way, with prompts in pieces, and of requests that are computed again."""
    engine = make_engine(8, budget, model=TableModel())
    added = [engine.add(prompt, params) for prompt, params in requests]
    list(engine.run())
    for request, (prompt, params) in zip(added, requests, strict=True):
        assert request.token_ids == alone(prompt, params)


@pytest.mark.parametrize("repetition", [1.7, 0.8])
def test_repeated_tokens_of_negative_logits(repetition: float) -> None:
    params = SamplingParams(max_new_tokens=12, repetition_penalty=repetition, ignore_eos=True)
    engine = make_engine(8, 64, model=TableModel(TABLE - 20))
    request = engine.add([1, 2, 3], params)
    list(engine.run())
    assert request.token_ids == alone([1, 2, 3], params, TABLE - 20)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_drafts_change_nothing(share: float, ahead: bool) -> None:
    """Requests draft with biases, and once they may end: greedy and drawn, with stop strings and min-p."""
    bias = {token: 0.4 * (token % 3) for token in range(VOCAB_SIZE)}
    kinds: list[dict[str, Any]] = [
        {"logit_bias": bias},
        {"min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
        {"min_tokens": 7, "stop": ("A", "B", "C", "D", "E", "F", "G")},
        {"min_p": 0.2, "temperature": 0.8},
        {"min_tokens": 12, "logit_bias": bias, "temperature": 0.7},
    ]
    params = [SamplingParams(max_new_tokens=24, seed=seed, **kind) for seed in range(3) for kind in kinds]

    def outcome(drafter: HashDrafter | None) -> list[Any]:
        engine = make_engine(200, 300, with_graph=ahead, drafter=drafter, tokenizer=Letters())
        requests = [engine.add([index, 3], own) for index, own in enumerate(params)]
        list(engine.run())
        for request in requests:
            assert len(request.token_ids) >= request.params.min_tokens
            ends = {EOS, *request.params.stop_token_ids}
            assert not ends & set(request.token_ids[: request.params.min_tokens])
        if drafter is not None:
            assert [any(each.acceptance.num_drafted for each in requests[kind::5]) for kind in range(5)] == [True] * 5
        return [(request.token_ids, request.text, request.finish_reason) for request in requests]

    assert outcome(HashDrafter(3, share, ahead=ahead, always=True)) == outcome(None)


def test_rows_of_other_requests_stay() -> None:
    """A token beyond the vocabulary ends no request, and is nothing in the row after it."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    plain = Request([1], SamplingParams())
    short = Request([1], SamplingParams(min_tokens=2, stop_token_ids=(VOCAB_SIZE, 4)))
    biased = Request([1], SamplingParams(logit_bias={0: -2.0}))
    penalties = Penalties(frozenset([EOS, VOCAB_SIZE + 1]))
    shaped = penalties.shape_logits(logits, [short, biased, plain], None)
    expected = logits.clone()
    expected[0, [4, EOS]] = -torch.inf
    expected[1, 0] -= 2
    assert torch.equal(shaped, expected)
    short.token_ids = [3, 3]
    assert penalties.shape_logits(logits, [short, plain, plain], None) is logits


def test_stop_strings_among_the_first_tokens() -> None:
    """The answer goes on past them, and ends at the next one."""
    engine = make_engine(num_blocks=50, tokenizer=Letters())
    sequence = [0, 0]
    for _ in range(30):
        sequence.append(next_token(sequence))
    text = Letters().decode(sequence[2:])
    stop = text[2]
    assert stop in text[4:]
    whole = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=stop)
    first = engine.add("AA", whole)
    later = engine.add("AA", replace(whole, min_tokens=3))
    with_stop = engine.add("AA", replace(whole, min_tokens=3, include_stop_str_in_output=True))
    list(engine.run())
    end = text.index(stop, 3)
    assert (first.text, later.text, with_stop.text) == (text[:2], text[:end], text[: end + 1])
    assert later.finish_reason == with_stop.finish_reason == "stop"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    engine = make_engine(num_blocks=50)
    with pytest.raises(ValueError, match=f"logit_bias has token id {VOCAB_SIZE}"):
        engine.add([1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}))
