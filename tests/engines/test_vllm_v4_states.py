"""The states that vLLM's scheduler remembers for DeepSeek-V4: when, for how long, and for whom."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from dcpmla.integrations.vllm.compressed.remembered import RememberedStates, num_remembered

BLOCK = 4


@dataclass(eq=False)
class Request:
    """A substitute for vLLM's. A block's hash is the text up to the block's end."""

    request_id: str
    tokens: str
    shared_prefix_boundary: int = 0
    ended: bool = False
    num_computed_tokens: int = field(default=0)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return [self.tokens[:end].encode() for end in range(BLOCK, len(self.tokens) + 1, BLOCK)]

    def is_finished(self) -> bool:
        return self.ended


def run(states: RememberedStates, request: Request, start: int, limit: int = 100) -> list[tuple[int, int | None]]:
    """Run a request's prompt in pieces of at most `limit` tokens: return their ends, and the states remembered."""
    pieces = []
    while start < request.num_tokens:
        num_tokens = states.next_stop(request, start, min(limit, request.num_tokens - start))
        assert num_tokens > 0
        pieces.append((start + num_tokens, states.remember(request, start, start + num_tokens)))
        start += num_tokens
    return pieces


def test_a_prompt_stops_after_its_last_full_block() -> None:
    states = RememberedStates(4, BLOCK)
    first = Request("a", "abcdefghij")
    assert [end for end, _ in run(states, first, 0)] == [8, 10]
    assert states.find(first.block_hashes, 2) == 2
    assert states.find(first.block_hashes, 1) == 0, "a state after two blocks is none after one"
    assert states.find(Request("b", "abcdXfghij").block_hashes, 2) == 0
    (_, state), _ = run(RememberedStates(4, BLOCK), first, 0)
    assert states.restore(Request("c", "abcdefghiX"), 2) == state


def test_pieces_end_with_blocks_where_that_costs_little() -> None:
    states = RememberedStates(8, BLOCK)
    request = Request("a", "abcdefghijklmnopqrstuvwxyz")
    pieces = run(states, request, 0, limit=9)
    assert [end for end, _ in pieces] == [8, 16, 24, 26]
    assert [state is not None for _, state in pieces] == [True, True, True, False], "1, 2 and 4 blocks, and the last"
    assert [end for end, _ in run(RememberedStates(8, BLOCK), request, 0, limit=3)][:3] == [3, 6, 8]


def test_where_sequences_part() -> None:
    """The second prompt notes where it parts from the first, and the third continues there."""
    states = RememberedStates(4, BLOCK)
    run(states, Request("a", "abcdefghijklmnop"), 0)
    second = Request("b", "abcdefghXXXXXXXX", shared_prefix_boundary=8)
    assert states.find(second.block_hashes, 2) == 0
    assert [end for end, _ in run(states, second, 0)] == [8, 12, 16]
    assert states.find(Request("c", "abcdefghYYYY").block_hashes, 2) == 2


def test_a_later_state_of_a_sequence_replaces_an_earlier_one() -> None:
    """With two states, an answer's latest and one where sequences part stay."""
    states = RememberedStates(2, BLOCK)
    shared = Request("a", "abcdXXX", shared_prefix_boundary=4)
    run(states, shared, 0)
    answer = Request("b", "mnopqr")
    run(states, answer, 0)
    for token in "stuvwxyz":
        answer.tokens += token
        states.remember(answer, answer.num_tokens - 1, answer.num_tokens)
    assert states.find(answer.block_hashes, 3) == 3
    assert states.find(answer.block_hashes, 2) == 0
    assert states.find(shared.block_hashes, 1) == 1


def test_a_token_that_is_still_being_sampled() -> None:
    """A state is found once the last token before it is known, and forgotten if that will never be."""
    states = RememberedStates(4, BLOCK)
    answer, dropped = Request("a", "abc"), Request("b", "efg")
    for request in (answer, dropped):
        assert states.remember(request, 3, 4) is not None
    assert states.find([b"abcd"], 1) == 0
    answer.tokens, dropped.ended = "abcd", True
    assert states.find(answer.block_hashes, 1) == 1
    assert states.find([b"efgh"], 1) == 0
    later = {states.remember(Request(name, name), 3, 4) for name in ("ijkl", "mnop", "qrst")}
    assert len(later - {None}) == 3, "the dropped state is free again"
    assert states.find(answer.block_hashes, 1) == 1


def test_two_requests_with_the_same_tokens() -> None:
    states = RememberedStates(4, BLOCK)
    assert states.remember(Request("a", "abcde"), 0, 4) is not None
    assert states.remember(Request("b", "abcde"), 0, 4) is None, "it is remembered already"
    answers = Request("c", "xyz"), Request("d", "xyz")
    assert {states.remember(answer, 3, 4) for answer in answers} == {1, 2}
    for answer in answers:
        answer.tokens = "xyzx"
    assert states.find(answers[0].block_hashes, 1) == 1
    assert len({states.remember(Request(name, name), 3, 4) for name in ("ijkl", "mnop")} - {None}) == 2
    assert states.find(answers[0].block_hashes, 1) == 1, "one of the two states was freed"
    states.clear()
    assert states.find(answers[0].block_hashes, 1) == 0


def test_sizes() -> None:
    for num_running, is_caching, expected in ((4, True, 8), (256, True, 64), (256, False, 0)):
        job = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=num_running),
            cache_config=SimpleNamespace(enable_prefix_caching=is_caching),
        )
        assert num_remembered(job) == expected
