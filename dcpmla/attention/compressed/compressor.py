"""The compressor of DeepSeek-V4's layers: all parts of a step into entries of one ratio."""

import torch
from torch import Tensor

from dcpmla.attention.compressed.cache import CompressedLayerCache
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
    layout = EntryLayout(entries.cos_sin, table, step.plan.entries_per_block(ratio), step.owner)
    for part in step.parts:
        compress_(pairs, bias, norm_weight, eps, sums, cache, part, layout, is_index, hadamard, latents, slots)


def compress_and_keep(
    pairs: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    ratio: int,
    step: CompressedMetadata,
    cache: CompressedLayerCache,
) -> tuple[Tensor, Tensor]:
    """Run `compress` for a layer's entries, and return this rank's complete ones before RoPE.

    Returns:
        Entries [T, D], each at the first token of its span; their slots in the index cache [T] int64, -1 elsewhere.
    """
    assert cache.sums is not None
    latents, first_row = pairs.new_empty(len(pairs), len(norm_weight)), step.plan.window_rows(ratio)
    slots = torch.full((len(pairs),), first_row - 1, dtype=torch.int64, device=pairs.device)
    options = bias, norm_weight, eps, ratio
    compress(pairs, *options, step, cache.sums, cache.rows, is_index=False, latents=latents, slots=slots)
    return latents, slots - first_row
