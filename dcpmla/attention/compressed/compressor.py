"""The compressor of DeepSeek-V4's layers: all parts of a step into entries of one ratio."""

from torch import Tensor

from dcpmla.attention.compressed.step import CompressedMetadata
from dcpmla.attention.pooled.compressor import compress_
from dcpmla.attention.pooled.entries import EntryLayout


def compress(
    pairs: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    ratio: int,
    step: CompressedMetadata,
    sums: Tensor,
    cache: Tensor,
    *,
    is_index: bool,
    hadamard: bool = False,
    latents: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Pool a step's tokens into entries of `ratio` tokens, and write this rank's complete ones (`compress_`)."""
    entries = step.entries[ratio]
    table = step.block_table if is_index else entries.block_table
    layout = EntryLayout(entries.cos_sin, table, step.plan.entries_per_block(ratio), *step.layout)
    for part in step.parts:
        compress_(pairs, bias, norm_weight, eps, sums, cache, part, layout, is_index, hadamard, latents, slots)
