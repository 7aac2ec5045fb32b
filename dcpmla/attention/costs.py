"""Costs of attention in all layers, for predictions: rows that a new token reads, and time of pieces of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from dcpmla.attention.routes import Rates, RouteCosts
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.indexer_config import IndexerConfig


@dataclass(frozen=True)
class LayerReads:
    """The rows and keys that one new token reads in a layer's caches, on all ranks of a DCP group together.

    Attributes:
        num_layers: Number of layers with these reads.
        num_rows: Rows that the token attends to: tokens, or entries and its window's tokens.
        query_dim, out_dim: Columns of queries and rows, and of partial outputs.
        num_keys: Index keys that are scored, if more exist than are selected; else 0.
        num_candidates: Maximum candidates of a rank.
        state_bytes: Bytes of a request's state that the token reads and writes on all TP ranks together, in a layer of
            linear attention, which reads no rows.
        config: Geometry of the layers, if it is not `AttentionKind.config`.
    """

    num_layers: int
    num_rows: int
    query_dim: int
    out_dim: int
    num_keys: int = 0
    num_candidates: int = 0
    state_bytes: int = 0
    config: MLAConfig | None = None


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


@dataclass(frozen=True, kw_only=True)
class LatentCosts(RouteCosts):
    """Attention of all layers of MLA, each by the cheaper route.

    Args:
        num_layers, num_index_layers: Number of layers, and of layers with an indexer of their own.
    """

    num_layers: int
    num_index_layers: int

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of all layers (`AttentionCosts.piece_us`)."""
        mha_us = self.mha_us(new, context, self.num_tiles(new))
        time = self.num_layers * min(mha_us, self.absorbed_us(new, context))
        indexer = self.config.indexer
        if indexer is not None and context + new > indexer.topk:
            index_us = self.num_index_layers * score_us(indexer, self.dcp, self.rates)
            time += index_us * num_pairs(new, context, inf)
        return time

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether absorbed attention to all pieces costs less than the launches that it saves."""
        num_tiles = sum(self.num_tiles(new) for new, _ in pieces)
        lost_us = sum(max(0.0, self.absorbed_us(*piece) - self.mha_us(*piece, num_tiles)) for piece in pieces)
        return lost_us < CUT_US


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
