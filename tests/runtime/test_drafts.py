"""Drafts change the number of steps, and nothing else. The drafter of MTP over a model that checks its cache."""

import gc
import random
import weakref
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.latent import LatentCache
from dcpmla.config import DCPConfig
from dcpmla.runtime.acceptance import Acceptance, Payoff, StepTime
from dcpmla.runtime.batch import Piece
from dcpmla.runtime.drafts import NO_DRAFT, Drafter
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.modules import ModuleDrafter
from dcpmla.runtime.ngram import NgramDrafter, find_following
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.speculation import Speculation
from tests.runtime.test_engine import check_limits, check_totals
from tests.support.engine_loads import Load, loads, serve
from tests.support.engines import new_engine
from tests.support.hash_model import (
    BLOCK,
    MESH,
    VOCAB_SIZE,
    HashDrafter,
    HashModel,
    alone_ignoring_eos,
    answer,
    make_engine,
    new_cache,
)

DRAFTS = {"num_drafts": st.integers(1, 6), "share": st.sampled_from([0.0, 0.5, 0.9, 1.0]), "seed": st.integers(0, 99)}


@given(load=loads(aborts=True), **DRAFTS, with_graph=st.booleans(), ahead=st.booleans())
def test_every_request_gets_what_it_gets_alone(
    load: Load, num_drafts: int, share: float, seed: int, with_graph: bool, ahead: bool
) -> None:
    """With drafts right and wrong, at the ends of blocks and of requests, under preemption and aborts."""
    engine = make_engine(*load.limits, with_graph=with_graph, drafter=HashDrafter(num_drafts, share, seed, ahead=ahead))

    def step() -> None:
        engine.step()
        if not with_graph:  # whose model sees rows of padding
            check_limits(engine, load)

    serve(engine, load, step)
    assert engine.allocator.num_free == load.num_blocks


@given(load=loads(most=6), **DRAFTS)
def test_every_request_draws_what_it_draws_alone(load: Load, num_drafts: int, share: float, seed: int) -> None:
    """In steps that are launched ahead of how many random numbers are used up, greedy requests among them. A preempted
    request keeps the token under way, and gets no other in its place.
    """

    def outcome(names: Sequence[int], **options: Any) -> list[tuple[list[int], str | None]]:
        engine, requests = make_engine(*load.limits, **options), list[Request]()
        for name in names:
            ask = load.asks[name]
            params = SamplingParams(max_new_tokens=ask.num_new, temperature=40.0 * (name % 3), seed=name)
            requests.append(engine.add(ask.prompt, params))
        assert len(list(engine.run())) == len(requests)
        assert engine.allocator.num_free == load.num_blocks
        return [(request.token_ids, request.finish_reason) for request in requests]

    everyone, drafter = range(len(load.asks)), HashDrafter(num_drafts, share, seed, ahead=True)
    alone = [outcome([name])[0] for name in everyone]
    assert outcome(everyone) == outcome(everyone, with_graph=True) == alone
    assert outcome(everyone, with_graph=True, drafter=drafter) == alone


def test_right_drafts_save_steps() -> None:
    engine = make_engine(num_blocks=50, drafter=HashDrafter(3, share=1.0, always=True))
    requests = answer(engine, [0, 1], [1, 1], [2, 1], num_new=13, ignore_eos=True)
    for request in requests:
        assert (request.acceptance.num_drafted, request.acceptance.num_accepted) == (9, 9)
    model: Any = engine.model
    assert [sum(step) for step in model.steps] == [6, 12, 12, 12]  # the prompt gives one token, a step four
    assert (engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens) == (27, 27)
    assert (engine.stats.num_decode_tokens, engine.stats.num_new_tokens) == (36, 39)
    check_totals(engine, requests)


def test_wrong_drafts_count_as_computed_nowhere() -> None:
    engine = make_engine(num_blocks=50, drafter=HashDrafter(3, share=0.0, always=True))
    answer(engine, [1, 2], num_new=8, ignore_eos=True)
    assert (engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens) == (3 * 4 + 2 + 1, 0)  # fewer at the end
    assert engine.stats.num_decode_tokens == 7


@pytest.mark.parametrize("ahead", [False, True])
def test_who_looks_at_earlier_tokens_drafts_nothing(ahead: bool) -> None:
    """Penalties and log probabilities are those of one token a step; others in the same steps draft."""
    params = [{"presence_penalty": 0.4}, {"logprobs": 2}, {}]

    def outcome(drafter: Drafter | None) -> list[object]:
        engine = make_engine(num_blocks=50, drafter=drafter, with_graph=ahead)
        requests = [engine.add([index, 2], SamplingParams(ignore_eos=True, **own)) for index, own in enumerate(params)]  # type: ignore[arg-type]
        list(engine.run())
        assert [request.acceptance.num_drafted > 0 for request in requests] == [False, False, drafter is not None]
        return [(request.token_ids, request.logprobs) for request in requests]

    assert outcome(HashDrafter(3, 0.9, ahead=ahead)) == outcome(None)


def test_nothing_is_waited_for_where_no_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are one ahead again where drafts are rejected, and only now and then they are tried."""

    class Wrong(HashDrafter):
        drafts_always = False

    learn = Payoff.learn  # a step with drafts takes half as long again
    monkeypatch.setattr(
        Payoff, "learn", lambda self, time: learn(self, time._replace(seconds=1.5 if time.has_drafts else 1.0))
    )
    engine = make_engine(num_blocks=200, max_model_len=700, drafter=Wrong(3, share=0.0, always=True))
    answer(engine, [1], num_new=600, ignore_eos=True)
    assert 3 * 5 < engine.stats.num_draft_tokens < 3 * 12  # one step in 100, and a few at first


def test_drafts_are_tried_where_they_pay() -> None:
    payoff, right, wrong = Payoff(), Acceptance(), Acceptance()
    assert not payoff.pays([right], 1, 3)  # not known what steps take
    for _ in range(3):
        payoff.learn(StepTime(1, False, 1.0))
        payoff.learn(StepTime(8, False, 1.0))
        payoff.count_step(has_drafts=False)
    assert payoff.pays([wrong], 1, 3)  # to know what it takes
    for seconds in (9.0, 1.4, 1.4, 1.4, 1.4, 1.4):  # the first one compiles
        payoff.learn(StepTime(1, True, seconds))
        payoff.learn(StepTime(8, True, 1.4))
        for acceptance, num_accepted in ((right, 3), (wrong, 0)):
            acceptance.count(3, num_accepted)
            payoff.count(3, num_accepted)
        payoff.count_step(has_drafts=True)
    assert payoff.pays([right], 1, 3)
    assert not payoff.pays([wrong], 1, 3)
    assert not payoff.pays([right], 8, 3)  # one of eight: 3 tokens more for a time of 11.2 instead of 8
    assert payoff.pays([right] * 3, 8, 3)
    for num_plain in range(81):  # 0.4 of a step in 80
        assert num_plain == 80 or not payoff.pays([wrong], 1, 3)
        payoff.count_step(has_drafts=False)
    assert payoff.pays([wrong], 1, 3)


def test_times_of_steps_without_drafts_follow_others_of_their_size() -> None:
    speculation, times = Speculation(HashDrafter(3, 1.0)), list[StepTime | None]()
    for num_reqs, num_drafts, is_prefill in [
        (2, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
        (3, 0, 1),
        (3, 0, 0),
        (3, 9, 0),
        (2, 6, 0),
    ]:
        step: Any = SimpleNamespace(pieces=[None] * num_reqs, num_drafts=num_drafts, is_prefill=bool(is_prefill))
        speculation.end(step, 1.0, None)
        times.append(speculation.step_time)
    assert times == [None, (2, False, 1.0), None, None, None, (3, True, 1.0), (2, True, 1.0)]


def test_drafts_past_a_rejected_one_say_nothing() -> None:
    acceptance = Acceptance()
    acceptance.count(num_drafts=5, num_accepted=1)
    assert acceptance.share(0.5) == (1 + 2 * 0.5) / (2 + 2)
    assert acceptance.metrics()["mean_accepted_length"] == 2


def test_who_wants_drafts() -> None:
    """Neither large batches nor requests that cannot draft, for which the host would wait for the step under way."""
    speculation = Speculation(HashDrafter(3, 1.0, always=True))
    request = Request([1], SamplingParams())
    assert [speculation.num_wanted([request] * num_running) for num_running in (1, 64, 65)] == [3, 3, 0]
    assert speculation.num_wanted([Request([1], SamplingParams(presence_penalty=1.0))]) == 0


@pytest.mark.parametrize("is_preempted", [False, True])
def test_accepted_drafts_count_as_computed_unless_their_request_was_preempted(is_preempted: bool) -> None:
    speculation, request = Speculation(HashDrafter(3, 1.0)), Request([1, 2, 3], SamplingParams())
    request.block_ids.extend([] if is_preempted else [0])
    request.num_computed_tokens = 0 if is_preempted else 3
    assert speculation.accept(Piece(request, 4, 3), [7, 8, 9], 2) == 3
    assert request.num_computed_tokens == (0 if is_preempted else 5)


def test_drafts_that_are_being_verified_have_blocks() -> None:
    """Each may become a token, and the next step's token comes after all of them."""
    scheduler, request = Scheduler(BlockAllocator(9, BLOCK), 100, 1), Request([1, 2], SamplingParams())
    request.block_ids.extend(scheduler.allocator.allocate(1))
    request.num_computed_tokens, request.num_tried = BLOCK - 2, 2
    scheduler.running.append(request)
    assert scheduler.grow(request)
    assert len(request.block_ids) == 2


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 5))
@example(text=[1, 1, 1, 0, 1, 1, 1, 2, 1, 1, 1], num_wanted=1)
def test_a_lookup_finds_the_latest_of_the_longest_matches(text: list[int], num_wanted: int) -> None:
    best = (2, 0)
    for end in range(1, len(text)):
        length = next((n for n in range(8, 0, -1) if n <= end and text[end - n : end] == text[-n:]), 0)
        best = max(best, (length, end))
    expected = np.resize(text[best[1] :], num_wanted).tolist() if best[0] > 2 else [NO_DRAFT] * num_wanted
    assert find_following(torch.tensor(text), num_wanted).tolist() == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), max_size=12))
@example(prompt=[1, 2, 3], new=[1, 2, 3])
@example(prompt=[1, 2, 3, 1], new=[2, 3])
def test_requests_are_candidates_whose_last_three_tokens_occurred_before(prompt: list[int], new: list[int]) -> None:
    drafter, request = NgramDrafter(3, torch.device("cpu")), Request(array("i", prompt), SamplingParams())
    for token in new:
        request.append(token, frozenset())
        text = [*prompt, *request.token_ids]
        trigrams = [tuple(text[end - 3 : end]) for end in range(3, len(text) + 1)]
        expected = [request] if trigrams and trigrams[-1] in trigrams[:-1] else []
        assert drafter.candidates([request]) == expected


class Copying(HashModel):
    """A model that goes round a text of ten tokens."""

    def hidden(self, token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        super().hidden(token_ids, *args)
        return torch.eye(VOCAB_SIZE)[(token_ids + 1) % 10]


@pytest.mark.parametrize("with_graph", [False, True])
def test_lookups_draft_where_a_text_repeats_itself(with_graph: bool) -> None:
    class Always(NgramDrafter):
        drafts_always = True

    drafter = Always(4, torch.device("cpu"))
    engine = make_engine(num_blocks=90, model=Copying(), drafter=drafter, with_graph=with_graph)
    prompts = [[*range(10), 0, 1], [7, 8], [*range(4, 10), *range(8)]]
    lengths = [BLOCK * 10 + index for index in range(3)]
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=num)) for prompt, num in zip(prompts, lengths, strict=True)
    ]
    list(engine.run())
    for prompt, num, request in zip(prompts, lengths, requests, strict=True):
        assert request.token_ids == [(prompt[-1] + 1 + token) % 10 for token in range(num)]
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 75  # no match, no drafts
    assert engine.allocator.num_free == 90
    gone = [weakref.ref(request) for request in requests]
    del request, requests
    engine.add([1], SamplingParams(max_new_tokens=2))  # the engine has the last step
    list(engine.run())
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("ahead", [None, False, True])
def test_a_step_with_drafts_is_waited_for_where_it_has_to_be(
    ahead: bool | None, with_graph: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = HashModel(), list[str]()
    hidden, wait = model.hidden, InFlightStep.wait
    monkeypatch.setattr(model, "hidden", lambda *call: seen.append("launch") or hidden(*call))
    monkeypatch.setattr(InFlightStep, "wait", lambda pending: seen.append("wait") or wait(pending))
    drafter = None if ahead is None else HashDrafter(3, share=0.7, always=True, ahead=ahead)
    engine = make_engine(num_blocks=90, model=model, with_graph=with_graph, drafter=drafter)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=temperature)
    request = engine.add([1, 2, 3], params)
    list(engine.run())
    assert temperature or request.token_ids == alone_ignoring_eos([1, 2, 3], 30)
    is_ahead = ["launch", "launch", *["wait", "launch"] * (len(seen) // 2 - 1), "wait", "wait"][: len(seen)]
    assert (seen[:-4] == is_ahead[: len(seen) - 4]) == (ahead is None or (ahead and with_graph))


class HashModelWithMtp(HashModel):
    """Its module looks at shapes alone, and drafts what comes along."""

    def rows(self, token_ids: Tensor) -> Tensor:
        return torch.cat([token_ids[:, None].float().expand(-1, 4), torch.zeros(len(token_ids), 4)], -1)

    def predict(self, rows: Tensor, metadata: Any, cache: LatentCache) -> Tensor:
        assert len(rows) == metadata.num_tokens
        return rows[:, :4].clone()

    def draft(self, hidden_states: Tensor, metadata: Any, cache: LatentCache) -> Tensor:
        return (7 * hidden_states[:, 0].long() + torch.arange(len(hidden_states))) % VOCAB_SIZE


class Always(ModuleDrafter):
    drafts_always = True


def make_mtp_engine(
    num_drafts: int,
    num_blocks: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    model: HashModelWithMtp | None = None,
) -> Engine:
    model, cache = model or HashModelWithMtp(), new_cache(num_blocks)
    dcp = DCPConfig(block_size=BLOCK, context_workspace_tokens=BLOCK * 16)
    limits = cache, StepBuilder(dcp, 0), MESH, min(max_num_seqs, max_num_batched_tokens), 100
    graph = StepGraph.decodes(model.decode, torch.tensor(0), *limits, 1 + num_drafts)
    module = StepGraph.decodes(model.predict, torch.zeros(8), *limits, 1 + num_drafts)
    chain = StepGraph.decodes(model.draft, torch.zeros(4), *limits, num_drafts)
    drafter = Always(num_drafts, model, cache, MESH, module, chain)
    return new_engine(model, cache, dcp, MESH, 100, max_num_batched_tokens, max_num_seqs, graph=graph, drafter=drafter)


@pytest.mark.parametrize("seed", range(30))
def test_mtp_takes_any_load(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_mtp_engine(
        rng.randint(1, 6), rng.randint(8, 40), rng.choice([3, 7, 16, 64]), rng.choice([1, 2, 4, 16])
    )
    requests = []
    for _ in range(rng.randint(1, 9)):
        prompt = rng.choices(range(3), k=rng.randint(1, 12))
        requests.append(engine.add(prompt, SamplingParams(max_new_tokens=rng.randint(1, 18), ignore_eos=True)))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    list(engine.run())
    for request in requests:
        assert request.token_ids == alone_ignoring_eos(request.prompt_token_ids, request.params.max_new_tokens)


def test_mtp_drafts_after_the_last_token_that_was_accepted() -> None:
    """All drafts are wrong, and the next step is launched before that is known."""
    first_positions: list[int] = []

    class Wrong(HashModelWithMtp):
        def draft(self, hidden_states: Tensor, metadata: Any, cache: LatentCache) -> Tensor:
            first_positions.append(int(metadata.tokens.positions[0]))
            return torch.full((len(hidden_states),), VOCAB_SIZE - 2)

    engine = make_mtp_engine(3, 90, 64, 16, Wrong())
    (request,) = answer(engine, [1, 2, 3, 4, 5], num_new=9, ignore_eos=True)
    assert VOCAB_SIZE - 2 not in request.token_ids
    starts = sorted(set(first_positions))
    assert starts == list(range(starts[0], starts[0] + len(starts)))
    assert starts[-1] < len(request.prompt_token_ids) + 9
