"""Penalties, biases and the least number of new tokens through the engine, against transformers' processors, drafts or
not.
"""

from collections import Counter
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

from dcpmla.runtime.sampling import SamplingParams
from tests.runtime.test_penalties import TABLE, TableModel, prompts
from tests.support.hash_model import EOS, VOCAB_SIZE, HashDrafter, Letters, make_engine

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
