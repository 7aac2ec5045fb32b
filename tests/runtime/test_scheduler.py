"""The scheduler alone, under any load: all requests finish, ranks decide alike, and no prompt is read twice."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import dcpmla.runtime.batch as batch_module
import dcpmla.runtime.request as request_module
from dcpmla.cache.blocks import BlockAllocator, block_key
from dcpmla.runtime.batch import Batch, Piece
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import ComingBlocks
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.support.costs import DrawnCosts

BLOCK = 4


def compute(scheduler: Scheduler, step: Batch) -> list[Piece]:
    """Count a step's tokens as computed, and return the pieces that give a token, which is in flight now."""
    for request, num_tokens, num_drafts in step.pieces:
        assert num_tokens - num_drafts == 1 or not request.num_in_flight  # a preempted request waits for its token
        request.num_computed_tokens += num_tokens - num_drafts
        request.num_tried += num_drafts
        num_scored = min(request.num_computed_tokens, len(request.prompt_token_ids) - 1)
        request.num_scored_tokens = max(request.num_scored_tokens, num_scored)
        scheduler.reuse.remember(request)
    ready = [piece for piece in step.pieces if not piece.request.num_pending_tokens]
    for piece in ready:
        piece.request.num_in_flight += 1
    return ready


def collect(scheduler: Scheduler, ready: Sequence[Piece]) -> None:
    """Give requests their tokens, and remove the finished ones. All drafts are rejected."""
    for request, _, num_drafts in ready:
        request.num_in_flight -= 1
        request.num_tried -= num_drafts
        if not request.finish_reason:
            request.append(len(request.token_ids) % 2, frozenset())
            scheduler.reuse.remember(request)
            if request.finish_reason:
                scheduler.remove(request)


def serve(
    scheduler: Scheduler,
    arrivals: Sequence[Sequence[Request]],
    aborted: Sequence[Request] = (),
    num_drafts: int = 0,
) -> list[Batch]:
    """Return all steps until no request is left. Tokens are known one step late, as in the engine.

    Args:
        arrivals: Requests that arrive before each step.
        aborted: Requests to abort, one before each step after the last arrivals.
        num_drafts: Limit of the drafts of a request.
    """
    steps, pending, gone = list[Batch](), list[Piece](), list(aborted)
    while len(steps) < len(arrivals) or scheduler.running or scheduler.waiting:
        scheduler.waiting += arrivals[len(steps)] if len(steps) < len(arrivals) else []
        if len(steps) >= len(arrivals) and gone and not (request := gone.pop()).finish_reason:
            scheduler.remove(request)
            request.finish_reason = "abort"
        steps.append(scheduler.schedule(float(len(steps)), num_drafts))
        ready = compute(scheduler, steps[-1])
        collect(scheduler, pending)
        pending = ready
        assert len(steps) < 10_000
    return steps


# The second request's drafts hold more blocks than it needs again: there is room for it in the step that preempts it.
MORE_ROOM = [[(0, [1], 15, False), (4, [1, 1, 0, 0, 1, 0], 16, False)]]
# Each step's arrivals: blocks of the prefix, further tokens of the prompt, number of new tokens, is scored
Load = list[list[tuple[int, list[int], int, bool]]]
loads = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 20), st.booleans()
        ),
        max_size=4,
    ),
    min_size=1,
    max_size=6,
)


def requests_of(load: Load) -> list[list[Request]]:
    names = count()
    return [
        [
            Request(
                [index % 3 for index in range(num_blocks * BLOCK)] + tokens,
                SamplingParams(max_new_tokens=num_new, prompt_logprobs=0 if is_scored else None),
                next(names),
            )
            for num_blocks, tokens, num_new, is_scored in arriving
        ]
        for arriving in load
    ]


def serve_alike(
    load: Load,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    num_states: int = 0,
    num_aborts: int = 0,
    num_drafts: int = 0,
    **costs: Any,
) -> list[Batch]:
    """Return the steps of a load, after which all requests have finished, and which a second rank decides alike."""
    ranks = []
    for _ in range(2):
        allocator = BlockAllocator(num_blocks, BLOCK, num_states)
        scheduler, requests = Scheduler(allocator, budget, max_num_seqs, **costs), requests_of(load)
        everyone = [request for arriving in requests for request in arriving]
        for request in everyone:
            scheduler.check_fits(request)
        names = {request: name for name, request in enumerate(everyone)}
        steps = serve(scheduler, requests, everyone[:num_aborts], num_drafts)
        assert all(request.finish_reason in ("length", "abort") for request in everyone)
        assert allocator.num_free == num_blocks
        ranks.append([[(names[piece.request], *piece[1:]) for piece in step.pieces] for step in steps])
    assert ranks[0] == ranks[1]
    return steps


@given(
    load=loads,
    num_blocks=st.integers(12, 20),
    budget=st.sampled_from([2, 7, 64]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    max_scored=st.sampled_from([1, 5, 256]),
    num_states=st.sampled_from([0, 20]),
    num_aborts=st.integers(0, 2),
    num_drafts=st.sampled_from([0, 9]),
)
@example(
    load=MORE_ROOM, num_blocks=13, budget=64, max_num_seqs=3, max_scored=256, num_states=0, num_aborts=0, num_drafts=9
)
def test_all_requests_finish_and_ranks_decide_alike(
    load: Load,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    max_scored: int,
    num_states: int,
    num_aborts: int,
    num_drafts: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "MAX_SCORED", max_scored)
        steps = serve_alike(load, num_blocks, budget, max_num_seqs, num_states, num_aborts, num_drafts)
    assert all(sum(piece.num_tokens for piece in step.pieces) <= budget for step in steps)
    total = sum(request.max_seq_len + 3 for arriving in requests_of(load) for request in arriving)
    # In the worst case requests run one after the other, a token in each step, and preempted ones begin again.
    assert len(steps) <= len(load) + 2 * total + 1


def coming_by_tokens(waiting: Request, running: Sequence[Request]) -> bool:
    """Compare prompts token by token."""
    for other in running:
        own, prompt = waiting.prompt_token_ids[:-1], other.prompt_token_ids
        shared = 0
        while (end := (shared + 1) * BLOCK) <= min(len(own), len(prompt)) and own[:end] == prompt[:end]:
            shared += 1
        if other.num_remembered_blocks < shared:
            return not waiting.is_scored
    return False


prompts = st.builds(lambda ones, end: ones * [1] + end, st.integers(0, 20), st.lists(st.integers(0, 1), max_size=6))


@given(
    running=st.lists(st.tuples(prompts.filter(len), st.integers(0, 6)), max_size=4),
    prompt=prompts.filter(len),
    is_scored=st.booleans(),
)
@example(running=[([1, 1, 1, 1, 1, 0, 1, 1], 1)], prompt=[1, 1, 1, 1, 1, 0, 1, 1], is_scored=False)
def test_coming_blocks_are_those_found_by_comparing_tokens(
    running: list[tuple[list[int], int]], prompt: list[int], is_scored: bool
) -> None:
    coming, computing = ComingBlocks(BLOCK), list[Request]()
    for tokens, num_remembered in running:
        computing.append(Request(tokens, SamplingParams()))
        computing[-1].num_remembered_blocks = min(num_remembered, len(tokens) // BLOCK)
        coming.add(computing[-1])
    waiting = Request(prompt, SamplingParams(prompt_logprobs=0 if is_scored else None))
    assert (coming.find(waiting) > 0) == coming_by_tokens(waiting, computing)


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 prompts with one beginning, however many steps they wait for it."""
    num_blocks, calls = 40, Counter[str]()

    def counted(previous: bytes, token_ids: Sequence[int]) -> bytes:
        calls["hashes"] += 1
        return block_key(previous, token_ids)

    block_keys = Request.block_keys

    def looked_up(request: Request, start: int, end: int, block_tokens: int) -> list[bytes]:
        calls["searches"] += 1
        return block_keys(request, start, end, block_tokens)

    monkeypatch.setattr(request_module, "block_key", counted)
    monkeypatch.setattr(Request, "block_keys", looked_up)
    scheduler = Scheduler(BlockAllocator(1000, BLOCK), 33, 256)
    requests = [Request([7] * num_blocks * BLOCK + [number], SamplingParams(max_new_tokens=1)) for number in range(256)]
    num_steps = len(serve(scheduler, [requests]))
    assert num_steps < 40
    assert calls["hashes"] == 256 * num_blocks
    assert calls["searches"] <= 256 * num_steps  # one key of each request that waits


def scored(num_tokens: int, name: int = 0) -> Request:
    return Request([name] * num_tokens, SamplingParams(max_new_tokens=1, prompt_logprobs=0))


def test_scored_prompts_without_room_are_passed() -> None:
    scheduler = Scheduler(BlockAllocator(2000, 64), 8192, 2)
    plain = [Request([8 + name] * 5000, SamplingParams(max_new_tokens=1)) for name in range(2)]
    scheduler.waiting.extend([*(scored(20_000, name) for name in range(4)), *plain])
    assert [len(piece.request.prompt_token_ids) for piece in scheduler.schedule(0.0).pieces] == [20_000, 5000]
    assert [len(request.prompt_token_ids) for request in scheduler.waiting] == 3 * [20_000] + [5000]


def test_scored_prompts_keep_their_order_among_a_stream_of_others() -> None:
    scheduler = Scheduler(BlockAllocator(64, 16), 512, 3)
    first = [scored(400, name) for name in range(4)]
    stream = [[Request([5 + number] * 40, SamplingParams(max_new_tokens=4))] for number in range(200)]
    serve(scheduler, [[*first, *stream[0]], *stream[1:]])
    times = [request.scheduled_time for request in first]
    assert times == sorted(times)  # type: ignore[type-var]
    assert max(time for time in times if time is not None) < 60  # each is passed by 400 tokens of others


@given(load=loads, budget=st.sampled_from([7, 64, 500]), seed=st.integers(0, 20), num_blocks=st.integers(12, 40))
def test_prompts_beside_decodes_take_bounded_time(load: Load, budget: int, seed: int, num_blocks: int) -> None:
    """The first piece beside decodes alone may exceed the limit, and a strict one by 64 tokens at most."""
    costs = DrawnCosts(seed)
    for step in serve_alike(load, num_blocks, budget, 8, costs=costs):
        lens = [piece.num_tokens for piece in step.pieces]
        num_decodes = lens.count(1)
        assert lens[:num_decodes] == [1] * num_decodes
        assert num_decodes <= step.num_absorbed <= len(lens)
        if step.room_us < costs.max_prefill_us < math.inf and len(lens) > num_decodes:
            assert step.room_us >= -costs.piece_us(64 if costs.is_strict else budget, num_blocks * BLOCK)
            assert step.room_us >= 0 or len(lens) == num_decodes + 1


@given(load=loads, budget=st.sampled_from([7, 64, 500]), seed=st.integers(0, 20), max_num_seqs=st.integers(1, 8))
def test_prompts_begin_in_the_order_of_arrival(load: Load, budget: int, seed: int, max_num_seqs: int) -> None:
    """A prompt that waits for a step with more room lets no later one of its kind go first."""
    load = [[(*request[:3], False) for request in arriving] for arriving in load]
    begins = dict[str | int, int]()
    options: dict[str, Any] = {"costs": DrawnCosts(seed), "enable_prefix_caching": False}
    for number, step in enumerate(serve_alike(load, 200, budget, max_num_seqs, **options)):
        for piece in step.pieces:
            begins.setdefault(piece.request.request_id, number)
    lens = [len(request.prompt_token_ids) for arriving in requests_of(load) for request in arriving]
    assert sorted(begins) == list(range(len(lens)))
    for is_short in (True, False):
        of_kind = [begins[name] for name, length in enumerate(lens) if (length <= budget // 2) == is_short]
        assert of_kind == sorted(of_kind)


def test_a_long_prompt_comes_forward_beside_decodes() -> None:
    """However little time is left: by the fewest tokens that a piece has."""
    costs = DrawnCosts(2)
    assert costs.max_prefill_us == 1.0
    scheduler = Scheduler(BlockAllocator(2000, BLOCK), 512, 4, costs=costs)
    decoding = Request([1] * 8, SamplingParams(max_new_tokens=100))
    steps = serve(scheduler, [[decoding], [], [], [Request([2] * 1000, SamplingParams(max_new_tokens=1))]])
    pieces = [piece.num_tokens for step in steps for piece in step.pieces if len(step.pieces) > 1]
    assert [num for num in pieces if num > 1] == [64] * 15 + [40]


class CallCosts(DrawnCosts):
    """Costs of 10 us for each piece and 1 us for each token, and of a tenth of one for each token of the context."""

    def __init__(self) -> None:
        super().__init__(0)
        self.max_prefill_us, self.max_loss = 200.0, 0.25

    def piece_us(self, new: int, context: int) -> float:
        return 10 + new + context / 10


def pieces_beside_a_decode(lens: Sequence[int]) -> list[list[int]]:
    """Return the sizes of prompts' pieces, step by step, beside a request that decodes."""
    scheduler = Scheduler(BlockAllocator(2000, BLOCK), 512, 8, costs=CallCosts())
    prompts = [Request([2 + name] * length, SamplingParams(max_new_tokens=1)) for name, length in enumerate(lens)]
    steps = serve(scheduler, [[Request([1] * 8, SamplingParams(max_new_tokens=100))], [], prompts])
    pieces = [[piece.num_tokens for piece in step.pieces if piece.request in prompts] for step in steps]
    return [sizes for sizes in pieces if sizes]


def test_prompts_beside_decodes_share_the_time() -> None:
    """Pieces fill steps of 128 tokens. The end of the first prompt leaves room of a step's 200 us."""
    assert pieces_beside_a_decode([200, 500]) == [[127], [73, 54], [127], [127], [127], [65]]


def test_a_prompt_waits_rather_than_get_a_crumb() -> None:
    """After 117 tokens of a prompt, 10 more fill a step of 128. To read them again would take more than a quarter of
    their time. A later prompt of 3 tokens waits, too, though the step has room for all of them.
    """
    assert pieces_beside_a_decode([244, 250, 3])[:3] == [[127], [117], [127, 3]]


@pytest.mark.parametrize(("num_blocks", "nums_drafts"), [(5, [0, 0]), (7, [3, 0]), (8, [3, 3])])
def test_drafts_leave_a_block_for_each_that_runs(num_blocks: int, nums_drafts: list[int]) -> None:
    scheduler = Scheduler(BlockAllocator(num_blocks, BLOCK), 64, 4)
    scheduler.waiting += [Request([name] * 7, SamplingParams(max_new_tokens=20)) for name in range(2)]
    compute(scheduler, scheduler.schedule(0.0))
    batch = scheduler.schedule(1.0, num_drafts=3)
    assert [piece.num_drafts for piece in batch.pieces] == nums_drafts
    batch.advance()
    assert [piece.request.num_computed_tokens for piece in batch.pieces] == [8, 8]  # drafts count once accepted
