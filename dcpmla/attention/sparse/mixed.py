"""Layers of sparse MLA with and without positions in one model (Mistral Large 4), as a kind of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcpmla.attention.head_factors import log_positions
from dcpmla.attention.kind import AttentionKind, DenseKind, Rotary
from dcpmla.attention.placement import Placement
from dcpmla.attention.position_factors import ReusingAttention, ScaledAttention, SharedLatents
from dcpmla.attention.sparse.kind import SparseKind
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LatentCache
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig, MLAConfig


@dataclass(frozen=True, kw_only=True)
class MixedKind(SparseKind):
    """Sparse MLA whose queries have factors of their heads, with and without positions.

    The config describes layers with positions. A layer without them has P + R columns in the nope part of its heads,
    and zeros for q_pe and k_pe: rows of all layers have one width, and the same kernels read them.

    Attributes:
        nope_layers: Numbers of the layers without positions.
        sources: For each layer, the layer whose latents it attends to: itself, or the latest earlier one that is a
            source and has positions as it has.
    """

    nope_layers: tuple[int, ...]
    sources: tuple[int, ...]

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache of index keys, and of the latents of layers that are their own sources."""
        config = self.config
        return LatentCache.plan(config, dcp, self.num_layers, seq_lens, dtype, self.index_layers, self.sources)

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with its positions' angles and logarithms, and memory for a selection."""
        step = super().prepare(step, rotary, dtype, layers)
        return step.with_cos_sin(step.cos_sin, log_positions(step.tokens.positions, dtype)).sharing(SharedLatents())

    def layer_config(self, layer: int) -> MLAConfig:
        """Return the geometry of the layer of a number."""
        if layer not in self.nope_layers:
            return self.config
        return replace(self.config, qk_nope_head_dim=self.config.qk_head_dim, use_rope=False, projects_pe=False)

    def new_layer(self, layer: int, placement: Placement) -> ScaledAttention:
        """Return the layer of a number, with an indexer of its own if it is among index_layers."""
        config, skip_topk = self.layer_config(layer), layer not in self.index_layers
        if self.sources[layer] != layer:
            return ReusingAttention(config, placement, skip_topk)
        return ScaledAttention(config, placement, skip_topk, is_source=layer in self.sources[layer + 1 :])

    def claim_step(self, num_tokens: int, device: torch.device | str) -> Any:
        """Return memory for a selection of num_tokens, and for the latents of two sources in at most float32."""
        selection = super().claim_step(num_tokens, device)
        num_sources = 2 if self.sources != (*range(self.num_layers),) else 0
        return selection, torch.empty(num_sources, num_tokens, self.config.latent_dim, device=device)

    def dense_stack(self) -> AttentionKind | None:
        """Return layers with positions, without indexers and factors."""
        return DenseKind(replace(self.config, indexer=None, has_query_factors=False), self.num_layers)
