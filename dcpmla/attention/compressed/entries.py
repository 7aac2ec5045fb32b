"""Entries and index keys that the tokens of a step complete, from a layer's projections into its cache.

Functions take the layer, its projections `down` (`CompressedWeights.down_project`), the step and the cache. They write
nothing in layers without such entries or keys.
"""

from torch import Tensor

from dcpmla.attention.compressed.cache import CompressedLayerCache
from dcpmla.attention.compressed.compressor import compress, compress_and_keep
from dcpmla.attention.compressed.step import CompressedMetadata
from dcpmla.attention.compressed.weights import CompressedWeights
from dcpmla.attention.sparse.projections import norm_rope_index_keys


def write_entries(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: CompressedLayerCache
) -> None:
    """Pool tokens into entries, and write them, in layers whose index keys do not come from entries."""
    if cache.sums is None or layer.config.has_entry_keys:
        return
    weights = layer.compressor
    options = weights.bias, weights.norm, layer.config.rms_norm_eps, layer.kind.ratio
    compress(down[1], *options, step, cache.sums, cache.rows, is_index=False)


def write_index_keys(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: CompressedLayerCache
) -> None:
    """Pool tokens into index keys, and write them, in layers with an indexer whose keys do not come from entries."""
    if cache.index_sums is None or cache.index_keys is None:
        return
    weights, hadamard = layer.index_compressor, layer.dcp.index_hadamard
    options = weights.bias, weights.norm, layer.config.rms_norm_eps, layer.kind.ratio
    compress(down[2], *options, step, cache.index_sums, cache.index_keys, is_index=True, hadamard=hadamard)


def write_entries_and_keys(
    layer: CompressedWeights, down: tuple[Tensor, ...], step: CompressedMetadata, cache: CompressedLayerCache
) -> None:
    """Pool tokens into entries, and write them and the index keys that are projected from them (`has_entry_keys`)."""
    if cache.sums is None:
        return
    options = layer.compressor.bias, layer.compressor.norm, layer.config.rms_norm_eps, layer.kind.ratio
    latents, slots = compress_and_keep(down[1], *options, step, cache)
    if cache.index_keys is None:
        return
    keys, cos_sin = layer.index_k_proj(latents), step.entries[layer.kind.ratio].cos_sin
    norm = layer.index_k_norm, None
    rotation = cos_sin, True, layer.dcp.index_hadamard
    norm_rope_index_keys(keys, cache.index_keys, slots, *norm, *rotation, layer.config.rms_norm_eps)
