"""Layers of sparse MLA over pools of tokens (GLM-5-Next)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from dcpmla.attention.layers.pooled.layer import PooledAttention
from dcpmla.attention.layers.pooled.step import with_pools
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.spec import Rotary
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.latent import LayerMemory
from dcpmla.cache.plan import StateMemory
from dcpmla.config import DCPConfig
from dcpmla.indexer_config import IndexerConfig


@dataclass(frozen=True)
class PooledSpec(LatentSpec):
    """A layer of sparse MLA without positions that selects pools of tokens."""

    @property
    def indexer(self) -> IndexerConfig:
        """Return the geometry of the indexers."""
        assert self.config.indexer is not None
        return self.config.indexer

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or blocks do not hold whole pools."""
        super().check_layout(dcp)
        granule = self.indexer.pool_size * dcp.cp_kv_cache_interleave_size
        if dcp.block_size % granule:
            raise ValueError(
                f"block_size (--block-size) is {dcp.block_size}; it must be a multiple of {granule}: whole pools of "
                f"{self.indexer.pool_size} tokens (the config's index_kpool), in groups of "
                f"{dcp.cp_kv_cache_interleave_size} (--cp-kv-cache-interleave-size)"
            )

    def memory(self, dcp: DCPConfig, dtype: torch.dtype, num_drafts: int) -> LayerMemory:
        """Return rows of latents and, for an indexer, keys of pools and the sums of the pools in progress.

        A pool's key is cached with its last token, under its tokens' block id. Pools are sharded over the DCP ranks
        like tokens: pool e is on rank (e // I) % W.
        """
        self.check_layout(dcp)
        memory = super().memory(dcp, dtype, num_drafts)
        sums = StateMemory("sums of pools", (1 + num_drafts, 1, 3, self.indexer.head_dim), torch.float32)
        return memory._replace(states=(sums,)) if self.has_indexer else memory

    def restrict(self, traits: StepTraits, plan: Any, device: torch.device) -> StepTraits:
        """Return the traits of steps over states."""
        traits = super().restrict(traits, plan, device)
        return traits._replace(plan=plan, num_states=plan.num_states, absorbs_pieces=False)

    def new_layer(self, placement: Placement) -> PooledAttention:
        """Return a layer over pools."""
        return PooledAttention(self.config, placement, skip_topk=not self.has_indexer)

    @classmethod
    def prepare(cls, layers: Sequence[Self], step: StepMetadata, rotary: Rotary, dtype: torch.dtype) -> StepMetadata:
        """Return a step with its tokens' pools, and memory for a selection."""
        return with_pools(step, layers[0].indexer)

    @classmethod
    def touch_peak_memory(cls, layers: Sequence[Self], num_tokens: int, device: torch.device | str) -> Any:
        """Return memory for selections of num_tokens: of tokens and of pools."""
        pools = SelectedTokens.empty(num_tokens, layers[0].indexer.num_pools, device)
        return super().touch_peak_memory(layers, num_tokens, device), pools
