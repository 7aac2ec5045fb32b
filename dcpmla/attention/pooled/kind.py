"""Layers of linear attention and of sparse MLA over pools in one model (GLM-5-Next), as a kind of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from dcpmla.attention.costs import LayerReads
from dcpmla.attention.kind import AttentionLayer, Rotary
from dcpmla.attention.linear.cache import HybridPlan
from dcpmla.attention.linear.kind import HybridKind
from dcpmla.attention.linear.layer import DeltaAttention
from dcpmla.attention.placement import Placement, check_order
from dcpmla.attention.pooled.cache import PooledPlan
from dcpmla.attention.pooled.layer import PooledAttention
from dcpmla.attention.pooled.step import with_pools
from dcpmla.attention.sparse.step import SelectedTokens
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig
from dcpmla.indexer_config import IndexerConfig


@dataclass(frozen=True, kw_only=True)
class PooledKind(HybridKind):
    """Layers of linear attention, and of sparse MLA without positions that selects pools of tokens.

    Attributes:
        index_layers: Numbers of the layers with an indexer, ascending; other layers of MLA attend to the selection of
            the latest one before.
    """

    index_layers: tuple[int, ...]

    @property
    def indexer(self) -> IndexerConfig:
        """Return the geometry of the indexers."""
        assert self.config.indexer is not None
        return self.config.indexer

    @property
    def num_index_layers(self) -> int:
        """Return the number of layers with an indexer of their own."""
        return len(self.index_layers)

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or blocks do not hold whole pools."""
        self.config.heads_per_rank(dcp.tensor_parallel_size)
        check_order(self.config, dcp)
        self.delta.heads_per_rank(dcp.tensor_parallel_size)
        granule = self.indexer.pool_size * dcp.cp_kv_cache_interleave_size
        if dcp.block_size % granule:
            raise ValueError(
                f"block_size (--block-size) is {dcp.block_size}; it must be a multiple of {granule}: whole pools of "
                f"{self.indexer.pool_size} tokens (the config's index_kpool), in groups of "
                f"{dcp.cp_kv_cache_interleave_size} (--cp-kv-cache-interleave-size)"
            )

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache of latents, index keys and states."""
        self.check_layout(dcp)
        plan = super().plan_cache(dcp, seq_lens, dtype, num_states, num_drafts)
        assert isinstance(plan, HybridPlan)
        order = [layer for layer in range(self.num_layers) if not self.is_linear[layer]]
        latents = replace(plan.latents, index_layers=tuple(order.index(layer) for layer in self.index_layers))
        sizes = {field.name: getattr(plan, field.name) for field in fields(plan)}
        sizes |= {"latents": latents, "index_dtype": latents.index_dtype}
        return PooledPlan(**sizes, index_dim=self.indexer.head_dim)

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with its tokens' pools, and memory for a selection."""
        return with_pools(super().prepare(step, rotary, dtype, layers), self.indexer)

    def new_layer(self, layer: int, placement: Placement) -> AttentionLayer:
        """Return the layer of a number, of the attention that it has."""
        if self.is_linear[layer]:
            return DeltaAttention(self.delta, placement)
        return PooledAttention(self.config, placement, layer not in self.index_layers)

    def claim_step(self, num_tokens: int, device: torch.device | str) -> tuple[SelectedTokens, SelectedTokens]:
        """Return memory for selections of num_tokens: of tokens and of pools."""
        topk, num_pools = self.indexer.topk, self.indexer.num_pools
        return SelectedTokens.empty(num_tokens, topk, device), SelectedTokens.empty(num_tokens, num_pools, device)

    def reads(self, context: int) -> list[LayerReads]:
        """Return that layers of MLA read selected tokens, indexers all pools' keys, and other layers a state."""
        indexer, widths = self.indexer, (self.config.latent_dim, self.config.kv_lora_rank)
        if context <= indexer.topk:
            return super().reads(context)
        num_others = self.num_latent_layers - self.num_index_layers
        return [
            LayerReads(self.num_index_layers, indexer.topk, *widths, context // indexer.pool_size, indexer.num_pools),
            LayerReads(num_others, indexer.topk, *widths),
            super().reads(context)[-1],
        ]
