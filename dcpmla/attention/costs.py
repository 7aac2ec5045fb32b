"""Costs of attention in all layers, for predictions: rows that a new token reads, and time of pieces of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from dcpmla.attention.routes import Rates, RouteCosts
from dcpmla.config import DCPConfig, IndexerConfig, MLAConfig


@dataclass(frozen=True)
class LayerReads:
    """The rows and keys that one new token reads in a layer's caches, on all ranks of a DCP group together.

    Attributes:
        num_layers: Number of layers with these reads.
        num_rows: Rows that the token attends to: tokens, or entries and its window's tokens.
        query_dim, out_dim: Columns of queries and rows, and of partial outputs.
        num_keys: Index keys that are scored, if more exist than are selected; else 0.
        num_candidates: Maximum candidates of a rank.
    """

    num_layers: int
    num_rows: int
    query_dim: int
    out_dim: int
    num_keys: int = 0
    num_candidates: int = 0


class AttentionCosts(Protocol):
    """The modelled time of pieces of prompts in all layers of a kind of attention.

    Attributes:
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
    """

    @property
    def tokens_per_request(self) -> int: ...

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds that `new` tokens take in all layers, after `context` tokens before them."""

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces (new tokens, tokens before them) attend with absorbed queries."""

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether a step is faster as one graph, in which all pieces attend with absorbed queries."""


# Microseconds of a layer whose attention is launched between two graphs, beyond its kernels.
CUT_US = 150


class LatentCosts:
    """Attention of all layers of MLA, each by the cheaper route.

    Args:
        config: Geometry of the layers.
        num_layers, num_index_layers: Number of layers, and of layers with an indexer of their own.
        dcp: Layout and format of the cache.
        rates: Speeds of the GPU.
    """

    def __init__(self, config: MLAConfig, num_layers: int, num_index_layers: int, dcp: DCPConfig, rates: Rates) -> None:
        self._routes, self._num_layers = RouteCosts(config, dcp, rates), num_layers
        self._topk, self._score_us = inf, 0.0  # time of a key's scores in all layers with an indexer
        if config.indexer is not None:
            self._topk, self._score_us = config.indexer.topk, num_index_layers * score_us(config.indexer, dcp, rates)

    @property
    def tokens_per_request(self) -> int:
        """Return the width of the pieces that absorbed attention cuts requests into."""
        return self._routes.tokens_per_request

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of all layers (`AttentionCosts.piece_us`)."""
        routes = self._routes
        mha_us = routes.mha_us(new, context, routes.num_tiles(new))
        time = self._num_layers * min(mha_us, routes.absorbed_us(new, context))
        if context + new > self._topk:
            time += self._score_us * num_pairs(new, context, inf)
        return time

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces attend with absorbed queries (`RouteCosts.choose_absorbed`)."""
        return self._routes.choose_absorbed(pieces)

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether absorbed attention to all pieces costs less than the launches that it saves."""
        routes = self._routes
        num_tiles = sum(routes.num_tiles(new) for new, _ in pieces)
        lost_us = sum(max(0.0, routes.absorbed_us(*piece) - routes.mha_us(*piece, num_tiles)) for piece in pieces)
        return lost_us < CUT_US


def score_us(indexer: IndexerConfig, dcp: DCPConfig, rates: Rates) -> float:
    """Return the microseconds that an indexer takes for one token's scores of one key, which one rank has."""
    flops = 2 * indexer.num_heads * indexer.head_dim / dcp.decode_context_parallel_size
    return flops / rates.decode_tflops / 1e6


def num_pairs(new: int, context: int, limit: float) -> float:
    """Return how many pairs of a new token and one it attends to: itself or an earlier one, at most `limit`."""
    return _pairs_up_to(context + new, limit) - _pairs_up_to(context, limit)


def _pairs_up_to(end: int, limit: float) -> float:
    if end <= limit:
        return end * (end + 1) / 2
    return limit * (limit + 1) / 2 + (end - limit) * limit
