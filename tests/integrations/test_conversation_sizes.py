"""Sizes of conversations make engines preempt and reuse in blocks of any size, whichever drafts are accepted."""

from collections.abc import Collection, Sequence

import pytest

from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support import hash_model
from tests.support.combinations import Row
from tests.support.conversation_sizes import NEW_OF_TURNS, NUM_DRAFTS, conversation_sizes, longest
from tests.support.hash_model import HashDrafter, HashModel, make_engine

MAX_LEN = 256
CASES = [pytest.param(room, "any order", size) for room in ("preemption", "ample") for size in (4, 32)]
CASES += [pytest.param("preemption", "deterministic", 64), pytest.param("ample", "deterministic", 128)]
CASES += [
    pytest.param(room, order, size, marks=pytest.mark.thorough)
    for room, order, sizes in (
        ("preemption", "any order", (8, 16, 64)),
        ("ample", "any order", (8, 16, 64)),
        ("ample", "deterministic", (64,)),
    )
    for size in sizes
]
FAST = [None, (), (0,), (1,), (2,), (0, 1, 2, 3)]  # requests whose drafts are right; None without drafts


class UnevenDrafter(HashDrafter):
    """Drafts that are all right for some requests, and all wrong for others.

    Args:
        fast: Ids of requests whose drafts are right.
    """

    def __init__(self, fast: Collection[int]) -> None:
        super().__init__(NUM_DRAFTS, share=1.0, always=True)
        self.fast = fast

    def _guess(self, request: Request, num_wanted: int, *_: object) -> list[int]:
        self.share = float(request.request_id in self.fast)
        return super()._guess(request, num_wanted, *_)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize(("room", "order", "block_tokens"), CASES)
def test_requests_are_preempted_and_blocks_reused(
    room: str, order: str, block_tokens: int, fast: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_model, "BLOCK", block_tokens)
    row = Row("deepseek_v3", (room, order, "no drafts" if fast is None else "ngram"))
    sizes = conversation_sizes(row, block_tokens)
    assert longest(sizes) <= min(MAX_LEN, sizes.num_blocks * block_tokens)
    for num_tokens in (16, 48):
        model, drafter = HashModel(), None if fast is None else UnevenDrafter(fast)
        if order == "deterministic":
            model.least_prefill, model.has_new_in_chunks = 1, True
        options = {"model": model, "drafter": drafter, "deterministic": model.has_new_in_chunks}
        engine = make_engine(sizes.num_blocks, num_tokens, 4, MAX_LEN, **options)
        prompts = [[1 + index] * length for index, length in enumerate(sizes.prompts)]
        params = SamplingParams(max_new_tokens=sizes.num_new, ignore_eos=True)
        first = [engine.add(each, params, request_id=index) for index, each in enumerate(prompts)]
        list(engine.run())
        assert (engine.stats.num_preemptions > 0) == (room == "preemption")
        turn = [*prompts[0], *first[0].token_ids, 5, 6, 7]
        params = SamplingParams(max_new_tokens=NEW_OF_TURNS, ignore_eos=True)
        for _ in range(2):
            again = engine.add(turn, params)
            list(engine.run())
        assert again.num_cached_tokens > 0
