"""Min-p and log probabilities, against transformers' processors and softmax by hand; what counts of tokens cost."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper

import dcpmla.runtime.batch as batch_module
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LatentCache
from dcpmla.runtime.penalties import Penalties
from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import VOCAB_SIZE, HashModel, make_engine

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
        patch.setattr(batch_module, "_MAX_SCORED", max_scored)
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
    monkeypatch.setattr(batch_module, "_MAX_SCORED", 2)
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
