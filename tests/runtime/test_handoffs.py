"""Two engines: one prefills prompts for the other, whose requests get the tokens that they get alone."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.runtime import scheduler as scheduler_module
from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.progress import Progress
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engine_loads import Load, loads, serve
from tests.support.hash_model import BLOCK, alone, alone_ignoring_eos, drive, make_engine
from tests.support.random_model import TOKENIZER, RandomModel
from tests.support.transfer_jobs import still_transfers
from tests.support.two_engines import Pair, make_pair, run
from tests.support.wire import Wire


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts of a few tokens be worth another engine's work; transfers have no threads."""
    monkeypatch.setattr(scheduler_module, "_SHORT_TOKENS", 2)
    still_transfers(monkeypatch)


@given(
    load=loads(most=8, longest=40, latest=30, num_new=8, aborts=True),
    seed=st.integers(0, 1000),
    num_spare=st.sampled_from([1, 40]),
    share_failing=st.sampled_from([0.0, 0.05]),
    share_lost=st.sampled_from([0.0, 0.3]),
    with_graph=st.booleans(),
    num_host_blocks=st.sampled_from([0, 20]),
)
def test_every_request_gets_what_it_gets_alone(
    load: Load,
    seed: int,
    num_spare: int,
    share_failing: float,
    share_lost: float,
    with_graph: bool,
    num_host_blocks: int,
) -> None:
    blocks = 2 * [load.num_blocks + num_spare]
    options = {"with_graph": with_graph, "mixed": with_graph, "num_host_blocks": num_host_blocks}
    pair = make_pair(*blocks, share_failing, seed, **options)
    pair.share_lost = share_lost
    serve(pair.there, load, pair.step)
    run(pair)


def test_the_decoding_engine_computes_no_prompt() -> None:
    pair = make_pair()
    requests = [
        pair.there.add([index, 1, 2] * 9, SamplingParams(max_new_tokens=5, ignore_eos=True)) for index in range(4)
    ]
    run(pair)
    assert [request.token_ids for request in requests] == [alone_ignoring_eos([i, 1, 2] * 9, 5) for i in range(4)]
    assert pair.num_wanted == 4
    assert pair.there.stats.num_prefill_tokens == 0
    totals = pair.there.handoffs.received, pair.here.handoffs.sent
    # 27 rows of 8 bytes each, and padding to 16 bytes
    assert [(total.num_done, total.num_failed, total.bytes) for total in totals] == [(4, 0, 4 * 224)] * 2
    assert all(total.seconds > 0 for total in totals)


def test_others_decode_while_a_prompt_arrives() -> None:
    pair = make_pair()
    running = pair.there.add([5], SamplingParams(max_new_tokens=100, ignore_eos=True))
    pair.step(), pair.step()
    arriving = pair.there.add([7, 3] * 20, SamplingParams(max_new_tokens=3, ignore_eos=True))
    while not arriving.finish_reason:
        num_before = len(running.token_ids)
        pair.step()
        assert len(running.token_ids) == num_before + 1
    run(pair)
    assert arriving.token_ids == alone_ignoring_eos([7, 3] * 20, 3)
    assert running.token_ids == alone_ignoring_eos([5], 100)


@pytest.mark.parametrize(
    "own",
    [
        {"grammar": Grammar("regex", "[a-f]{2,5}(-[0-9]{1,3}){0,3}")},
        {"grammar": Grammar("choice", '["yes", "yes, but", "no"]')},
        {"temperature": 50.0, "seed": 5, "ignore_eos": True},
    ],
)
def test_grammars_and_draws_go_on_after_the_first_token(own: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=12, **own)
    options: dict[str, Any] = {"model": RandomModel({"}": 5.0}), "tokenizer": TOKENIZER}
    single, here, there = (make_engine(60, 16, **options) for _ in range(3))
    rng = Random(0)
    pair = Pair(here, there, Wire(here, there, rng), rng)
    requests = [engine.add([5, 6, 7] * 8, params) for engine in (single, there)]
    list(single.run())
    run(pair)
    assert requests[1].token_ids == requests[0].token_ids
    assert requests[1].text == requests[0].text != ""
    assert (pair.num_wanted, there.stats.num_prefill_tokens) == (1, 0)
    for engine in (single, here, there):
        engine.close()


def test_a_later_turn_pulls_only_what_is_new() -> None:
    pair = make_pair()
    first = pair.there.add([1, 2] * 10, SamplingParams(max_new_tokens=5, ignore_eos=True))
    run(pair)
    second = pair.there.add([*first.prompt_token_ids, *first.token_ids, 4, 4, 4, 4], SamplingParams(max_new_tokens=3))
    run(pair)
    assert (pair.wire.arrivals[1].start, pair.wire.arrivals[1].num_tokens) == (24, 29)
    assert second.num_cached_tokens == 24
    assert second.token_ids == alone(second.prompt_token_ids, 3)
    third = pair.there.add([*second.prompt_token_ids[:24], 1, 2], SamplingParams(max_new_tokens=3))
    run(pair)
    assert len(pair.wire.arrivals) == 2, "two tokens are computed here"
    assert third.token_ids == alone(third.prompt_token_ids, 3)


def test_choices_share_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others find all full blocks, and compute the other tokens."""
    monkeypatch.setattr(scheduler_module, "_SHORT_TOKENS", BLOCK)
    pair = make_pair()
    prompt = pair.there.prompt([1, 2] * 10)
    requests = [pair.there.add(prompt, SamplingParams(max_new_tokens=4, ignore_eos=True)) for _ in range(3)]
    run(pair)
    assert pair.num_wanted == 1
    assert all(request.token_ids == alone_ignoring_eos([1, 2] * 10, 4) for request in requests)


def test_a_router_brings_the_first_token() -> None:
    """The other engine has prefilled a prompt, and holds its blocks until there is room here."""
    pair = make_pair(num_blocks=10)
    prompt = [6, 2] * 9
    prefill = pair.here.add(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True), handoff="by hand")
    (finished,) = pair.here.run()
    assert finished is prefill
    assert pair.here.has_transfers
    running = pair.there.add([5], SamplingParams(max_new_tokens=22, ignore_eos=True))
    for _ in range(20):
        pair.there.step()
    source = "prefill", "by hand"
    request = pair.there.add(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True), source=source)
    for _ in range(2):  # The second one is not appended.
        pair.there.take_first(request, prefill.token_ids[0])
    events = pair.there.step()
    assert request in events.changed
    ((engine, name),) = pair.wire.touched  # it waits for room
    assert (engine, name.partition(".")[0]) == source
    run(pair)
    assert request.token_ids == alone_ignoring_eos(prompt, 9)
    assert running.token_ids == alone_ignoring_eos([5], 22)
    assert (pair.num_wanted, pair.there.stats.num_prefill_tokens) == (0, 1)
    again = pair.there.add(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True))
    run(pair)
    assert (again.token_ids, pair.num_wanted) == (request.token_ids, 0)
    assert again.num_cached_tokens >= BLOCK


@pytest.mark.parametrize(
    ("prompt", "salts"),
    [
        ([6, 2] * 8 + [6, 3], ("", "")),  # the first blocks are those of the other prompt
        ([6, 2] * 8 + [6, 3], ("a", "a")),
        ([5, 2] + [6, 2] * 8, ("", "")),
        ([6, 2] * 9, ("a", "")),
        ([6, 2] * 9, ("", "a")),
        ([6, 2] * 9, ("a", "b")),
    ],
)
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_handoff_of_another_prompt_or_salt_brings_no_rows(
    prompt: list[int], salts: tuple[str, str], is_cached: bool
) -> None:
    """Whoever names it, nothing is read or remembered, and the one whose prompt it is gets it afterwards."""
    pair, own = make_pair(), [6, 2] * 9
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    if is_cached:  # so that only the last blocks are missing
        pair.there.add(pair.there.prompt(prompt[:12], salts[1]), SamplingParams(max_new_tokens=1))
        run(pair)
    prefill = pair.here.add(pair.here.prompt(own, salts[0]), params, handoff="by hand")
    list(pair.here.run())
    before = len(pair.wire.arrivals)
    forged = pair.there.add(pair.there.prompt(prompt, salts[1]), params, source=("prefill", "by hand"))
    for _ in range(20):
        pair.there.step()
        pair.wire.advance()
    assert [arrival.is_done for arrival in pair.wire.arrivals[before:]] == [False]
    assert not forged.token_ids
    num_wanted = pair.num_wanted
    pair.there.handoffs.lose(forged, True)
    later = pair.there.add(pair.there.prompt(prompt, salts[1]), params)
    right = pair.there.add(pair.there.prompt(own, salts[0]), params, source=("prefill", "by hand"))
    pair.there.take_first(right, prefill.token_ids[0])
    run(pair)
    assert [request.token_ids for request in (forged, later)] == [alone_ignoring_eos(prompt, 5)] * 2
    assert pair.num_wanted == num_wanted, "the first one is computed here, and the other one shares its blocks"
    assert right.token_ids == alone_ignoring_eos(own, 5)


def test_readers_are_known_until_they_have_read() -> None:
    pair, prompt = make_pair(), [6, 2] * 9
    assert pair.here.handoffs.readers == []
    prefills = [
        pair.here.add([number, *prompt], handoff=f"h{number}", reader=reader) for number, reader in enumerate("dde")
    ]
    pair.here.add(prompt, handoff="of a router")
    assert pair.here.handoffs.readers == ["d", "e"]
    list(pair.here.run())
    assert pair.here.handoffs.readers == ["d", "e"]
    for number, prefill in enumerate(prefills[:2]):
        request = pair.there.add([number, *prompt], SamplingParams(max_new_tokens=2), source=("prefill", f"h{number}"))
        pair.there.take_first(request, prefill.token_ids[0])
        pair.there.step()
    while any(not arrival.is_done for arrival in pair.wire.arrivals):
        pair.wire.advance()
    assert pair.here.handoffs.readers == ["e"]
    run(pair)
    assert pair.here.handoffs.readers == []


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_router_s_prompt_that_is_not_needed_is_freed(is_aborted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_SHORT_TOKENS", 30)
    pair, prompt = make_pair(), [6, 2] * 9
    prefill = pair.here.add(prompt, SamplingParams(ignore_eos=True), handoff="by hand")
    list(pair.here.run())
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    request = pair.there.add(prompt, params, source=("prefill", "by hand"))
    pair.there.take_first(request, prefill.token_ids[0])
    if is_aborted:
        pair.there.abort(request)
    else:
        list(pair.there.run())
        assert request.token_ids == alone_ignoring_eos(prompt, 4)
    for _ in range(20):
        pair.wire.advance()
    pair.here.step()
    assert (pair.wire.arrivals, pair.here.has_transfers) == ([], False)
    assert pair.here.allocator.num_free == pair.here.allocator.num_blocks


def test_a_held_prompt_is_freed_when_nobody_comes() -> None:
    pair = make_pair()
    pair.here.add([6, 2] * 9, SamplingParams(max_new_tokens=9), handoff="nobody's")
    list(pair.here.run())
    assert pair.here.allocator.num_free < pair.here.allocator.num_blocks
    with pytest.raises(ValueError, match="without transfers"):
        pair.here.reset()
    run(pair)
    assert (pair.here.handoffs.sent.num_done, pair.here.handoffs.sent.num_failed) == (0, 1)
    pair.here.reset()


def test_roles_are_checked() -> None:
    pair = make_pair()
    with pytest.raises(ValueError, match=r"handoff is 'x', but this job prefills for no other \(--role prefill\)"):
        pair.there.add([1, 2], handoff="x")
    with pytest.raises(ValueError, match="source is .* but no other job prefills for this one"):
        pair.here.add([1, 2], source=("a", "b"))
    with pytest.raises(ValueError, match="exchanges no blocks"):
        make_engine(9).add([1, 2], handoff="x")
    with pytest.raises(ValueError, match="source is 5; it must be two names"):
        pair.there.add([1, 2], source=5)  # type: ignore[arg-type]
    assert drive(pair.there, lambda *_: None) == drive(pair.here, lambda *_: None) == []


def test_scored_prompts_are_computed_here() -> None:
    pair = make_pair()
    request = pair.there.add([1, 2] * 10, SamplingParams(max_new_tokens=2, prompt_logprobs=1))
    run(pair)
    assert pair.num_wanted == 0
    assert len(request.prompt_logprobs) == 20


def test_a_long_transfer_hides_no_other() -> None:
    """There are more transfers than a message has room for, and the oldest ones do not end."""
    progress, ended = Progress(2), list[int]()
    for index in range(100):
        transfer = SimpleNamespace(is_done=index >= 60, has_failed=index % 2 == 1)
        progress.watch(transfer, lambda is_done, index=index: ended.append(index if is_done else -index))
    for _ in range(8):
        words, reported = progress.report()
        progress.apply([2 * word for word in words], reported)
    assert sorted(ended, key=abs) == [index if index % 2 == 0 else -index for index in range(60, 100)]
