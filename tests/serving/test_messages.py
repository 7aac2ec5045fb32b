"""Commands of the HTTP process: what they say, how many bytes they have, and where they wait."""

import json
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.messages import LENGTH, Abort, Close, Command, Seen, Stop, Submit, pack_command, unpack_commands
from dcpmla.serving.outbox import WINDOW, Outbox
from dcpmla.serving.transfer_messages import Connect, Disconnect, First, Lose, Move, Pull

PARAMS = SamplingParams(
    max_new_tokens=7,
    temperature=0.3,
    seed=(1 << 64) - 1,
    stop=("a", "\ud800\u00fc"),
    stop_token_ids=(3, 4),
    logit_bias={5: -100.0, 9: 0.5},
    min_tokens=2,
    ignore_eos=True,
    logprobs=3,
    prompt_logprobs=0,
)


class Wire:
    """A writer that keeps the bytes."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, packed: bytes) -> None:
        self.sent += packed


def test_commands_are_read_as_they_were_sent() -> None:
    commands: list[Command] = [
        Submit([4, 5], [1, (1 << 64) - 1], [0, (1 << 31) - 1, 7], PARAMS, "salt \ud800"),
        Abort([4]),
        Stop(5, 17),
        Seen([6, 8], [16, 33]),
        Submit([6], [0], [1], SamplingParams()),
        Submit([7], [0], [1], PARAMS, move=Move("h")),
        Submit([8], [0], [1], PARAMS, move=Move("", ("engine", "h"), TokenLogprobs(3, -0.5, ((3, -0.5), (4, -1.0))))),
        Connect("engine", {"tp_size": 2, "tokens": [["latents", 0, 64, 16, 1, False]]}, ["AAAA", "AQID"]),
        Disconnect("engine"),
        Pull(8, "engine", "h"),
        First(8, TokenLogprobs(3, None, ())),
        Lose(8, True),
        Close(),
    ]
    assert [*unpack_commands(b"".join(pack_command(command) for command in commands))] == commands


def test_a_prompt_has_four_bytes_a_token_however_many_choices_it_has() -> None:
    prompt = list(range(100_000, 260_000))
    one, many = (len(pack_command(Submit([1] * n, [1 << 63] * n, prompt, PARAMS))) for n in (1, 128))
    assert one < 4 * len(prompt) + 1000
    assert many < one + 128 * 30


class Attack:
    """An object whose pickle writes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_no_command(tmp_path: Path) -> None:
    """In place of the whole command, of its JSON, and of its tokens."""
    code = pickle.dumps(Attack(tmp_path / "touched"))
    header = json.dumps({"kind": "Submit", **vars(Submit([1], [1], [], PARAMS)), "params": {}}, default=str).encode()
    bodies = [code, LENGTH.pack(len(code))[:4] + code, LENGTH.pack(len(header))[:4] + header + code]
    for body in bodies:
        with suppress(ValueError, TypeError, KeyError, struct.error):
            list(unpack_commands(LENGTH.pack(len(body)) + body))
    assert not (tmp_path / "touched").exists()
    pickle.loads(code)
    assert (tmp_path / "touched").exists()


def test_requests_that_are_dropped_leave_the_queue() -> None:
    """Fifty times a prompt of a megabyte, and no rank takes a command meanwhile."""
    wire: Any = Wire()
    outbox, prompt = Outbox(wire), [7] * (1 << 18)
    for number in range(50):
        outbox.submit(Submit([2 * number, 2 * number + 1], [0, 0], prompt, PARAMS))
        outbox.abort([2 * number, 2 * number + 1])
    assert len(wire.sent) < WINDOW + 4 * len(prompt) + 2000
    assert not outbox._waiting
    sent = [*unpack_commands(wire.sent)]
    submitted = {request_id for command in sent if isinstance(command, Submit) for request_id in command.request_ids}
    aborted = {request_id for command in sent if isinstance(command, Abort) for request_id in command.request_ids}
    assert submitted == aborted == set(range(len(submitted)))
    outbox.submit(Submit([100], [0], [1], PARAMS))
    outbox.take(len(wire.sent))
    assert [*unpack_commands(wire.sent)][-1] == Submit([100], [0], [1], PARAMS)


def test_submissions_wait_while_the_ranks_take_none_and_keep_their_order() -> None:
    wire: Any = Wire()
    outbox, prompt = Outbox(wire), [7] * WINDOW  # each alone is more than the limit
    for number in range(4):
        outbox.submit(Submit([number], [0], [number, *prompt], PARAMS))
    outbox.abort([2])
    orders = []
    for _ in range(4):
        orders.append([command.request_ids[0] for command in unpack_commands(wire.sent) if isinstance(command, Submit)])
        outbox.take(len(wire.sent))
    assert orders == [[0], [0, 1], [0, 1, 3], [0, 1, 3]]
