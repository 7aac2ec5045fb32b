"""The HTTP process's end of the engine, without one: deadlines, silence, limits, outputs that wait together."""

import asyncio
import gc
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dcpmla.serving.client as client_module
from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.app import Api
from dcpmla.serving.background import Prepared, prepare
from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Limits
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import (
    Abort,
    Message,
    Opened,
    Output,
    Report,
    Seen,
    Started,
    Stop,
    Stopped,
    Submit,
    merged,
    pack,
    pack_tokens,
)
from dcpmla.serving.settings import Settings
from dcpmla.serving.worker import Worker
from tests.support.asgi import Client
from tests.support.hash_model import Letters
from tests.support.small_tokenizers import tokenizer_of
from tests.support.transfer_servers import Ranks


def make_engine(tokenizer: Any = None, **changes: int) -> tuple[Engine, Ranks]:
    """Return an engine's end with a queue of one request, and its ranks, which answer nothing."""
    ranks = Ranks("", answers=False)
    ranks.engine.max_waiting = 1
    sizes = {"vocab_size": 100, "max_model_len": 50, "max_num_seqs": 2, "num_cache_tokens": 100}
    ranks.engine.prepared = Prepared(Started("", **{**sizes, **changes}), tokenizer, "none is there")
    return ranks.engine, ranks


def make_api(engine: Engine, worker: Worker | None = None) -> Api:
    """Return the API over an engine's end, on any host's name."""
    settings = Settings(name="model", request_timeout=30, host="0.0.0.0")
    return Api(engine, settings, Limits(), worker or Worker(prepare))


async def test_a_request_past_its_deadline_is_aborted() -> None:
    engine, wire = make_engine()
    with (
        pytest.raises(ApiError, match="--request-timeout") as error,
        engine.submit([[1, 2]], SamplingParams(), seconds=0.05) as generation,
    ):
        await anext(generation.outputs())
    assert error.value.status == 504
    assert wire.commands == [Submit([0], [0], pack_tokens([1, 2]), SamplingParams()), Abort([0])]
    assert len(engine._open) == 0


def test_more_than_fits() -> None:
    engine, _ = make_engine()
    engine.submit([[1]] * 2, SamplingParams(), seconds=9)
    with pytest.raises(ApiError) as full:
        engine.check_room(2)
    assert (full.value.status, full.value.headers) == (429, {"Retry-After": "1"})
    with pytest.raises(ApiError, match="4 answers are asked for at once") as never:
        engine.check_room(4)
    assert never.value.status == 400


def test_choices_are_one_submission_a_prompt() -> None:
    engine, wire = make_engine(max_num_seqs=10)
    params = SamplingParams(max_new_tokens=99, seed=3)
    engine.submit([[1, 2], [3]], params, seconds=9, num_choices=2, cache_salt="own")
    seeds = [params.for_prompt(index).seed for index in range(4)]
    assert wire.commands == [
        Submit([0, 1], seeds[:2], pack_tokens([1, 2]), replace(params, max_new_tokens=48), "own"),
        Submit([2, 3], seeds[2:], pack_tokens([3]), replace(params, max_new_tokens=49), "own"),
    ]


def test_open_prompts_have_a_limit_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt counts once for all its choices, as long as its generation lives; the cache's tokens are added."""
    monkeypatch.setattr(client_module, "WAITING_TOKENS", 20)
    engine, _ = make_engine(max_num_seqs=50, num_cache_tokens=50)
    params = SamplingParams()
    with engine.submit([[1] * 30, [2] * 20], params, 9, num_choices=5):
        with engine.submit([[3] * 15], params, 9, num_characters=5), pytest.raises(ApiError) as full:
            engine.submit([[4]], params, 9)
        assert (full.value.status, full.value.headers) == (429, {"Retry-After": "1"})
        engine.submit([[4] * 20], params, 9).__exit__(None, None, None)
    with engine.submit([[5] * 49], params, 9):  # the longest prompt of the model
        pass
    with pytest.raises(ApiError, match="the prompts have 71 tokens; at most 70") as never:
        engine.submit([[6] * 49, [6] * 22], params, 9)
    assert never.value.status == 400
    assert engine._num_tokens == len(engine._open) == 0


def test_abandoned_requests_that_were_not_sent_are_dropped() -> None:
    engine, wire = make_engine(max_model_len=1 << 22, num_cache_tokens=1 << 22)
    sent = engine.submit([[1 << 20] * (1 << 21)], SamplingParams(), 9)
    unsent = engine.submit([[2] * 9], SamplingParams(), 9, num_choices=2)
    engine.abandon(unsent)
    engine.abandon(sent)
    engine._hand_out(Report([], 0, 0, 0, 0.0, {}))
    assert [type(command) for command in wire.commands] == [Submit, Abort]
    assert engine.metrics.registry.get_sample_value("dcpmla_requests_total", {"finish_reason": "abort"}) == 3


async def test_log_probabilities_of_a_prompt_come_in_pieces() -> None:
    """They wait for the first token, and do not count as one."""
    engine, _ = make_engine()
    entries = [TokenLogprobs(number, -1.0, ()) for number in range(6)]
    with engine.submit([[1] * 6], SamplingParams(), 9) as generation:
        for start in (0, 2):
            piece = Output(0, prompt_logprobs=tuple(entries[start : start + 2]))
            engine._hand_out(Report([piece], 0, 0, 0, 0.0, {}))
        assert generation.queue.empty()
        last = Output(0, "a", (7,), prompt_logprobs=tuple(entries[4:]), finish_reason="stop")
        engine._hand_out(Report([last], 0, 0, 0, 0.0, {}))
        outputs = [output async for _, output in generation.outputs()]
    assert outputs == [Output(0, "a", (7,), (), "stop", prompt_logprobs=tuple(entries))]
    assert engine.metrics.registry.get_sample_value("dcpmla_time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize(
    ("reason", "error", "status", "words", "code"),
    [
        (None, "prompt is empty", 400, "prompt is empty", None),
        ("error", "logits are NaN", 500, "logits are NaN", "model_error"),
        ("error", "", 500, "a rank of the server has failed", "rank_failed"),
    ],
)
async def test_errors_of_the_engine(reason: str | None, error: str, status: int, words: str, code: str | None) -> None:
    engine, _ = make_engine()
    with engine.submit([[1]], SamplingParams(), 9) as generation:
        engine._hand_out(Report([Output(0, finish_reason=reason, error=error)], 0, 0, 0, 0.0, {}))
        with pytest.raises(ApiError, match=words) as raised:
            await anext(generation.outputs())
    assert (raised.value.status, raised.value.code) == (status, code)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": 2}, {"stream": True}])
async def test_an_open_request_holds_no_copy_of_its_prompt(fields: dict[str, Any]) -> None:
    """Once it is sent: its answer may take minutes. All of it ends with its client."""
    engine, wire = make_engine(max_num_seqs=5, max_model_len=50_000, num_cache_tokens=50_000)
    app = make_api(engine).app()
    num_before = num_prompts(40_000)
    client = Client(app, "/v1/completions", json.dumps({"prompt": [7] * 40_000, **fields}).encode())
    while not wire.commands:
        await asyncio.sleep(0.01)
    assert [len(submitted.prompt) for submitted in wire.commands] == [4 * 40_000]
    wire.commands.clear()
    await asyncio.sleep(0.1)
    assert len(engine._open) == fields.get("n", 1)
    assert num_prompts(40_000) == num_before
    await client.leave()
    assert wire.commands == [Abort([*range(fields.get("n", 1))])]
    assert len(engine._open) == 0


def num_prompts(length: int) -> int:
    """Return the number of lists of so many tokens, and of arrays and packed prompts that any object refers to."""
    gc.collect()
    objects = gc.get_objects()
    held = {id(each): each for each in gc.get_referents(*objects) if isinstance(each, array | bytes)}
    sizes = [len(each) * getattr(each, "itemsize", 1) for each in held.values()]
    return sum(type(each) is list and len(each) == length for each in objects) + sizes.count(4 * length)


def test_silence_is_not_health(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()
    engine._last, now = 0.0, 100.0
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now)
    assert not engine.is_healthy
    engine._last = now
    engine._hand_out(Report([Output(7, "late")], 0, 0, 0, 0.0, {("preemptions",): 2}))  # abandoned meanwhile
    assert engine.is_healthy
    assert engine.metrics.registry.get_sample_value("dcpmla_preemptions_total") == 2
    now += 11
    assert not engine.is_healthy


class Entries(tuple[int, ...]):
    """A tuple that counts the entries of concatenations."""

    num_copied = 0

    def __add__(self, other: Any) -> "Entries":
        joined = Entries((*self, *other))
        Entries.num_copied += len(joined)
        return joined


def test_outputs_that_wait_come_as_one() -> None:
    """In one pass: in pairs, two million tokens would be copied."""
    outputs = [Output(1, "a", Entries([number]), num_cached_tokens=4) for number in range(2000)]
    other, last = Output(2, "x", (6,)), outputs[-1]._replace(finish_reason="stop")
    first, second = merged([outputs[0], other, *outputs[1:-1], last])
    assert (first.text, first.token_ids, first.finish_reason) == ("a" * 2000, tuple(range(2000)), "stop")
    assert (first.num_cached_tokens, second) == (4, other)
    assert Entries.num_copied <= 2000


def hear(engine: Engine, *messages: Message) -> None:
    """Let an engine's end read messages of the ranks."""

    async def listen() -> None:
        engine.reader = asyncio.StreamReader()
        engine.reader.feed_data(b"".join(map(pack, [*messages, Stopped()])))
        await engine.listen()

    asyncio.run(listen())


def follow(engine: Engine, *steps: list[Output]) -> None:
    """Let an engine's end read reports of the ranks."""
    hear(engine, *(Report(outputs, 0, 1, 0, 0.1, {}) for outputs in steps))


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_tokenizer_is_loaded_from_the_model_s_directory(is_broken: bool, tmp_path: Path) -> None:
    """A broken one is a reason that clients see."""
    tokenizer = tokenizer_of("byte_level")
    tokenizer.save_pretrained(tmp_path)
    if is_broken:
        (tmp_path / "tokenizer.json").write_text("{}")
    engine, _ = make_engine()
    engine.prepared = None
    with pytest.raises(ApiError, match="the model is being loaded"):
        engine.ready()
    found: list[Prepared] = []
    engine.on_ready = lambda: found.append(engine.ready())  # the address is shown then
    hear(engine, Opened(str(tmp_path)), Started(str(tmp_path), len(tokenizer), 99, 4, 100))
    (prepared,) = found
    assert (prepared.model.max_model_len, bool(prepared.no_tokenizer)) == (99, is_broken)
    assert is_broken == (prepared.tokenizer is None)
    assert is_broken or prepared.tokenizer.encode("a brown é") == tokenizer.encode("a brown é")


def test_a_stop_string_ends_a_request_in_front_of_the_ranks() -> None:
    """Whatever the ranks have sent after it is dropped, and they learn where the request ends."""
    engine, wire = make_engine(tokenizer=Letters())
    generation = engine.submit([[1, 2]], SamplingParams(stop=("CD",), logprobs=0, max_new_tokens=40), seconds=9)
    tokens = [0, 1, 2, 3, 4, 5]
    scores = [TokenLogprobs(token, -1.0, ()) for token in tokens]
    parts = slice(0, 2), slice(2, 5), slice(5, 6)
    follow(engine, *([Output(0, "", tuple(tokens[part]), tuple(scores[part]))] for part in parts))
    (whole,) = merged([generation.queue.get_nowait() for _ in range(generation.queue.qsize())])
    assert (whole.text, whole.token_ids, whole.finish_reason, whole.stop_string) == ("AB", (0, 1, 2, 3), "stop", "CD")
    assert (len(whole.logprobs), whole.offsets) == (4, (0, 1, 2, 3))
    assert wire.commands[1:] == [Stop(0, 4)]
    assert len(engine._open) == 0


def test_the_ranks_hear_how_far_texts_are() -> None:
    """Of requests with stop strings alone, and not at every token."""
    engine, wire = make_engine(tokenizer=Letters(), max_model_len=200)
    params = SamplingParams(max_new_tokens=99)
    engine.submit([[1, 2]], replace(params, stop=("?",)), seconds=9)
    engine.submit([[1, 2]], params, seconds=9)
    num_sent = len(wire.commands)
    follow(engine, *([Output(0, "", (3,)), Output(1, "", (3,))] for _ in range(40)))
    assert wire.commands[num_sent:] == [Seen({0: 16}), Seen({0: 32})]
