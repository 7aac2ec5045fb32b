"""Keys of blocks that an earlier prompt has in common with a new one: those that hashing would give, and no others."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from dcpmla.runtime.request import Prompt, Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving import known_prompts
from dcpmla.serving.known_prompts import KnownPrompts

BLOCK = 4
PARTS = st.lists(st.sampled_from([(1, 2, 3), (1, 2, 4), (5,), (6,) * 9]), min_size=1, max_size=6)


def hashed(prompt: Prompt) -> list[bytes]:
    """Return the keys of a prompt's full blocks, which a request of it hashes if they are not known."""
    request = Request(prompt.token_ids, SamplingParams(), cache_salt=prompt.cache_salt, prompt_keys=prompt.block_keys)
    return request.block_keys(0, len(prompt.token_ids) // BLOCK, BLOCK)


def new(parts: list[tuple[int, ...]], salt: str = "") -> Prompt:
    return Prompt(array("q", [token for part in parts for token in part]), salt, [])


@given(st.lists(st.tuples(PARTS, st.sampled_from(["", "salt"])), max_size=8))
def test_known_keys_are_those_of_the_tokens(prompts: list[tuple[list[tuple[int, ...]], str]]) -> None:
    known, first_tokens = KnownPrompts(BLOCK, num_tokens=60), known_prompts._FIRST_TOKENS
    known_prompts._FIRST_TOKENS = 2
    try:
        for parts, salt in prompts:
            prompt = new(parts, salt)
            known.add(prompt)
            assert hashed(prompt) == hashed(new(parts, salt))
    finally:
        known_prompts._FIRST_TOKENS = first_tokens
    assert sum(len(each.token_ids) for each in known._prompts) == known._num_tokens <= 60


def test_a_turn_has_the_keys_of_the_turn_before_which_it_replaces() -> None:
    known = KnownPrompts(BLOCK, num_tokens=100)
    first, other, turn = new([(*range(10),)]), new([(*range(8), 99)]), new([(*range(30),)])
    for prompt in (first, other):
        known.add(prompt)
        hashed(prompt)
    assert len(other.block_keys) == 2
    known.add(turn)
    assert turn.block_keys == hashed(first) == hashed(other)
    assert [*known._prompts] == [other, turn]
    known.add(salted := new([(*range(30),)], "salt"))
    assert salted.block_keys == []


def test_the_oldest_prompts_are_forgotten() -> None:
    known = KnownPrompts(BLOCK, num_tokens=20)
    prompts = [new([(number,) * 8]) for number in range(4)]
    for prompt in prompts:
        known.add(prompt)
        hashed(prompt)
    for number, has_keys in ((0, False), (3, True)):
        known.add(again := new([(number,) * 8]))
        assert bool(again.block_keys) == has_keys
    known.add(new([(7,) * 21]))
    assert not known._prompts
