"""The arguments of the indexer's operators."""

from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.cache.index_keys import NORM_EPS


class IndexNorm(NamedTuple):
    """The norm of the indexer's keys.

    Attributes:
        weight, bias: [D] of a LayerNorm; without a bias of an RMSNorm.
        eps: Epsilon of the norm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float = NORM_EPS


class IndexRotation(NamedTuple):
    """The rotation of the indexer's keys and queries.

    Attributes:
        cos_sin: [T, R] float32 as in `apply_rope`, for the first R of D columns; None leaves them as they are.
        interleaved: Layout of pairs, as in `apply_rope`.
        hadamard: Whether to transform keys and queries by a Hadamard matrix over sqrt(D): scores stay, but e4m3 rounds
            more even values.
    """

    cos_sin: Tensor | None
    interleaved: bool
    hadamard: bool


class IndexQueries(NamedTuple):
    """The indexer's queries, and the keys that they are scored with.

    Attributes:
        q: Queries [T, H, D] in the model's dtype, or e4m3 with an fp8 index cache.
        weights: Weights of heads [T, H] float32, times all factors, including the scales of e4m3 queries.
        index_cache: Index cache [num_blocks, block_size, width] in one of the formats of `dcpmla.cache.index_keys`.
        block_table, request, seq_lens, local_seq_lens: Columns of `SparseMetadata` for these tokens.
        topk: Number of selected tokens. Rows with at most topk tokens (seq_lens) are not scored.
    """

    q: Tensor
    weights: Tensor
    index_cache: Tensor
    block_table: Tensor
    request: Tensor
    seq_lens: Tensor
    local_seq_lens: Tensor
    topk: int

    def new_scores(self) -> Tensor:
        """Allocate scores [T, max_blocks x block_size] float32."""
        num_columns = self.block_table.shape[1] * self.index_cache.shape[1]
        return self.q.new_empty(self.q.shape[0], num_columns, dtype=torch.float32)
