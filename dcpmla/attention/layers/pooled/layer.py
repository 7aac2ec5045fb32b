"""Sparse MLA without positions that attends to pools of tokens (GLM-5-Next), and its indexer."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.layers.pooled.expand import expand_pools
from dcpmla.attention.layers.pooled.step import PoolMetadata
from dcpmla.attention.mla.layer import MLAAttention
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.calls import IndexRotation
from dcpmla.attention.select.compressor import compress_
from dcpmla.attention.select.entries import Pooling
from dcpmla.attention.select.indexer import Indexer
from dcpmla.attention.select.projections import rope_index_queries
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SparseMetadata
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.linear import Linear, Weight, fill, read_linear, read_weight
from dcpmla.parallel.quantized import PlainRows


class PoolIndexer(Indexer):
    """The scorer of all whole pools before each token, and the selector of the best.

    A pool's key is the sum of its tokens' keys, column by column weighted by a softmax over the tokens' gates. The sums
    of an unfinished pool are part of a request's state, the same on all ranks; the rank that owns the pool caches its
    key with the last token.

    Args:
        config, placement: Arguments of `Indexer`; keys and queries have no positions.
    Source: transformers' GLM-5-Next; vLLM's, whose cache holds whole pools, too.
    """

    pool_bias: Tensor

    def __init__(self, config: MLAConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.pool_gate = Linear(config.hidden_size, self.config.head_dim, **placement.factory_kwargs)
        shape = self.config.pool_size, self.config.head_dim
        self.register_buffer("pool_bias", torch.empty(shape, device=placement.device))

    def forward(self, hidden_states: PlainRows, q_c: PlainRows, cache: LayerCache, step: StepMetadata) -> None:
        """Cache the keys of the pools that the tokens complete, and write the step's selection (`Indexer.forward`).
        Collective.
        """
        config, dcp, sparse, pools = self.config, self.dcp, step.get(SparseMetadata), step.get(PoolMetadata)
        assert sparse is not None
        assert pools is not None
        assert cache.index_keys is not None
        (index_sums,) = cache.states  # sums of index keys in progress [num_states, num_copies, 1, 3, D] float32
        keys, weights = self.down_project(hidden_states)
        keys = F.layer_norm(keys, keys.shape[1:], self.k_norm.weight, self.k_norm.bias, config.norm_eps)
        pairs, sums = torch.cat([keys, self.pool_gate(hidden_states)], -1), index_sums.flatten(0, 1)
        written = sums, cache.index_keys, pools.entries
        call = Pooling(pairs, self.pool_bias, None, 0.0, *written, is_index=True, hadamard=dcp.index_hadamard)
        for part in pools.parts:
            compress_(call, part)
        if sparse.selection is None:
            return
        assert pools.selection is not None
        q = self.wq_b(q_c).unflatten(-1, (config.num_heads, config.head_dim))
        is_fp8 = dcp.index_cache_dtype == "fp8"
        q, weights = rope_index_queries(q, weights, IndexRotation(None, False, dcp.index_hadamard), is_fp8)
        self.selector.select(q, weights, cache.index_keys, pools.visible, sparse.block_table, pools.selection)
        layout = SlotLayout(sparse.block_table, sparse.request, dcp.block_size, pools.entries.owner)
        expand_pools(pools.selection.positions, sparse.seq_lens, config.pool_size, layout, sparse.selection)

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read every parameter (`Indexer.load_weights`), with the gates' projection and bias."""
        super().load_weights(weights)
        self.pool_gate.load(
            read_linear(weights, "index_kpool_compress_gate", (self.config.head_dim, self.pool_gate.in_features))
        )
        fill(self.pool_bias, read_weight(weights, "index_kpool_compress_ape", tuple(self.pool_bias.shape)))


class PooledAttention(MLAAttention):
    """Sparse MLA over pools, whose q_pe and k_pe are zeros (config.projects_pe false)."""

    def new_indexer(self) -> PoolIndexer:
        """Return the layer's indexer."""
        return PoolIndexer(self.config, self._placement)
