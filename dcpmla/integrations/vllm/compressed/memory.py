"""The bytes of a cache that vLLM's pages do not hold. Nothing here imports vLLM."""

from dataclasses import replace

from dcpmla.attention.layers.compressed.cache import CompressedPlan
from dcpmla.cache.carve import ALIGNMENT


def fixed_bytes(plan: CompressedPlan) -> int:
    """Return the bytes of a cache besides its blocks: windows, sums, and gaps between tensors.

    Args:
        plan: Plan of any number of blocks. Small blocks share pages of 64 rows, so the gaps depend on the number, with
            a period of 64.
    """
    numbers, block_bytes = range(64, 128), plan.bytes_per_block
    largest = max(replace(plan, num_blocks=number).bytes_per_rank - number * block_bytes for number in numbers)
    return largest + ALIGNMENT * len(plan.tensors)
