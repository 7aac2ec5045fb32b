"""Faults of either server: which transfers fail, for which reason, and what goes on."""

import logging
from random import Random

import pytest
import torch

from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.messages import Complete, Open, Ready, Taken, encode
from dcpmla.transfer.outgoing import Outgoing
from tests.support.fake_transport import Clock, Network
from tests.support.plain_cache import Content, new_layout
from tests.support.transfer_jobs import LEASE, MOST_TOKENS, SILENCE, Job, Prompt, connect

NUM_SLOTS = 4


class Pair:
    """A prefill server and decode servers without random layouts."""

    def __init__(self, clock: Clock, prefill: tuple[int, ...] = (1, 1), *decoders: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.clock, self.random = clock, Random(0)
        self.network = Network(self.random)
        layouts = [new_layout(*sizes, 1, 2) for sizes in [prefill, *(decoders or [(1, 1)])]]
        self.prefill = Job(Outgoing, "p", layouts[0], self.network, NUM_SLOTS)
        self.decoders = [
            Job(Incoming, f"d{number}", layout, self.network, NUM_SLOTS) for number, layout in enumerate(layouts[1:])
        ]
        self.decode = self.decoders[0]
        for decoder in self.decoders:
            connect(self.prefill, decoder)

    def poll(self, number: int = 40) -> None:
        for _ in range(number):
            for job in (self.prefill, *self.decoders):
                for rank in range(job.layout.tp_size):
                    job.poll(rank)
            self.clock.now += 0.01

    def pass_time(self, seconds: float) -> None:
        """Let time pass in steps in which all ranks poll."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.poll(2)

    def prompt(self, name: str, decode: Job | None = None) -> Prompt:
        prompt = Prompt(name, self.prefill, decode or self.decode, self.random)
        while prompt.content.num_tokens != MOST_TOKENS:
            prompt.content = Content.of(self.prefill.layout, self.random.getrandbits(32), MOST_TOKENS)
        prompt.start, prompt.num_tokens = 0, MOST_TOKENS
        return prompt


@pytest.fixture
def pair(clock: Clock) -> Pair:
    return Pair(clock)


def send_all(prompt: Prompt) -> None:
    while prompt.num_computed < prompt.num_tokens:
        prompt.compute()
    prompt.finish()


def reasons(prompt: Prompt) -> list[str]:
    assert all(arrival.is_done and arrival.has_failed for arrival in prompt.got.arrivals)
    return [arrival.reason for arrival in prompt.got.arrivals]


def failures(prompt: Prompt) -> list[str]:
    assert all(handoff.is_done and handoff.has_failed for handoff in prompt.handoffs)
    return [handoff.reason for handoff in prompt.handoffs]


def arrive(pair: Pair, prompt: Prompt) -> None:
    """Let a prompt arrive as a whole."""
    pair.poll(400)
    prompt.end_arrival()
    assert prompt.has_arrived, [arrival.reason for arrival in prompt.got.arrivals]
    prompt.end_handoff()


def hand_over(pair: Pair, prompt: Prompt) -> None:
    prompt.open()
    send_all(prompt)
    arrive(pair, prompt)


def test_nobody_asks(pair: Pair) -> None:
    prompt = pair.prompt("h")
    send_all(prompt)
    pair.pass_time(LEASE - 4)
    assert not prompt.handoffs[0].is_done
    pair.pass_time(12)
    assert failures(prompt) == ["a decode server asked for nothing in 40 s"]
    prompt.open()
    pair.poll()
    assert reasons(prompt) == ["p/0: a decode server asked for nothing in 40 s"]


def test_a_request_that_waits_for_room_keeps_the_lease(pair: Pair) -> None:
    prompt = pair.prompt("h")
    send_all(prompt)
    for _ in range(2 * int(LEASE)):
        pair.decode.sides[0].touch("p", "h")
        pair.pass_time(1)
    prompt.open()
    arrive(pair, prompt)


def test_a_handoff_that_is_not_needed(pair: Pair) -> None:
    prompt = pair.prompt("h")
    send_all(prompt)
    for side in pair.decode.sides:
        side.decline("p", "h")
    pair.poll(3)
    assert all("gave it up" in reason for reason in failures(prompt))


def test_an_arrival_waits_for_a_slow_prompt(pair: Pair) -> None:
    prompt = pair.prompt("h")
    prompt.open()
    pair.poll()
    prompt.compute()
    pair.pass_time(3 * LEASE)
    send_all(prompt)
    arrive(pair, prompt)


def test_a_handoff_that_never_begins(pair: Pair) -> None:
    prompt = pair.prompt("h")
    prompt.open()
    pair.pass_time(LEASE + 8)
    assert reasons(prompt) == ["p/0: it did not begin in 40 s"]


def test_a_request_before_the_connection(clock: Clock) -> None:
    pair = Pair(clock)
    late = Job(Incoming, "late", new_layout(2, 2, 1), pair.network, NUM_SLOTS)
    pair.decoders.append(late)
    for side in late.sides:
        side.connect(pair.prefill.peer)
    prompt = pair.prompt("h", late)
    prompt.open()
    send_all(prompt)
    pair.poll()
    assert not any(arrival.is_done for arrival in prompt.got.arrivals)
    pair.prefill.sides[0].connect(late.peer)
    arrive(pair, prompt)


def test_a_server_that_is_not_connected(pair: Pair) -> None:
    arrival = pair.decode.sides[0].open("q", "h", 0, 4, [0], 0)
    pair.poll()
    assert arrival.has_failed
    assert arrival.reason == "handoff h of prefill server q is not connected"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_decode_rank_is_lost(clock: Clock, is_known: bool) -> None:
    """Its job's other rank learns of it, and another job goes on meanwhile, because slots are left. The job comes back
    under another name.
    """
    pair = Pair(clock, (1, 1), (2, 2), (1, 1))
    prompts = [pair.prompt(f"h{number}") for number in range(4)]
    for prompt in prompts:
        prompt.open()
        prompt.compute()
    pair.poll(3)
    pair.network.lost.add("d0/0")
    for number in range(3):
        hand_over(pair, pair.prompt(f"other{number}", pair.decoders[1]))
    if is_known:
        pair.prefill.sides[0].disconnect("d0")
        pair.poll()
        again = Job(Incoming, "d0-again", pair.decode.layout, pair.network, NUM_SLOTS)
        pair.decoders.append(again)
        connect(pair.prefill, again)
        hand_over(pair, pair.prompt("again", again))
        assert [failures(prompt) for prompt in prompts] == [["decode server d0 is disconnected"]] * 4
    else:
        pair.pass_time(LEASE + 8)
        assert all(failures(prompt) and prompt.got.arrivals[1].has_failed for prompt in prompts)
    assert pair.prefill.sides[0]._staging.num_free == NUM_SLOTS


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prefill_rank_is_lost(clock: Clock, is_known: bool) -> None:
    pair = Pair(clock, (2, 2), (1, 1))
    prompt = pair.prompt("h")
    prompt.open()
    prompt.compute()
    pair.poll(2)
    pair.network.lost.add("p/1")
    if is_known:
        pair.decode.sides[0].disconnect("p")
        pair.poll()
        assert reasons(prompt) == ["prefill server p is disconnected"]
        assert "gave it up" in prompt.handoffs[0].reason
    else:
        pair.pass_time(SILENCE + 8)
        assert "p/1" in reasons(prompt)[0]
    assert pair.decode.sides[0]._staging.num_free == NUM_SLOTS


def test_a_stopped_decode_server_wakes_after_its_slots_hold_other_content(clock: Clock) -> None:
    pair = Pair(clock, (1, 1), (1, 1), (1, 1))
    pair.decode.sides[0]._patience = 10 * LEASE  # the tags alone help
    prompt = pair.prompt("h")
    prompt.open()
    pair.poll(1)
    pair.decode.stopped = True
    send_all(prompt)
    pair.poll(3)
    assert pair.prefill.sides[0]._staging.num_free < NUM_SLOTS
    pair.pass_time(LEASE + 8)
    assert failures(prompt) == ["rank 0 of decode server d0 asked for nothing in 40 s"]
    for number in range(3):
        hand_over(pair, pair.prompt(f"other{number}", pair.decoders[1]))
    # The offers arrive, and the message that it is closed does not.
    inbox = pair.network.transports["d0/0"].inbox
    for message in [message for message in inbox if b"closed" in message[1]]:
        inbox.remove(message)
    pair.decode.stopped = False
    pair.decode.sides[0].poll()
    pair.network.random = Random(1)
    for _ in range(20):
        pair.decode.poll(0)
    assert "was used again before it was read" in reasons(prompt)[0]


def test_a_prompt_of_another_length(pair: Pair) -> None:
    prompt = pair.prompt("h")
    prompt.open()
    prompt.num_tokens = 30
    send_all(prompt)
    pair.poll()
    assert "the prompt has 30 tokens, and 40 were asked for" in reasons(prompt)[0]
    assert "the prompt has 30 tokens" in failures(prompt)[0]


def test_replicas_without_rows_end_too(clock: Clock) -> None:
    pair = Pair(clock, (4, 1), (2, 2))
    prompt = pair.prompt("h")
    hand_over(pair, prompt)
    num_bytes = [handoff.num_bytes for handoff in prompt.handoffs]
    assert sorted(num_bytes)[:2] == [0, 0]
    assert sum(num_bytes) == sum(arrival.num_bytes for arrival in prompt.got.arrivals) > 0


@pytest.mark.parametrize("is_reserved", [False, True])
def test_a_handoff_is_read_by_one_server(clock: Clock, is_reserved: bool) -> None:
    """By the one for which it is; else by the first one that asks."""
    pair = Pair(clock, (1, 1), (1, 1), (1, 1))
    own, other = (pair.prompt("h", pair.decoders[number ^ is_reserved]) for number in range(2))
    first, second = (other, own) if is_reserved else (own, other)
    first.open()
    if is_reserved:
        own.handoffs = [side.begin("h", "d1") for side in pair.prefill.sides]
    pair.poll(10)
    second.open()
    own.compute()
    pair.poll()
    assert reasons(other) == ["p/0: another decode server reads it"]
    send_all(own)
    arrive(pair, own)


def test_a_handoff_for_one_server_that_does_not_ask(pair: Pair) -> None:
    prompts = [pair.prompt(name) for name in ("h0", "h1")]
    for prompt, reader in zip(prompts, ("d0", "stranger"), strict=True):
        prompt.handoffs = [side.begin(prompt.name, reader) for side in pair.prefill.sides]
    pair.poll(3)
    assert failures(prompts[1]) == ["decode server stranger is not connected"]
    send_all(prompts[0])
    pair.pass_time(LEASE + 8)
    assert failures(prompts[0]) == ["rank 0 of decode server d0 asked for nothing in 40 s"]


def test_wrong_messages_are_ignored_and_logged_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    prompt = pair.prompt("h")
    prompt.open()
    prompt.compute()
    pair.poll(2)
    deep = b"[" * 5000
    wrong = [b"", b"[]", b"{}", b'["open"]', b'["open", 1, 2, 3, 4]', b'["no", "h"]', b"\xff", deep]
    wrong += [b'["touch", "h", 1]']
    wrong += [b'["taken", "h", -1, 0]', b'["open", "h", true, 1, 1]']
    for inbox in (pair.network.transports["p/0"].inbox, pair.network.transports["d0/0"].inbox):
        for sender in ("d0/0", "p/0", "x", "", "d0/x"):
            inbox.extend((sender, message) for message in wrong)
            inbox.append((sender, encode(Taken("h", 1, 999))))
            inbox.append((sender, encode(Taken("x", 1, 999))))
        inbox.append(("stranger/7", encode(Open("h", 0, 10, 1000))))
        inbox.append(("stranger/7", encode(Complete("h"))))
        inbox.append(("d0/0", encode(Complete("h"))))
    with caplog.at_level(logging.WARNING):
        send_all(prompt)
        arrive(pair, prompt)
    assert 0 < len(caplog.records) < 20


@pytest.mark.parametrize(
    "message",
    [
        Ready("h", 0, 4, 1, 64, 0, 0),
        Ready("h", 4, 4, 0, 64, 0, 0),
        Ready("h", 0, 4, 0, 1 << 20, 0, 0),
        Ready("h", 0, 99, 0, 64, 0, 0),
        Ready("h", 3, 9, 0, 64, 0, 0),
        Ready("h", 0, 4, 0, 64, 99, 0),
        Complete("h"),
    ],
)
def test_a_prefill_rank_that_breaks_the_rules(pair: Pair, message: Ready | Complete) -> None:
    prompt = pair.prompt("h")
    prompt.open()
    pair.poll(2)
    pair.network.transports["d0/0"].inbox.append(("p/0", encode(message)))
    pair.poll()
    assert reasons(prompt)[0]
    prompt.end_arrival()
    pair.decode.check_free_blocks()
    assert pair.decode.sides[0]._staging.num_free == NUM_SLOTS


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_an_error_of_a_copy_fails_one_transfer(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = (pair.prefill if kind == "gather" else pair.decode).sides[0]._mover
    prompts = [pair.prompt("h0"), pair.prompt("h1")]
    for prompt in prompts:
        prompt.open()

    def fail(*args: object) -> None:
        raise RuntimeError("no such block")

    with monkeypatch.context() as context:
        context.setattr(mover, kind, fail)
        prompts[0].compute()
        pair.poll()
    assert "RuntimeError: no such block" in reasons(prompts[0])[0]
    assert failures(prompts[0])
    send_all(prompts[1])
    arrive(pair, prompts[1])


def test_layouts_that_differ(pair: Pair) -> None:
    other = Job(Incoming, "d1", new_layout(1, 1, 1, row=32), pair.network, NUM_SLOTS)
    with pytest.raises(ValueError, match="row"):
        pair.prefill.sides[0].connect(other.peer)
    with pytest.raises(ValueError, match="row"):
        other.sides[0].connect(pair.prefill.peer)
    with pytest.raises(ValueError, match="agents of engine p are 0; it has 1 ranks"):
        pair.decode.sides[0].connect(pair.prefill.peer._replace(agents=[]))


def test_closing_ends_everything(pair: Pair) -> None:
    prompts = [pair.prompt("h0"), pair.prompt("h1")]
    for prompt in prompts:
        prompt.open()
        prompt.compute()
    pair.poll(2)
    pair.prefill.sides[0].close()
    assert failures(prompts[0]) == failures(prompts[1]) == ["this server stops"]
    pair.decode.sides[0].close()
    assert all(map(reasons, prompts))
