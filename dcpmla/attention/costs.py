"""Costs of attention: what a new token reads in a layer, and the modelled time of pieces of prompts.

A piece attends in one of two ways: with up-projected keys (MHA), or with absorbed queries. MHA projects the whole
context to keys and values, whatever the number of new tokens; absorbed attention multiplies wider rows, but reads the
latents as they are cached. Both give the same result. The choice follows from modelled times, which depend on global
numbers alone, so all ranks of a group choose alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Protocol

import torch

from dcpmla.cache.formats import row_width, storage_dtype
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.indexer_config import IndexerConfig

# Maximum query rows (tokens x heads of a group) of a segment, two tiles of 64 that read the same keys.
SEGMENT_ROWS = 128
_QUERY_TILE = 128  # new tokens that an MHA program takes; fewer take as long
_ELEMENT_BYTES = 2  # width of keys, values and queries


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of attention's kernels on one GPU. The defaults were measured on an H100 (`bench turns`).

    Attributes:
        matmul_tflops: Rate of the up-projection.
        mha_tflops, masked_tflops: Rate of MHA, and of MHA under a mask of selected tokens.
        absorbed_tflops, selected_tflops: Rate of absorbed attention to all tokens, and to selected ones.
        gb_per_s: Memory bandwidth.
        link_gb_per_s: Bandwidth of the exchange into one rank.
        decode_tflops, decode_gb_per_s: Rates of a decode kernel, which reads a cache row by row.
        num_processors: Multiprocessors of the GPU.
        call_us: Time of the kernels that a route launches besides, of a piece without and with a context alike.
    """

    matmul_tflops: float = 650
    mha_tflops: float = 600
    masked_tflops: float = 540
    absorbed_tflops: float = 520
    selected_tflops: float = 450
    gb_per_s: float = 2700
    link_gb_per_s: float = 275
    decode_tflops: float = 650
    decode_gb_per_s: float = 4460
    num_processors: int = 132
    call_us: float = 10


@dataclass(frozen=True)
class LayerReads:
    """The rows and keys that one new token reads in a layer's cache, on all ranks of a DCP group together.

    Attributes:
        num_rows: Rows that the token attends to: tokens, or entries and its window's tokens.
        query_dim, out_dim: Columns of queries and rows, and of partial outputs.
        num_keys: Index keys that are scored, if more exist than are selected; else 0.
        num_candidates: Maximum candidates of a rank.
        state_bytes: Bytes of a request's state that the token reads and writes on all TP ranks together, in a layer of
            linear attention, which reads no rows.
    """

    num_rows: int
    query_dim: int
    out_dim: int
    num_keys: int = 0
    num_candidates: int = 0
    state_bytes: int = 0


class LayerCosts(Protocol):
    """The modelled time of pieces of prompts in one layer.

    Attributes:
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
    """

    @property
    def tokens_per_request(self) -> int: ...

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds that `new` tokens take, after `context` tokens before them."""

    def lost_us(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        """Return how many microseconds longer each piece of a step (new tokens, tokens before them) takes with absorbed
        queries; infinity for a layer that cannot absorb them.
        """


@dataclass(frozen=True)
class RouteCosts:
    """Modelled time of both routes in one layer on one rank.

    Args:
        config: Geometry of the layer, with an indexer or a window where it leaves tokens out.
        dcp: Layout and format of the cache.
        rates: Speeds of the GPU.
        has_indexer: Whether the layer has an indexer of its own.
    """

    config: MLAConfig
    dcp: DCPConfig
    rates: Rates = Rates()
    has_indexer: bool = False

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces of a step attend with absorbed queries.

        Args:
            pieces: Number of new tokens of each piece, and of tokens before them.
        """
        return [lost < 0 for lost in self.lost_us(pieces)]

    def lost_us(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        """Return how many microseconds longer each piece takes with absorbed queries (`LayerCosts.lost_us`)."""
        num_tiles = sum(self.num_tiles(new) for new, _ in pieces)
        return [self.absorbed_us(*piece) - self.mha_us(*piece, num_tiles) for piece in pieces]

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of a piece alone, by the faster route (`LayerCosts.piece_us`)."""
        time = min(self.mha_us(new, context, self.num_tiles(new)), self.absorbed_us(new, context))
        indexer = self.config.indexer
        if indexer is not None and self.has_indexer and context + new > indexer.topk:
            time += score_us(indexer, self.dcp, self.rates) * num_pairs(new, context, inf)
        return time

    def num_tiles(self, new: int) -> int:
        """Return how many MHA programs a piece of `new` tokens has over all heads."""
        return self._num_heads * -(-new // _QUERY_TILE)

    def mha_us(self, new: int, context: int, num_tiles: int) -> float:
        """Return the microseconds of MHA: the context gathered, all keys up-projected, then read and multiplied.

        A piece alone takes no less with more new tokens, nor with a longer context.

        Args:
            new, context: Number of new tokens, and of tokens before them.
            num_tiles: Programs of all pieces of the step (`num_tiles`), which may be too few for the GPU.
        """
        config, rates, size = self.config, self.rates, self.dcp.decode_context_parallel_size
        context = context if config.window is None else min(context, config.window)
        num_keys, heads = context + new, self._num_heads
        kv_width = heads * (config.qk_nope_head_dim + config.v_head_dim)
        kv_us = _read_us(num_keys * kv_width * _ELEMENT_BYTES, rates)
        project_us = max(kv_us, _multiply_us(num_keys * kv_width * config.kv_lora_rank, rates.matmul_tflops))
        width = config.qk_head_dim + config.v_head_dim
        # Scores are computed in whole tiles: for new tokens, the tiles on and below the diagonal, within a window.
        rows = -(-new // _QUERY_TILE) * _QUERY_TILE
        num_own = (rows + _QUERY_TILE) // 2
        if config.window is not None:
            num_own = min(num_own, config.window + _QUERY_TILE)
        num_pairs = rows * (context + num_own)
        tflops = rates.masked_tflops if self._selects(num_keys) else rates.mha_tflops
        share = min(1.0, num_tiles / rates.num_processors)
        attend_us = max(kv_us, _multiply_us(num_pairs * heads * width, tflops * share))
        # Cached rows are read, gathered and put in order: two passes. Other ranks' come while attention runs.
        latents_us = _read_us(4 * context * self._row_bytes, rates)
        link_us = context * self._row_bytes * (size - 1) / size / rates.link_gb_per_s / 1e3
        return rates.call_us * (2 if context else 1) + latents_us + project_us + max(attend_us, link_us)

    def absorbed_us(self, new: int, context: int) -> float:
        """Return the microseconds of absorbed attention: queries gathered, each rank's latents read and multiplied by
        all heads of the DCP group, partial results merged.

        Args:
            new, context: Number of new tokens, and of tokens before them.
        """
        config, rates, size = self.config, self.rates, self.dcp.decode_context_parallel_size
        num_keys, heads = context + new, self._num_heads
        rank, columns = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
        num_pairs, tflops = new * context + new * (new + 1) // 2, rates.absorbed_tflops
        # Tokens that attend side by side share the rows of the cache that they read.
        num_rows = -(-new // self.tokens_per_request) * num_keys / size
        if self._selects(num_keys):
            assert config.topk is not None
            num_pairs, tflops = new * config.topk, rates.selected_tflops
            num_rows = num_pairs / size
        flops_us = _multiply_us(num_pairs * heads * (config.latent_dim + rank), tflops)
        project_us = _multiply_us(new * heads * rank * columns, rates.matmul_tflops)
        sent_bytes = new * heads * (size - 1) * (config.latent_dim + rank) * _ELEMENT_BYTES
        link_us = sent_bytes / rates.link_gb_per_s / 1e3
        return rates.call_us + max(flops_us, _read_us(num_rows * self._row_bytes, rates)) + project_us + link_us

    @cached_property
    def tokens_per_request(self) -> int:
        """Return how many tokens absorbed attention takes at a time (`StepBuilder.build`, max_decode_query_len)."""
        return max(1, SEGMENT_ROWS // (self._num_heads * self.dcp.decode_context_parallel_size))

    @cached_property
    def _num_heads(self) -> int:
        return self.config.heads_per_rank(self.dcp.tensor_parallel_size)

    @cached_property
    def _row_bytes(self) -> int:
        storage = storage_dtype(self.dcp.kv_cache_dtype, torch.bfloat16)
        return row_width(storage, self.config.kv_lora_rank, self.config.qk_rope_head_dim) * storage.itemsize

    def _selects(self, num_keys: int) -> bool:
        """Return whether an indexer or a window leaves some of the keys out."""
        return self.config.topk is not None and num_keys > self.config.topk


# Microseconds of a layer whose attention is launched between two graphs, beyond its kernels.
CUT_US = 150


class StackCosts:
    """The modelled time of pieces of prompts in all layers of a model. A piece takes the same route in all layers.

    Args:
        layers: Costs of each sort of layers, with their number.
    Attributes:
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
    """

    def __init__(self, layers: Mapping[LayerCosts, int]) -> None:
        self._layers = layers
        self.tokens_per_request = min(layer.tokens_per_request for layer in layers)

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds that `new` tokens take in all layers, after `context` tokens before them."""
        return sum(number * layer.piece_us(new, context) for layer, number in self._layers.items())

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces (new tokens, tokens before them) attend with absorbed queries."""
        return [lost < 0 for lost in self._lost_us(pieces)]

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether a step is faster as one graph, in which all pieces attend with absorbed queries: whether they
        lose less time than the launches that it saves.
        """
        return sum(max(0.0, lost) for lost in self._lost_us(pieces)) < sum(self._layers.values()) * CUT_US

    def _lost_us(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        """Return how many microseconds longer each piece takes in all layers with absorbed queries."""
        losses = [[number * lost for lost in layer.lost_us(pieces)] for layer, number in self._layers.items()]
        return [sum(of_piece) for of_piece in zip(*losses, strict=True)]


def score_us(indexer: IndexerConfig, dcp: DCPConfig, rates: Rates) -> float:
    """Return the microseconds that an indexer takes for one token's score of another token, whose key one rank has."""
    flops = 2 * indexer.num_heads * indexer.head_dim / indexer.pool_size / dcp.decode_context_parallel_size
    return flops / rates.decode_tflops / 1e6


def num_pairs(new: int, context: int, limit: float) -> float:
    """Return how many pairs of a new token and one it attends to: itself or an earlier one, at most `limit`."""
    return _pairs_up_to(context + new, limit) - _pairs_up_to(context, limit)


def _pairs_up_to(end: int, limit: float) -> float:
    if end <= limit:
        return end * (end + 1) / 2
    return limit * (limit + 1) / 2 + (end - limit) * limit


def _multiply_us(num_products: float, tflops: float) -> float:
    """Return the microseconds of num_products products and as many sums."""
    return 2 * num_products / tflops / 1e6


def _read_us(num_bytes: float, rates: Rates) -> float:
    return num_bytes / rates.gb_per_s / 1e3
