"""The host memory below an engine's cache, by the option --kv-offloading-size."""

import psutil

from dcpmla.cache.host import HostMemory
from dcpmla.cache.layers import Cache
from dcpmla.cache.tier import HostTier, count_slots

_GIB = 1 << 30


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
    num_blocks, num_states = count_slots(num_bytes, memory.block_bytes, memory.state_bytes, cache.sizes.block_tokens)
    if not num_blocks:
        least = memory.block_bytes + memory.state_bytes
        raise ValueError(
            f"kv_offloading_size (--kv-offloading-size) is {size:g} GiB, {num_bytes:,} bytes for each of {num_ranks} "
            f"ranks; a block and a state take {least:,}"
        )
    memory.allocate(num_blocks, num_states)
    return memory, HostTier(num_blocks, num_states)
