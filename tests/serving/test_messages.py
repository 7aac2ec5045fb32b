"""Messages between the HTTP process and the ranks: what they say, how many bytes they have, and where they wait."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.messages import (
    LENGTH,
    Abort,
    Command,
    Connect,
    Drain,
    Message,
    Move,
    Output,
    RanksMessage,
    Stop,
    Submit,
    pack,
    pack_tokens,
    unpack,
    unpack_commands,
)
from dcpmla.serving.outbox import WINDOW, Outbox
from dcpmla.transfer.layout import CacheLayout, StateSpec, TokenSpec

PARAMS = SamplingParams(
    max_new_tokens=7,
    temperature=0.3,
    seed=(1 << 64) - 1,
    stop=("a", "\u00fc"),
    stop_token_ids=(3, 4),
    logit_bias={5: -100.0, 9: 0.5},
    min_tokens=2,
    ignore_eos=True,
    logprobs=3,
    prompt_logprobs=0,
)
LAYOUT = CacheLayout(
    2, 1, 1, (TokenSpec("latents", 0, 64, 16, 1, False),), (StateSpec("s", 8, 4, 1, 2),), (("dtype", "bf16"),)
)
JOB = Connect("engine", LAYOUT, [bytes(3), b"\xff"])


def new_outbox() -> tuple[Outbox, bytearray]:
    """Return an outbox and the bytes that it has sent."""
    sent = bytearray()
    writer: Any = SimpleNamespace(write=sent.extend)
    return Outbox(writer), sent


SUBMIT = Submit([4, 5], [1, (1 << 64) - 1], pack_tokens([0, (1 << 31) - 1, 7]), PARAMS, "salt \u00fc\0")

st.register_type_strategy(CacheLayout, st.just(LAYOUT))
st.register_type_strategy(
    SamplingParams,
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 1 << 31),
        temperature=st.floats(0, 10),
        seed=st.integers(0, (1 << 64) - 1),
        stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
        grammar=st.none() | st.builds(Grammar, st.just("choice"), st.just('["a"]'), st.just((5,))),
        logit_bias=st.dictionaries(st.integers(0, 1 << 31), st.floats(-100, 100), max_size=3),
        logprobs=st.none() | st.integers(0, 20),
    ),
)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of messages, or of parts of them, with all their fields."""
    fields = kind._fields if issubclass(kind, tuple) else kind.__struct_fields__
    return st.builds(kind, **dict.fromkeys(fields, ...))


for part in (Output, Move):
    st.register_type_strategy(part, any_of(part))


def packed_of(message: Message) -> bytes:
    """Return a message as it travels; numbers that no message has are left out."""
    assume("nan" not in repr(message))
    try:
        return pack(message)
    except OverflowError:
        reject()


@given(st.one_of(*map(any_of, get_args(Command))))
def test_any_command_is_read_as_it_was_sent(command: Command) -> None:
    """A text of both has the types of lists and tuples, too: outputs are joined, and parameters compared."""
    read = [*unpack_commands(packed_of(command) * 2)]
    assert read == [command] * 2
    assert repr(read) == repr([command] * 2)


@given(st.one_of(*map(any_of, get_args(RanksMessage))))
def test_any_report_is_read_as_it_was_sent(message: RanksMessage) -> None:
    read = unpack(packed_of(message)[LENGTH.size :])
    assert read == message
    assert repr(read) == repr(message)


def test_a_prompt_has_four_bytes_a_token_however_many_choices_it_has() -> None:
    prompt = pack_tokens(list(range(100_000, 260_000)))
    one, many = (len(pack(Submit([1] * n, [1 << 63] * n, prompt, PARAMS))) for n in (1, 128))
    assert one < 4 * 160_000 + 1000
    assert many < one + 128 * 30


def forged(command: Message, **changes: Any) -> bytes:
    """Return a command with other fields, as it travels."""
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(msgspec.msgpack.encode(command)), **changes})
    return LENGTH.pack(len(body)) + body


def malformed() -> Iterator[tuple[bytes, str]]:
    """Yield commands that the HTTP process never sends, and words of their refusals."""
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(PARAMS))
    yield forged(SUBMIT, params={**params, "temperature": -1}), "temperature"
    yield forged(SUBMIT, params={**params, "seed": 1 << 63, "min_tokens": 8}), "min_tokens is 8"
    yield forged(SUBMIT, params={**params, "grammar": {"kind": "code", "text": "a"}}), "grammar.kind"
    yield forged(SUBMIT, prompt=[1, 2]), "Expected `bytes`, got `array`"
    yield forged(SUBMIT, prompt="text"), "Expected `bytes`, got `str`"
    yield forged(SUBMIT, move=["h", "engine"]), "move"
    yield forged(SUBMIT, more=1), "unknown field"
    yield forged(SUBMIT, type="System"), "Invalid value 'System'"
    yield forged(Drain()), "Invalid value 'Drain'"
    yield forged(JOB, layout={**JOB.json_fields()["layout"], "dcp_size": 3}), "dcp_size 3 does not divide"
    yield forged(Stop(1, 2), num_tokens=None), "num_tokens"
    whole = pack(SUBMIT)
    yield LENGTH.pack(len(whole) - LENGTH.size - 1) + whole[LENGTH.size : -1], "truncated"
    yield LENGTH.pack(5) + b"\xdd\xff\xff\xff\xff", "Expected `object`, got `array`"
    yield forged(SUBMIT, seeds=[b"\x80\x05K\x01."]), "Expected `int`, got `bytes`"  # a pickle


@pytest.mark.parametrize(("packed", "words"), [*malformed()])
def test_a_malformed_command_is_refused(packed: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(unpack_commands(packed))


def test_jobs_with_other_fields_are_refused() -> None:
    fields = JOB.json_fields()
    assert Connect.of(fields) == JOB
    for wrong in ({**fields, "layout": {**fields["layout"], "more": 1}}, {**fields, "more": 1}):
        with pytest.raises(ValueError, match="more"):
            Connect.of(wrong)


def test_requests_that_are_dropped_leave_the_queue() -> None:
    """Fifty times a prompt of a megabyte, and no rank takes a command meanwhile."""
    (outbox, written), prompt = new_outbox(), pack_tokens([1 << 20] * (1 << 18))
    for number in range(50):
        outbox.submit(Submit([2 * number, 2 * number + 1], [0, 0], prompt, PARAMS))
        outbox.abort([2 * number, 2 * number + 1])
    assert len(written) < WINDOW + len(prompt) + 2000
    assert not outbox._waiting
    sent = [*unpack_commands(bytes(written))]
    submitted = {request_id for command in sent if isinstance(command, Submit) for request_id in command.request_ids}
    aborted = {request_id for command in sent if isinstance(command, Abort) for request_id in command.request_ids}
    assert submitted == aborted == set(range(len(submitted)))
    last = Submit([100], [0], pack_tokens([1]), PARAMS)
    outbox.submit(last)
    outbox.take(len(written))
    assert [*unpack_commands(bytes(written))][-1] == last


def test_submissions_wait_while_the_ranks_take_none_and_keep_their_order() -> None:
    (outbox, written), prompt = new_outbox(), bytes(WINDOW)  # each alone is more than the limit
    for number in range(4):
        outbox.submit(Submit([number], [0], pack_tokens([number]) + prompt, PARAMS))
    outbox.abort([2])
    orders = []
    for _ in range(4):
        orders.append(
            [command.request_ids[0] for command in unpack_commands(bytes(written)) if isinstance(command, Submit)]
        )
        outbox.take(len(written))
    assert orders == [[0], [0, 1], [0, 1, 3], [0, 1, 3]]
