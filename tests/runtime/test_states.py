"""States of requests: under any load each request goes on from the state after exactly the tokens it has computed."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.states import StatePool, Worth
from dcpmla.cache.tier import HostTier
from dcpmla.runtime.costs import TOKEN_COSTS, PieceCosts, TokenCosts
from dcpmla.runtime.progress import Loading
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import PrefixReuse
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.support.hash_model import make_engine

BLOCK = 4
prompts = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=30), min_size=1, max_size=8)


def serve(
    scheduler: Scheduler,
    requests: list[Request],
    memory: dict[int, list[int]],
    host: dict[int, list[int]] | None = None,
) -> None:
    """Run requests to their ends over states that hold the tokens they come from; every step checks them.

    Args:
        memory, host: Tokens of the states of the cache and of host memory. Loads end as late as they may.
    """
    tier, host = scheduler.tier, {} if host is None else host
    for request in requests:
        scheduler.reuse.add(request)
    scheduler.waiting.extend(requests)
    for number in range(2000):
        step = scheduler.schedule(float(number))
        if not step.pieces:
            break
        for source, target in step.copies:
            memory[target] = list(memory[source])
        computed = [piece.request for piece in step.pieces]
        for request in scheduler.running:
            if isinstance(request.loading, Loading) and (request in computed or request not in step.loads):
                load(tier, request.loading, memory, host)
                request.loading = None
        assert len({request.state for request, *_ in step.pieces}) == len(step.pieces)
        for request, num, _ in step.pieces:
            assert request.state is not None
            start, end = request.num_computed_tokens, request.num_computed_tokens + num
            if start:
                assert memory[request.state] == request.tokens(0, start)
            memory[request.state] = request.tokens(0, end)
            request.num_computed_tokens = end
        for request, *_ in step.pieces:
            if (copy := scheduler.reuse.remember(request)) is not None:
                if copy.target is not None:
                    memory[copy.target] = list(memory[copy.source])
                slot = None if copy.key in tier.states else tier.states.add(copy.key)
                if slot is not None:
                    host[slot] = list(memory[copy.source])
        tier.take_pending()
        for request, *_ in step.pieces:
            if not request.num_pending_tokens:
                request.append(1 + len(request.token_ids) % 2, frozenset())
            if request.finish_reason:
                scheduler.remove(request)
    assert all(request.finish_reason == "length" for request in requests)


def load(tier: HostTier, loading: Loading, memory: dict[int, list[int]], host: dict[int, list[int]]) -> None:
    """Copy a state from host memory, which protects it until then."""
    assert loading.state is not None  # blocks are of no use without
    key, state = loading.state
    memory[state] = list(host[tier.states.slots([key])[0]])
    tier.states.release([key])
    tier.blocks.slots(loading.keys)  # they are there
    tier.blocks.release(loading.keys)


@given(
    prompts=prompts,
    room=st.integers(0, 20),
    more=st.sampled_from([0, 0, 1, 2, 3]),
    budget=st.integers(1, 40),
    host_sizes=st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 30), st.integers(1, 6))),
)
@example(prompts=[[1, 1], [1]], room=1, more=2, budget=3, host_sizes=(0, 0))
def test_requests_go_on_from_their_own_states(
    prompts: list[list[int]], room: int, more: int, budget: int, host_sizes: tuple[int, int]
) -> None:
    """Also from states that return from host memory."""
    longest = -(-max(len(prompt) + 5 for prompt in prompts) // BLOCK)
    allocator, tier = BlockAllocator(longest + room, BLOCK, 3 + more), HostTier(*host_sizes)
    scheduler = Scheduler(allocator, budget, 3, tier=tier)
    memory: dict[int, list[int]] = {}
    host: dict[int, list[int]] = {}
    for _ in range(2):  # the second time all of them begin as earlier ones did
        serve(scheduler, [Request(list(prompt), SamplingParams(max_new_tokens=5)) for prompt in prompts], memory, host)
        assert allocator.num_free == allocator.num_blocks
    assert not tier.blocks._holders
    assert not tier.states._holders
    free = allocator.states
    taken = [free.take() for _ in range(3 + more)]
    assert sorted(state for state in taken if state is not None) == list(range(3 + more))


def test_a_conversation_returns_from_host_memory() -> None:
    """Its state has left the cache, but not those of the blocks before it."""
    scheduler, memory, host = Scheduler(BlockAllocator(30, BLOCK, 2), 8, 1, tier=HostTier(99, 20)), {}, {}  # type: ignore[var-annotated]
    first, others = [1, 2, 3] * 9, [[index] * 80 for index in (7, 8)]
    for prompt in (first, *others):
        serve(scheduler, [Request(prompt, SamplingParams(max_new_tokens=1))], memory, host)
    later = Request([*first, 5, 5, 5], SamplingParams(max_new_tokens=1))
    serve(scheduler, [later], memory, host)
    assert later.num_cached_tokens == 24


class DearStates(TokenCosts):
    """Costs by which no piece of a prompt ends only because its number of blocks has doubled."""

    least_state_tokens = 1 << 20


class Server:
    """A scheduler and the tokens in its states."""

    def __init__(self, num_blocks: int, num_states: int, budget: int, costs: PieceCosts = TOKEN_COSTS) -> None:
        self.scheduler = Scheduler(BlockAllocator(num_blocks, BLOCK, num_states), budget, 2, costs=costs)
        self.memory: dict[int, list[int]] = {}

    def serve(self, *prompts: list[int], num_new: int = 3) -> list[Request]:
        """Serve prompts that come at once."""
        requests = [Request(list(prompt), SamplingParams(max_new_tokens=num_new)) for prompt in prompts]
        serve(self.scheduler, requests, self.memory)
        return requests

    def cached(self, *prompts: list[int]) -> list[int]:
        """Return how many tokens of each prompt are reused, of prompts that come at once."""
        return [request.num_cached_tokens for request in self.serve(*prompts)]


@pytest.mark.parametrize("budget", [7, 8, 33, 100])
def test_prompts_that_part_inside_one(budget: int) -> None:
    server, first = Server(100, 20, budget), [*range(1, 33)]
    assert sorted(server.cached(first + [40] * 33, first + [50] * 5)) == [0, 32]
    # A border after 32 tokens is known by now; the second request that parts elsewhere makes that border known.
    assert server.cached(first + [60] * 9) == [32]
    before = server.cached(first[:20] + [70] * 9)[0]
    assert before in (0, 8, 16)  # the steps of a long prompt end anywhere
    assert server.cached(first[:20] + [80] * 9) == [20]


def test_prompts_part_after_the_last_block_that_they_share() -> None:
    scheduler, first = Server(100, 20, 100, DearStates()).scheduler, [*range(1, 18)]
    requests = [Request(prompt, SamplingParams()) for prompt in ([*first, *[40] * 33], [*first, *[50] * 5])]
    for request in requests:
        scheduler.reuse.add(request)
    assert scheduler.reuse._forks is not None
    assert [scheduler.reuse._forks.borders(request) for request in requests] == [[4, 12], [4, 5]]


@given(
    parents=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=2, max_size=7),
    budget=st.sampled_from([5, 9, 16, 200]),
)
def test_prompts_that_come_at_once_share_all_full_blocks(parents: list[tuple[int, int]], budget: int) -> None:
    """Each prompt continues the beginning of another one: at most its last block that an earlier one has is computed
    again.
    """
    server, prompts = Server(1000, 60, budget), [list[int]()]
    for number, (kept, more) in enumerate(parents):
        prompts.append(prompts[-1][:kept] + [100 + number] * more)
    requests = sorted(server.serve(*prompts[1:]), key=lambda request: request.scheduled_time or 0.0)
    prompts = [request.prompt_token_ids for request in requests]
    for index, prompt in enumerate(prompts):
        shared = [
            next((i for i, (one, two) in enumerate(zip(prompt, other, strict=False)) if one != two), len(other))
            for other in prompts[:index]
        ]
        num_blocks = min(max(shared, default=0), len(prompt) - 1) // BLOCK
        assert requests[index].num_cached_tokens >= (num_blocks - 1) * BLOCK


def test_a_long_prompt_evicts_no_state_of_more_worth() -> None:
    server, system = Server(500, 8, 16), [7] * 20
    assert server.cached([*system, 1, 1], [*system, 2, 2]) == [0, 20]
    assert server.cached([9] * 700) == [0]
    assert server.cached([*system, 3, 3]) == [20]
    assert server.cached([9] * 699) == [696]


def test_only_states_after_whole_blocks_are_remembered() -> None:
    """Pieces of 3 tokens end inside of blocks of 4, or where a prompt has doubled."""
    server = Server(100, 8, 3)
    assert server.cached([1] * 20, [2] * 9) == [0, 0]
    assert server.cached([1] * 4 + [3] * 4, [1] * 15) == [4, 8]  # no state after 7 tokens, or 12
    dear = Server(100, 8, 3, DearStates())
    assert dear.cached([1] * 9) == [0]  # states after 3, 6 and 8 tokens
    assert dear.cached([1] * 6 + [2] * 3) == [0]


def test_pieces_of_long_prompts_end_with_blocks() -> None:
    """A piece of 7 tokens gives up 3, so that the state after it is remembered where the prompt has doubled."""
    server = Server(100, 8, 7)
    assert server.cached([9] * 40) == [0]
    assert server.cached([9] * 18 + [1] * 3) == [16]
    scheduler = Server(100, 8, 7, DearStates()).scheduler
    request = Request([9] * 40, SamplingParams(max_new_tokens=1))
    assert scheduler.reuse.cut_piece(request, 7) == 4
    request.num_computed_tokens = 4
    assert [scheduler.reuse.cut_piece(request, num) for num in (3, 7, 8)] == [3, 4, 8]


def test_no_state_after_a_token_in_flight_is_remembered() -> None:
    """It would be found by the tokens before that one."""
    scheduler = Scheduler(BlockAllocator(20, 1, 4), 100, 2)
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=3))
    scheduler.waiting.append(request)
    for num_in_flight in (0, 0, 1, 2):  # pieces end after one block and two
        scheduler.schedule(0.0).advance()
        request.num_in_flight = num_in_flight
    assert (request.num_computed_tokens, request.num_known_tokens) == (4, 3)
    assert scheduler.reuse.remember(request) is None


def test_conversations_keep_their_latest_states() -> None:
    """Each answer ends in a later state, which makes the states before it worth less; long prompts pass by."""
    server, turns = Server(1000, 7, 100), [[1] * 9, [2] * 30]
    found = [0, 0]
    for number in range(5):
        for index, prompt in enumerate(turns):
            (request,) = server.serve(prompt, num_new=9)
            assert request.num_cached_tokens == found[index]
            found[index] = (len(prompt) + 8) // BLOCK * BLOCK  # all tokens but the last new one are computed
            prompt += [*request.token_ids, 1, 2, 3]
        server.cached([10 + number] * 400)


def test_states_of_less_worth_give_way() -> None:
    pool = StatePool(3)
    assert [pool.remember(content, worth) for content, worth in ((1, 0), (2, 1), (3, 2))] == [0, 1, 2]  # type: ignore[arg-type]
    assert pool.remember(4, Worth.PASSED) == 0  # for the one of equal worth
    assert pool.remember(5, Worth.LATEST) == 0  # for that of less worth
    assert pool.remember(6, Worth.PASSED) is None
    pool.supersede(2)
    assert pool.remember(7, Worth.PASSED) == 1
    assert 3 in pool
    assert pool.find(3) == 2


def test_the_oldest_remembered_state_gives_way() -> None:
    pool = StatePool(2)
    assert [pool.remember(content) for content in (7, 8, 7)] == [0, 1, None]
    assert pool.find(7) == 0  # newer than 8 from now on
    assert pool.take() == 1
    assert (pool.find(8), pool.find(7)) == (None, 0)
    pool.forget(7)
    assert pool.take() == 0
    assert pool.take() is None


def test_more_requests_than_states() -> None:
    with pytest.raises(ValueError, match=r"max_num_seqs \(--max-num-seqs\) is 3, but the cache has 2 states"):
        Scheduler(BlockAllocator(4, BLOCK, 2), 10, 3)


def test_an_aborted_request_leaves_no_prompt_behind() -> None:
    """Running, waiting, or not due yet."""
    engine = make_engine(100)
    reuse = engine.scheduler.reuse = PrefixReuse(BlockAllocator(100, BLOCK, 20), True, HostTier(), TOKEN_COSTS)
    requests = [engine.add([1] * 20, SamplingParams(max_new_tokens=3), arrival_time=time) for time in (0.0, 1e9)]
    assert reuse._forks is not None
    assert len(reuse._forks._prompts) == 2
    for request in requests:
        engine.abort(request)
    assert not reuse._forks._prompts
    assert not reuse._forks._live
