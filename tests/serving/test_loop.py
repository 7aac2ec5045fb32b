"""The serving loop of a rank: choices share their prompt, one rank keeps log probabilities and drops what it sends."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import dcpmla.cache.blocks as blocks_module
import dcpmla.runtime.engine as engine_module
import dcpmla.runtime.request as request_module
from dcpmla.runtime.agreement import News
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.logprobs import Logprobs
from dcpmla.runtime.request import MAX_UNSEEN_TOKENS, Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.loop import ServingLoop
from dcpmla.serving.messages import LENGTH, Abort, Close, Command, Output, Report, Seen, Stop, Submit, pack, pack_tokens
from dcpmla.serving.reading import RequestText
from tests.support.hash_model import BLOCK, HashModel, Letters, alone, alone_ignoring_eos, make_engine

PROMPT = [number % 28 for number in range(10 * BLOCK + 1)]


class Frontend:
    """A frontend that has a list of commands for each step, and keeps the outputs of each step."""

    def __init__(self, *steps: Sequence[Command]) -> None:
        self._steps = [*steps, [Close()]]
        self.outputs: list[list[Output]] = []
        self.num_taken = 0

    def take(self) -> bytes:
        commands = b"".join(map(pack, self._steps.pop(0))) if self._steps else b""
        self.num_taken += len(commands)
        return commands

    def send(self, message: object) -> None:
        if isinstance(message, Report):
            self.outputs.append(message.outputs)
            assert message.num_bytes == self.num_taken

    def wait(self, seconds: float) -> None:
        """Return at once: the next commands have come."""

    def close(self) -> None:
        assert not self._steps

    def of(self, request_id: int) -> list[Output]:
        """Return the outputs of a request."""
        return [output for step in self.outputs for output in step if output.request_id == request_id]


def submit(request_ids: list[int], prompt: list[int], salt: str = "", **params: Any) -> Submit:
    return Submit(
        request_ids, [0] * len(request_ids), pack_tokens(prompt), SamplingParams(max_new_tokens=3, **params), salt
    )


def run(engine: Engine, *steps: Sequence[Command]) -> Frontend:
    frontend: Any = Frontend(*steps)
    ServingLoop(engine, frontend).run()
    return frontend


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_a_malformed_command_ends_the_loop() -> None:
    """All ranks read the same bytes. It is no mistake of a user's, so it is no ValueError."""

    class Forging(Frontend):
        def take(self) -> bytes:
            return LENGTH.pack(3) + b"abc"

    frontend: Any = Forging()
    with pytest.raises(RuntimeError, match="serving failed"):
        ServingLoop(make_engine(200), frontend).run()


def test_choices_share_a_prompt_whose_blocks_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    requests: list[Request] = []

    def count(previous: bytes, token_ids: Sequence[int]) -> bytes:
        hashed.append(len(token_ids))
        return block_key(previous, token_ids)

    class Kept(Request):
        def __post_init__(self) -> None:
            super().__post_init__()
            requests.append(self)

    block_key = blocks_module.block_key
    monkeypatch.setattr(request_module, "block_key", count)
    monkeypatch.setattr(engine_module, "Request", Kept)
    frontend = run(make_engine(200), [submit([*range(16)], PROMPT)])
    assert hashed == [BLOCK] * 10
    assert len({id(request.prompt_token_ids) for request in requests}) == 1 < len(requests)
    assert all(tokens_of(frontend.of(request_id)) == alone(PROMPT, 3) for request_id in range(16))


def test_a_request_after_an_abort_is_not_waited_with() -> None:
    """A step of the aborted request is under way when it comes, whose message has left without its command."""

    class Watching(Frontend):
        """A frontend that counts the waits while a request that has come is not answered."""

        num_late = 0

        def wait(self, seconds: float) -> None:
            has_come, is_answered = len(self._steps) <= num_left, bool(self.of(1))
            self.num_late += has_come and not is_answered

    num_left = 2  # lists of commands after the one that brings the request
    for num_steps in range(5):
        for num_between in range(3):
            between: list[list[Command]] = [[] for _ in range(num_between)]
            steps = [[submit([0], PROMPT)], *([] for _ in range(num_steps)), [Abort([0])], *between]
            frontend: Any = Watching(*steps, [submit([1], PROMPT[:9])], [])
            ServingLoop(make_engine(200), frontend).run()
            assert tokens_of(frontend.of(1)) == alone(PROMPT[:9], 3)
            assert not frontend.num_late, (num_steps, num_between)


def test_salts_part_clients() -> None:
    steps: list[list[Command]] = []
    for number, salt in enumerate(["", "a", "b", "a", ""]):
        steps += [[submit([number], PROMPT, salt)], *([] for _ in range(8))]
    frontend = run(make_engine(200), *steps)
    assert [frontend.of(number)[0].num_cached_tokens for number in range(5)] == [0, 0, 0, 10 * BLOCK, 10 * BLOCK]


def test_log_probabilities_leave_with_the_step_that_computes_them() -> None:
    engine = make_engine(200, max_num_batched_tokens=8)
    frontend: Any = Frontend([submit([0], PROMPT, prompt_logprobs=2, logprobs=1)])
    loop = ServingLoop(engine, frontend)
    num_kept: list[int] = []
    report = loop._report

    def check() -> None:
        report()
        num_kept.extend(len(r.prompt_logprobs) + len(r.logprobs) for r in loop._requests.values())

    loop._report = check  # type: ignore[method-assign]
    loop.run()
    pieces = [len(output.prompt_logprobs) for output in frontend.of(0)]
    assert sum(pieces) == len(PROMPT)
    assert max(pieces) <= 9
    assert set(num_kept) == {0}
    assert [len(output.logprobs) for output in frontend.of(0) if output.token_ids] == [1] * len(alone(PROMPT, 3))
    entries = [entry for output in frontend.of(0) for entry in output.prompt_logprobs]
    assert [entry.token_id for entry in entries] == PROMPT
    assert {len(entry.top) for entry in entries[1:]} == {2}


def test_other_ranks_copy_no_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    num_parts: list[int] = []

    def give(self: Logprobs) -> None:
        num_parts.append(len(self._parts))
        original(self)

    original = Logprobs.give
    monkeypatch.setattr(Logprobs, "give", give)
    engine = make_engine(200, max_num_batched_tokens=8)
    loop = ServingLoop(engine, None)
    loop._follow(News(pack(submit([0], PROMPT, prompt_logprobs=2, logprobs=1))))
    (request,) = loop._requests.values()
    while engine.has_requests:
        engine.step()
    assert request.token_ids == alone(PROMPT, 3)
    assert request.logprobs == request.prompt_logprobs == []
    assert len(num_parts) > 5
    assert set(num_parts) == {0}


class NotFinite(HashModel):
    """A model whose logits are NaN after a prompt's token 5."""

    def hidden(self, token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        logits = super().hidden(token_ids, *args)
        return logits.fill_(torch.nan) if 5 in token_ids else logits


def test_an_error_of_a_request_is_sent() -> None:
    frontend = run(make_engine(200, model=NotFinite()), [submit([0], [5, 6]), submit([1], [30])])
    (output,) = frontend.of(0)
    assert (output.finish_reason, output.token_ids) == ("error", ())
    assert output.error.startswith("logits are NaN or infinite")
    (refused,) = frontend.of(1)
    assert (refused.finish_reason, refused.error) == (None, "prompt has token id 30; the model's vocabulary is [0, 30)")


def test_all_tokens_of_a_step_are_sent() -> None:
    """Drafts that are accepted bring several at once."""
    frontend: Any = object()
    loop = ServingLoop(make_engine(20), frontend)
    request = Request([1, 2], SamplingParams(max_new_tokens=9, prompt_logprobs=0), request_id=3)
    loop._requests[3] = request
    for num_tokens, reason in ((1, None), (4, None), (6, "length")):
        request.token_ids = [5] * num_tokens
        request.finish_reason = reason
        loop._collect(request)
    assert [(output.num_tokens, len(output.prompt_logprobs)) for output in loop._outputs] == [(1, 1), (3, 0), (2, 0)]


def submit_long(request_id: int, prompt: list[int], num_new: int, **params: Any) -> Submit:
    return Submit(
        [request_id], [0], pack_tokens(prompt), SamplingParams(max_new_tokens=num_new, ignore_eos=True, **params)
    )


def test_a_request_waits_for_a_front_that_does_not_look_others_do_not() -> None:
    """Until it hears that no stop string ends in the tokens; the report says how many wait."""
    num_new = MAX_UNSEEN_TOKENS + 30
    engine = make_engine(200, tokenizer=Letters())
    unseen: list[int] = []

    class Slow(Frontend):
        def send(self, message: object) -> None:
            super().send(message)
            if isinstance(message, Report):
                unseen.append(message.num_unseen)

    begin = [submit_long(0, [1, 2], num_new, stop=("?",)), submit_long(1, [3], num_new)]
    steps: list[list[Command]] = [begin, *([] for _ in range(2 * num_new)), [Seen({0: MAX_UNSEEN_TOKENS})]]
    frontend: Any = Slow(*steps, *([] for _ in range(40)))
    ServingLoop(engine, frontend).run()
    ends = [
        next(at for at, outputs in enumerate(frontend.outputs) for each in outputs if each == frontend.of(number)[-1])
        for number in (0, 1)
    ]
    before_news = [output for outputs in frontend.outputs[: 2 * num_new] for output in outputs]
    assert len(tokens_of([output for output in before_news if output.request_id == 0])) == MAX_UNSEEN_TOKENS
    assert ends[1] < 2 * num_new < ends[0]
    assert max(unseen) == MAX_UNSEEN_TOKENS
    assert tokens_of(frontend.of(0)) == alone_ignoring_eos([1, 2], num_new)
    assert tokens_of(frontend.of(1)) == alone_ignoring_eos([3], num_new)


@pytest.mark.parametrize("delay", [BLOCK + 4, 30, 60])
def test_tokens_after_a_stop_string_leave_no_trace(delay: int) -> None:
    """Not in counts, nor in blocks that others find, however late the news is."""
    prompt, num_kept = PROMPT[: 2 * BLOCK + 1], BLOCK + 1
    later = [*prompt, *alone_ignoring_eos(prompt, 2 * BLOCK)]
    engine = make_engine(400, tokenizer=Letters())
    steps: list[list[Command]] = [[submit_long(0, prompt, 90, stop=("?",))], *([] for _ in range(delay))]
    frontend = run(engine, *steps, [Stop(0, num_kept)])
    assert (engine.stats.num_new_tokens, engine.stats.num_finished) == (num_kept, 1)
    assert (engine.allocator.num_free, engine.allocator.num_remembered) == (400, 3)
    assert frontend.of(0)[-1].finish_reason is None  # the front has ended it
    assert run(engine, [submit_long(1, later, 2)]).of(1)[0].num_cached_tokens == 3 * BLOCK


def test_a_stop_string_may_come_too_late() -> None:
    """The request has ended by itself meanwhile, or its client has left."""
    engine = make_engine(200, tokenizer=Letters())
    late: list[list[Command]] = [[submit_long(0, [1, 2], 4, stop=("?",))], *([] for _ in range(9)), [Stop(0, 2)]]
    frontend = run(engine, *late, [Seen({0: 2, 5: 3}), Stop(9, 1)])
    assert tokens_of(frontend.of(0)) == alone_ignoring_eos([1, 2], 4)
    assert frontend.of(0)[-1].finish_reason == "length"
    assert engine.allocator.num_free == 200


@pytest.mark.parametrize("num_kept", [3, 7])
def test_at_most_two_steps_follow_a_stop_string(num_kept: int) -> None:
    """If the front answers each report before the next step."""
    params = SamplingParams(stop=(Letters().decode(alone_ignoring_eos([1, 2], num_kept)),))
    text, num_sent = RequestText(Letters(), params, [1, 2]), list[int]()

    class Keen(Frontend):
        news = b""

        def take(self) -> bytes:
            packed, self.news = super().take() + self.news, b""
            return packed

        def send(self, message: object) -> None:
            for output in message.outputs if isinstance(message, Report) else ():
                num_sent.append(len(output.token_ids))
                if len(num_sent) <= num_kept and text.read(output).finish_reason:
                    self.news = pack(Stop(0, text.stream.num_tokens))

    frontend: Any = Keen([submit_long(0, [1, 2], 20, stop=params.stop)], *([] for _ in range(30)))
    ServingLoop(make_engine(200, tokenizer=Letters()), frontend).run()
    assert num_kept < sum(num_sent) <= num_kept + 2
