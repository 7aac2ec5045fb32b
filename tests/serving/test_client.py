"""The HTTP process's end of the engine, without one: deadlines, silence, limits, outputs that wait together."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import dcpmla.serving.client as client_module
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.client import Engine, merged
from dcpmla.serving.errors import ApiError
from dcpmla.serving.loop import ServingLoop
from dcpmla.serving.messages import Abort, Output, Report, Started, Submit, unpack_commands
from dcpmla.serving.metrics import Metrics
from dcpmla.serving.outbox import Outbox


class Wire:
    """A writer that keeps the commands."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def write(self, packed: bytes) -> None:
        self.sent += unpack_commands(packed)


def make_engine(**changes: Any) -> tuple[Engine, Wire]:
    wire: Any = Wire()
    engine = Engine(wire, Outbox(wire), 1, Metrics())
    engine.model = replace(Started(None, "none is there", 100, 50, 2, 100), **changes)
    return engine, wire


def test_a_request_past_its_deadline_is_aborted() -> None:
    engine, wire = make_engine()

    async def wait() -> None:
        with engine.submit([[1, 2]], SamplingParams(), seconds=0.05) as generation:
            async for _ in generation.outputs():
                pass

    with pytest.raises(ApiError, match="--request-timeout") as error:
        asyncio.run(wait())
    assert error.value.status == 504
    assert wire.sent == [Submit([0], [0], [1, 2], SamplingParams()), Abort([0])]
    assert engine.num_open == 0


def test_more_than_fits() -> None:
    engine, _ = make_engine()
    engine.submit([[1]] * 2, SamplingParams(), seconds=9)
    with pytest.raises(ApiError) as full:
        engine.check_room(2)
    assert (full.value.status, full.value.headers) == (429, {"Retry-After": "1"})
    with pytest.raises(ApiError, match="4 answers are asked for at once") as never:
        engine.check_room(4)
    assert never.value.status == 400


def test_silence_is_not_health(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()
    now = 100.0
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now)
    assert not engine.is_healthy
    engine._last = now
    engine._hand_out(Report([Output(7, "late")], 0, 0, 0, 0.0, {"preemptions": 2}))  # abandoned meanwhile
    assert engine.is_healthy
    assert b"dcpmla_preemptions_total 2.0" in engine.metrics.text()
    now += 11
    assert not engine.is_healthy


def test_outputs_that_wait_come_as_one() -> None:
    outputs = [
        Output(1, "a", (5,), num_cached_tokens=4),
        Output(2, "x", (6,)),
        Output(1, "b", (7,), finish_reason="stop", num_cached_tokens=4),
    ]
    first, second = merged(outputs)
    assert (first.text, first.token_ids, first.finish_reason, first.num_cached_tokens) == ("ab", (5, 7), "stop", 4)
    assert second == outputs[1]


def test_all_tokens_of_a_step_are_told() -> None:
    """Drafts that are accepted bring several at once."""
    frontend: Any = object()
    engine: Any = None
    loop = ServingLoop(engine, frontend)
    request = Request([1, 2], SamplingParams(max_new_tokens=9, prompt_logprobs=0), request_id=3)
    for num_tokens, reason in ((1, None), (4, None), (6, "length")):
        request.token_ids = [5] * num_tokens
        request.finish_reason = reason
        loop._collect(request, "x")
    assert [(output.num_tokens, len(output.prompt_logprobs)) for output in loop._outputs] == [(1, 1), (3, 0), (2, 0)]
