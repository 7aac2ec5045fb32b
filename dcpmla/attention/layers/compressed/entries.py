"""Entries and index keys that the tokens of a step complete, from a layer's projections into its cache.

Functions take the layer, its projections `down` (`CompressedWeights.down_project`), the step and the cache. They write
nothing in layers without such entries or keys.
"""

import torch
from torch import Tensor

from dcpmla.attention.layers.compressed.cache import CompressedLayerCache
from dcpmla.attention.layers.compressed.compressor_weights import CompressorWeights
from dcpmla.attention.layers.compressed.step import CompressedMetadata
from dcpmla.attention.layers.compressed.weights import CompressedWeights
from dcpmla.attention.select.calls import IndexNorm, IndexRotation
from dcpmla.attention.select.compressor import compress_
from dcpmla.attention.select.entries import EntryLayout, Pooling
from dcpmla.attention.select.projections import norm_rope_index_keys


def write_entries(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: CompressedLayerCache
) -> None:
    """Pool tokens into entries, and write them, in layers whose index keys do not come from entries."""
    if cache.sums is not None and not layer.config.has_entry_keys:
        _compress(_pooling(layer, layer.compressor, step, down[1], cache.sums, cache.rows), step)


def write_index_keys(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: CompressedLayerCache
) -> None:
    """Pool tokens into index keys, and write them, in layers with an indexer whose keys do not come from entries."""
    if cache.index_sums is not None and cache.index_keys is not None:
        call = _pooling(layer, layer.index_compressor, step, down[2], cache.index_sums, cache.index_keys, True)
        _compress(call._replace(hadamard=layer.dcp.index_hadamard), step)


def write_entries_and_keys(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: CompressedLayerCache
) -> None:
    """Pool tokens into entries, and write them and the index keys that are projected from them (`has_entry_keys`)."""
    if cache.sums is None:
        return
    weights, pairs, first_row = layer.compressor, down[1], step.plan.window_rows(layer.kind.ratio)
    # This rank's complete entries before RoPE, each at the first token of its span, and their slots.
    latents = pairs.new_empty(len(pairs), len(weights.norm))
    slots = torch.full((len(pairs),), first_row - 1, dtype=torch.int64, device=pairs.device)
    call = _pooling(layer, weights, step, pairs, cache.sums, cache.rows)
    _compress(call._replace(latents=latents, slots=slots), step)
    if cache.index_keys is None:
        return
    norm = IndexNorm(layer.index_k_norm, None, layer.config.rms_norm_eps)
    rotation = IndexRotation(call.layout.cos_sin, True, layer.dcp.index_hadamard)
    keys, index_slots = layer.index_k_proj(latents), slots - first_row  # -1 at tokens without an entry
    norm_rope_index_keys(keys, cache.index_keys, index_slots, norm, rotation)


def _pooling(
    layer: CompressedWeights,
    weights: CompressorWeights,
    step: CompressedMetadata,
    pairs: Tensor,
    sums: Tensor,
    cache: Tensor,
    is_index: bool = False,
) -> Pooling:
    """Return the arguments of `compress_` for a step's entries or index keys."""
    ratio, eps = layer.kind.ratio, layer.config.rms_norm_eps
    entries = step.entries[ratio]
    table = step.block_table if is_index else entries.block_table
    layout = EntryLayout(entries.cos_sin, table, step.plan.entries_per_block(ratio), step.owner)
    return Pooling(pairs, weights.bias, weights.norm, eps, sums, cache, layout, is_index)


def _compress(call: Pooling, step: CompressedMetadata) -> None:
    for part in step.parts:
        compress_(call, part)
