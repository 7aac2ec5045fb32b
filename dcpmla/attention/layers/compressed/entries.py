"""Entries and index keys that the tokens of a step complete, from a layer's projections into its cache.

Functions take the layer, its projections `down` (`CompressedWeights.down_project`), the step and the cache. They write
nothing in layers without such entries or keys.
"""

from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.layers.compressed.step import CompressedMetadata
from dcpmla.attention.layers.compressed.weights import CompressedWeights, CompressorWeights
from dcpmla.attention.select.calls import IndexNorm, IndexRotation
from dcpmla.attention.select.compressor import compress_
from dcpmla.attention.select.entries import EntryLayout, Pooling
from dcpmla.attention.select.projections import norm_rope_index_keys
from dcpmla.cache.layers import LayerCache


def write_entries(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: LayerCache
) -> None:
    """Pool tokens into entries, and write them, in layers whose index keys do not come from entries."""
    if layer.writes and not layer.config.has_entry_keys:
        _pool(layer, layer.compressor, step, down[1], cache.states[0], cache.latents)


def write_index_keys(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: LayerCache
) -> None:
    """Pool tokens into index keys, and write them, in layers with an indexer whose keys do not come from entries."""
    if layer.kind.has_indexer and not layer.config.has_entry_keys:
        assert cache.index_keys is not None
        options = {"is_index": True, "hadamard": layer.dcp.index_hadamard}
        _pool(layer, layer.index_compressor, step, down[2], cache.states[1], cache.index_keys, **options)


def write_entries_and_keys(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: LayerCache
) -> None:
    """Pool tokens into entries, and write them and the index keys that are projected from them (`has_entry_keys`)."""
    if not layer.writes:
        return
    pairs, first_row = down[1], step.plan.window_rows(layer.kind.ratio)
    # This rank's complete entries before RoPE, each at the first token of its span, and their slots.
    latents = pairs.new_empty(len(pairs), layer.config.head_dim)
    slots = torch.full((len(pairs),), first_row - 1, dtype=torch.int64, device=pairs.device)
    _pool(layer, layer.compressor, step, pairs, cache.states[0], cache.latents, latents=latents, slots=slots)
    if cache.index_keys is None:
        return
    norm = IndexNorm(layer.index_k_norm, None, layer.config.rms_norm_eps)
    rotation = IndexRotation(step.entries[layer.kind.ratio].cos_sin, True, layer.dcp.index_hadamard)
    keys, index_slots = layer.index_k_proj(latents), slots - first_row  # -1 at tokens without an entry
    norm_rope_index_keys(keys, cache.index_keys, index_slots, norm, rotation)


def _pool(
    layer: CompressedWeights,
    weights: CompressorWeights,
    step: CompressedMetadata,
    pairs: Tensor,
    sums: Tensor,
    cache: Tensor,
    is_index: bool = False,
    **options: Any,
) -> None:
    """Pool the pairs of a step's tokens part by part, with options of `Pooling`."""
    ratio, eps = layer.kind.ratio, layer.config.rms_norm_eps
    entries = step.entries[ratio]
    table = step.block_table if is_index else entries.block_table
    layout = EntryLayout(entries.cos_sin, table, step.plan.entries_per_block(ratio), step.owner)
    written = sums.flatten(0, 1), cache, layout
    call = Pooling(pairs, weights.bias, weights.norm, eps, *written, is_index, **options)
    for part in step.parts:
        compress_(call, part)
