"""Texts, stop strings, and callers that abort and add between steps: a request gets what its prompt gives alone."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.runtime.engine import Engine
from dcpmla.runtime.in_flight import StepEvents
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import BLOCK, EOS, Clock, Letters, alone_ignoring_eos, drive, make_engine, next_token

letters = Letters().decode
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
TOKENS = alone_ignoring_eos([0, 0], 8)
TEXT = letters(TOKENS)


def answer(prompt: list[int], params: SamplingParams) -> tuple[list[int], str, str]:
    """Tokens, text and finish_reason by their definition."""
    tokens: list[int] = []
    ends, text, exempt = {*params.stop_token_ids} | ({EOS} - {EOS * params.ignore_eos}), "", 0
    while len(tokens) < params.max_new_tokens:
        is_short = len(tokens) < params.min_tokens
        tokens.append(next_token([*prompt, *tokens]))
        if is_short and tokens[-1] in {*params.stop_token_ids, EOS}:  # the first of those whose logits are 0
            tokens[-1] = min({*range(EOS)} - {*params.stop_token_ids})
        if tokens[-1] in ends:
            return tokens, text + letters(tokens[-1:]) * params.include_stop_str_in_output, "stop"
        text += letters(tokens[-1:])
        exempt = len(text) if is_short else exempt
        found = [(text.find(stop, max(0, exempt + 1 - len(stop))), stop) for stop in params.stop]
        if any(start >= 0 for start, _ in found):
            start, stop = min(each for each in found if each[0] >= 0)
            return tokens, text[: start + len(stop) * params.include_stop_str_in_output], "stop"
    return tokens, text, "length"


def seen(request: Request) -> tuple[list[int], str, str | None]:
    return request.token_ids, request.text, request.finish_reason


@pytest.mark.parametrize(
    ("limits", "num_tokens", "num_letters", "reason", "pieces"),
    [
        ({"stop": ("?", TEXT[3:5])}, 5, 3, "stop", [*TEXT[:3], "", ""]),
        # What may have begun a stop string is given out at the end.
        ({"stop": (TEXT[6:] + "?",)}, 8, 8, "length", [*TEXT[:6], "", TEXT[6:]]),
        # Not the stop string's end: the token that ends the request is no text.
        ({"stop": (TEXT[1:3],), "stop_token_ids": TOKENS[2:3]}, 3, 2, "stop", [TEXT[0], "", TEXT[1]]),
    ],
)
def test_pieces_of_texts_until_their_ends(
    limits: dict[str, Any], num_tokens: int, num_letters: int, reason: str, pieces: list[str]
) -> None:
    assert TEXT.find(TEXT[3:5]) == 3
    engine, found = make_engine(num_blocks=50, tokenizer=Letters()), list[str]()
    request = engine.add("AA", replace(PARAMS, **limits))
    assert drive(engine, lambda request, piece: found.append(piece)) == [request]
    assert seen(request) == (TOKENS[:num_tokens], TEXT[:num_letters], reason)
    assert found == pieces


@pytest.mark.parametrize("victim", ["older", "itself", "younger", "waiting", "arriving"])
def test_an_abort_between_steps(victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its second token; two more get theirs in the same step, one before it and one after it."""
    clock = Clock(monkeypatch)
    engine = make_engine(num_blocks=50, max_num_seqs=3)
    requests: dict[str, Request] = {}

    def on_token(request: Request, piece: str) -> None:
        if request is requests["itself"] and len(request.token_ids) == 2:
            engine.abort(requests[victim])

    for index, name in enumerate(["older", "itself", "younger", "waiting"]):
        requests[name] = engine.add([index], PARAMS)
    requests["arriving"] = engine.add([9], PARAMS, arrival_time=50)
    aborted = requests[victim]
    finished = drive(engine, on_token)
    assert set(finished) == set(requests.values()) - {aborted}
    assert all(request.token_ids == alone_ignoring_eos(request.prompt_token_ids, 8) for request in finished)
    num_tokens = 0 if victim in ("waiting", "arriving") else 2
    assert aborted.token_ids == alone_ignoring_eos(aborted.prompt_token_ids, 8)[:num_tokens]
    assert (aborted.finish_reason, aborted.finish_time) == ("abort", 9)
    assert aborted.metrics() == (
        {"queue_seconds": 1, "time_to_first_token": 5, "time_per_token": 3}
        if num_tokens
        else {"queue_seconds": None, "time_to_first_token": None, "time_per_token": None}
    )
    assert engine.stats.num_finished == len(finished) == 4
    assert engine.allocator.num_free == 50
    assert clock.now < 80


def test_an_aborted_text_is_whole() -> None:
    engine = make_engine(num_blocks=50, tokenizer=Letters())
    request = engine.add("AA", replace(PARAMS, stop=(TEXT[1:3] + "?",)))
    for _ in range(3):
        engine.step()
    assert request.text == TEXT[:1]  # the rest may be the stop string's
    engine.abort(request)
    assert request.text == TEXT[:3]


def test_a_consumer_may_leave_and_come_back() -> None:
    engine = make_engine(num_blocks=50)
    requests = [
        engine.add([index], replace(PARAMS, max_new_tokens=2 + index // 2)) for index in range(4)
    ]  # two finish at a time
    finished = []
    for _ in requests:
        for request in engine.run():
            finished.append(request)
            break
    assert finished == requests
    assert list(engine.run()) == []
    assert engine.step() == StepEvents([], [])


@dataclass(frozen=True)
class Ask:
    """A request, and what its caller does at one of its tokens."""

    prompt: list[int]
    params: SamplingParams
    at: int
    action: str
    victim: int


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    prompt = [*range(draw(st.integers(0, 3 * BLOCK))), *draw(st.lists(st.integers(0, EOS - 1), min_size=1, max_size=6))]
    text = letters(alone_ignoring_eos(prompt, 14))
    start = draw(st.integers(0, 13))
    stop = text[start : start + draw(st.integers(1, 3))] + draw(st.sampled_from(["", "", "?"]))
    num_new = draw(st.integers(1, 14))
    params = SamplingParams(
        max_new_tokens=num_new,
        min_tokens=draw(st.sampled_from([0, 0, num_new // 2, num_new])),
        include_stop_str_in_output=draw(st.booleans()),
        stop=draw(st.sampled_from([(), (stop,), (stop or "?", *text[-1:])])) if stop else (),
        stop_token_ids=draw(st.lists(st.integers(0, EOS), max_size=2).map(tuple)),
        ignore_eos=draw(st.booleans()),
    )
    action = draw(st.sampled_from(["add", "abort", ""]))
    return Ask(prompt, params, draw(st.integers(1, 6)), action, draw(st.integers(0, 7)))


def serve(engine: Engine, load: list[Ask]) -> tuple[list[Request], list[Request], dict[Request, str]]:
    """All requests, those that the engine gave, and the pieces of each one's text put together."""
    requests: list[Request] = []
    finished: list[Request] = []
    texts: dict[Request, str] = {}

    def add() -> None:
        ask = load[len(requests)]
        requests.append(engine.add(ask.prompt, ask.params))

    def on_token(request: Request, piece: str) -> None:
        texts[request] = texts.get(request, "") + piece
        ask = load[requests.index(request)]
        if len(request.token_ids) != ask.at:
            return
        if ask.action == "add" and len(requests) < len(load):
            add()
        elif ask.action == "abort":
            engine.abort(requests[ask.victim % len(requests)])

    for _ in range(-(-len(load) // 2)):
        add()
    while True:
        finished += drive(engine, on_token)
        if len(requests) == len(load):
            return requests, finished, texts
        add()


@given(
    load=st.lists(asks(), min_size=1, max_size=8),
    spare=st.integers(0, 6),
    budget=st.sampled_from([1, 3, 9, 64]),
    seqs=st.integers(1, 5),
)
def test_every_request_gives_the_text_that_it_gives_alone(load: list[Ask], spare: int, budget: int, seqs: int) -> None:
    largest = max(-(-(len(ask.prompt) + ask.params.max_new_tokens - 1) // BLOCK) for ask in load)
    engine = make_engine(largest + spare, budget, seqs, tokenizer=Letters())
    requests, finished, texts = serve(engine, load)
    for ask, request in zip(load, requests, strict=True):
        tokens, text, reason = answer(ask.prompt, ask.params)
        assert finished.count(request) == (request.finish_reason != "abort")
        if request.finish_reason == "abort":
            num_tokens = len(request.token_ids)
            assert (request.token_ids, request.text) == (tokens[:num_tokens], letters(tokens[:num_tokens]))
            assert num_tokens < len(tokens)
        else:
            assert seen(request) == (tokens, text, reason)
            assert texts[request] == text
    assert not engine.has_requests
    assert engine.allocator.num_free == engine.allocator.num_blocks
