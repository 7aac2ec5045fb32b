"""Rows and keys that one new token reads in the caches of a model's layers, for predictions of a step's time."""

from dataclasses import dataclass


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
    """

    num_layers: int
    num_rows: int
    query_dim: int
    out_dim: int
    num_keys: int = 0
    num_candidates: int = 0
    state_bytes: int = 0
