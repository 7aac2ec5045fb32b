"""The pairs of ranks of two jobs that talk about a handoff (`sources_of`, `targets_of`)."""

from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.route import source_ranks


def sources_of(source: CacheLayout, target: CacheLayout, target_rank: int) -> dict[int, bool]:
    """Return the prefill ranks that a decode rank talks with, and whether each has rows for it.

    A prefill rank whose rows other replicas send talks with one decode rank, to know when the handoff has ended.
    """
    return {
        source_rank: has_rows
        for (source_rank, rank), has_rows in _find_pairs(source, target).items()
        if rank == target_rank
    }


def targets_of(source: CacheLayout, target: CacheLayout, source_rank: int) -> dict[int, bool]:
    """Return the decode ranks that a prefill rank talks with, and whether it has rows for each."""
    return {
        target_rank: has_rows
        for (rank, target_rank), has_rows in _find_pairs(source, target).items()
        if rank == source_rank
    }


def _find_pairs(source: CacheLayout, target: CacheLayout) -> dict[tuple[int, int], bool]:
    """Return the pairs of a prefill rank and a decode rank, and whether rows move between them."""
    pairs = {(rank, there): True for there in range(target.tp_size) for rank in source_ranks(source, target, there)}
    idle = set(range(source.tp_size)).difference(rank for rank, _ in pairs)
    return pairs | {(rank, rank % target.tp_size): False for rank in sorted(idle)}
