"""The pairs of ranks of two jobs that talk about a handoff (`sources_of`, `targets_of`)."""

from dcpmla.transfer.layout import CacheLayout, source_ranks


def sources_of(source: CacheLayout, target: CacheLayout, target_rank: int) -> dict[int, bool]:
    """Return the prefill ranks that a decode rank talks with, and whether each has rows for it.

    Prefill ranks whose rows other replicas send have one decode rank each, which lets them know of the handoff's end.
    """
    needed = [set(source_ranks(source, target, rank)) for rank in range(target.tp_size)]
    idle = set(range(source.tp_size)).difference(*needed)
    partners = {rank for rank in idle if rank % target.tp_size == target_rank}
    return {rank: rank in needed[target_rank] for rank in sorted(needed[target_rank] | partners)}


def targets_of(source: CacheLayout, target: CacheLayout, source_rank: int) -> dict[int, bool]:
    """Return the decode ranks that a prefill rank talks with, and whether it has rows for each."""
    pairs = {rank: sources_of(source, target, rank) for rank in range(target.tp_size)}
    return {rank: sources[source_rank] for rank, sources in pairs.items() if source_rank in sources}
