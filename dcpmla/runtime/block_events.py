"""The events of requests' blocks, in the cache and in host memory (`dcpmla.cache.block_events`)."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from dcpmla.cache.block_events import BlockEvent, Stored
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.tier import HostTier
from dcpmla.runtime.request import Request


def record_events(allocator: BlockAllocator, tier: HostTier) -> None:
    """Keep the changes of remembered blocks from now on, for `take_events`."""
    allocator.events = []
    if tier.blocks.num_slots:
        tier.blocks.events = []


def take_events(allocator: BlockAllocator, tier: HostTier) -> list[BlockEvent]:
    """Return the changes since the last call. Those of host memory come first, because a block is stored there before
    the cache loses it.
    """
    in_host = [] if tier.blocks.events is None else tier.blocks.take_events()
    return in_host + allocator.take_events()


def stored_events(request: Request, new: Sequence[int], block_tokens: int) -> Iterator[Stored]:
    """Yield an event for each run of a request's neighbouring blocks that were not remembered before.

    Blocks of new tokens whose rows differ from a prompt's (`Request.has_forms`) have none: no prompt finds them.

    Args:
        new: Indices of these blocks, ascending.
        block_tokens: Tokens of a block, over all DCP ranks.
    """
    limit = len(request.prompt_token_ids) // block_tokens if request.has_forms else None
    found = [index for index in new if limit is None or index < limit]
    for _, group in groupby(enumerate(found), lambda numbered: numbered[1] - numbered[0]):
        indices = [index for _, index in group]
        start, end = indices[0], indices[-1] + 1
        keys = request.block_keys(max(0, start - 1), end, block_tokens)
        previous = keys.pop(0) if start else None
        yield Stored(keys, previous, request.tokens(start * block_tokens, end * block_tokens), request.cache_salt)
