"""What is reused and loaded of a prompt, step by step; `test_engine.py`, `test_offload.py` draw whole loads."""

import pytest

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.tier import HostTier
from dcpmla.runtime.costs import LoadCosts
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import Found, PrefixReuse
from dcpmla.runtime.sampling import SamplingParams

BLOCK = 4
KEYS = [bytes([index]) * 32 for index in range(3)]


class Asked:
    """Costs that note what they are asked."""

    def __init__(self, answer: bool) -> None:
        self.asked: list[tuple[int, int]] = []
        self._answer = answer

    def should_load(self, num_tokens: int, context: int) -> bool:
        self.asked.append((num_tokens, context))
        return self._answer


def computed(allocator: BlockAllocator, num_blocks: int, reuse: PrefixReuse) -> Request:
    """Return a request of so many blocks, whose prompt has been computed and is remembered where that is enabled."""
    request = Request(list(range(num_blocks * BLOCK)), SamplingParams(max_new_tokens=1))
    request.block_ids.extend(allocator.allocate(num_blocks))
    request.num_computed_tokens = num_blocks * BLOCK
    reuse.remember(request)
    return request


def make_reuse(costs: LoadCosts, num_blocks: int = 9) -> tuple[BlockAllocator, HostTier, PrefixReuse]:
    allocator, tier = BlockAllocator(num_blocks, BLOCK), HostTier(9)
    return allocator, tier, PrefixReuse(allocator, True, tier, costs)


def test_without_prefix_caching_nothing_is_remembered() -> None:
    allocator, tier = BlockAllocator(9, BLOCK), HostTier(9)
    request = computed(allocator, 2, PrefixReuse(allocator, False, tier, Asked(True)))
    assert allocator.find(request.block_keys(0, 2, BLOCK)) == []
    assert tier.num_pending == 0


@pytest.mark.parametrize("pays", [False, True])
def test_blocks_are_loaded_where_that_pays(pays: bool) -> None:
    """The choice knows the tokens to load and those before them."""
    costs = Asked(pays)
    allocator, tier, reuse = make_reuse(costs)
    first = computed(allocator, 1, reuse)
    request = Request(list(range(4 * BLOCK)), SamplingParams(max_new_tokens=1))
    keys = request.block_keys(0, 3, BLOCK)
    for key in keys[1:]:
        tier.blocks.add(key)
    found = reuse.find(request)
    assert costs.asked == [(2 * BLOCK, BLOCK)]
    assert found == Found(list(first.block_ids), keys=keys[1:] if pays else [])


def test_loads_go_into_the_blocks_after_those_of_the_cache() -> None:
    _, tier, reuse = make_reuse(Asked(True))
    for key in KEYS[:2]:
        tier.blocks.add(key)
    loading = reuse.load(Found([5], keys=KEYS[:2]), [5, 6, 7, 8], None)
    assert (loading.keys, list(loading.blocks), loading.state) == (KEYS[:2], [6, 7], None)


def test_content_that_is_held_stays_until_it_is_released() -> None:
    tier = HostTier(1)
    tier.blocks.add(KEYS[0])
    tier.blocks.hold(KEYS[:1])
    tier.blocks.hold(KEYS[:1])
    for held in (True, True, False):
        assert (tier.blocks.add(KEYS[1]) is None) == held
        if held:
            tier.blocks.release(KEYS[:1])
