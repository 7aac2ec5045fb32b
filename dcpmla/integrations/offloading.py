"""The host memory behind an engine's cache, by the option --kv-offloading-size."""

import psutil

from dcpmla.cache.host import HostMemory
from dcpmla.cache.plan import Cache
from dcpmla.cache.tier import HostTier

_GIB = 1 << 30
_TOKENS_PER_STATE = 8192  # of blocks, for each slot of a state


def make_host_memory(
    cache: Cache, size: float | None, num_ranks: int, num_local_ranks: int
) -> tuple[HostMemory | None, HostTier]:
    """Allocate a rank's host memory; return it, or None without a size, and the bookkeeping of its content.

    Args:
        size: GiB of all ranks together; None for no host memory.
        num_ranks: Number of ranks.
        num_local_ranks: Number of ranks on this host.
    Raises:
        ValueError: The size holds no block, or the host has less memory.
    """
    if size is None:
        return None, HostTier()
    memory, num_bytes = HostMemory(cache), int(size * _GIB) // num_ranks
    available = psutil.virtual_memory().available // num_local_ranks
    if num_bytes > available:
        raise ValueError(
            f"kv_offloading_size (--kv-offloading-size) is {size:g} GiB, {num_bytes:,} bytes for each of {num_ranks} "
            f"ranks; this host has {available:,} bytes free for each of its {num_local_ranks} ranks"
        )
    num_blocks, num_states = divide(num_bytes, memory, cache.sizes.block_tokens)
    if not num_blocks:
        least = memory.block_bytes + memory.state_bytes
        raise ValueError(
            f"kv_offloading_size (--kv-offloading-size) is {size:g} GiB, {num_bytes:,} bytes for each of {num_ranks} "
            f"ranks; a block and a state take {least:,}"
        )
    memory.allocate(num_blocks, num_states)
    return memory, HostTier(num_blocks, num_states)


def divide(num_bytes: int, memory: HostMemory, block_tokens: int) -> tuple[int, int]:
    """Return how many blocks and states share a rank's bytes: a state for every 8,192 tokens of blocks, at least one.

    Args:
        block_tokens: Tokens of a block.
    """
    if not memory.state_bytes:
        return num_bytes // memory.block_bytes if memory.block_bytes else 0, 0
    blocks_per_state = max(1, _TOKENS_PER_STATE // block_tokens)
    num_states = max(1, num_bytes // (memory.state_bytes + blocks_per_state * memory.block_bytes))
    return max(0, num_bytes - num_states * memory.state_bytes) // max(1, memory.block_bytes), num_states
