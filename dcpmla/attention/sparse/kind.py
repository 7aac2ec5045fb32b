"""Sparse MLA (DeepSeek-V3.2, GLM-5, HY V4) as a kind of attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcpmla.attention.costs import LayerReads
from dcpmla.attention.gated import GatedAttention
from dcpmla.attention.kind import DenseKind, Rotary
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.placement import Placement, check_order
from dcpmla.attention.sparse.step import SelectedTokens, with_selection
from dcpmla.attention.step.build import StepBuilder
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.latent import LatentCache
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class SparseKind(DenseKind):
    """Sparse MLA.

    Attributes:
        index_layers: Numbers of the layers with an indexer, ascending; other layers attend to the previous layer's
            selection.
        num_gates: Number of gates of a head's output: none, one, or one for each column (HY V4).
    """

    index_layers: tuple[int, ...]
    num_gates: int = 0

    @property
    def num_index_layers(self) -> int:
        """Return the number of layers with an indexer of their own."""
        return len(self.index_layers)

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or for dcp.deterministic."""
        self.config.heads_per_rank(dcp.tensor_parallel_size)
        check_order(self.config, dcp)

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache of latents and index keys."""
        return LatentCache.plan(self.config, dcp, self.num_layers, seq_lens, dtype, self.index_layers)

    def step_builder(self, plan: CachePlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str) -> StepBuilder:
        """Return the builder of steps whose tokens may select."""
        return StepBuilder(dcp, dcp_rank, device, StepTraits(has_static_decodes=False))

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with its positions' angles and memory for a selection."""
        assert self.config.indexer is not None
        return with_selection(super().prepare(step, rotary, dtype, layers), self.config.indexer.topk)

    def new_layer(self, layer: int, placement: Placement) -> MLAAttention:
        """Return a layer of sparse MLA, with an indexer of its own if it is among index_layers."""
        skip_topk = layer not in self.index_layers
        if self.num_gates:
            return GatedAttention(self.config, placement, self.num_gates, skip_topk)
        return MLAAttention(self.config, placement, skip_topk)

    def claim_step(self, num_tokens: int, device: torch.device | str) -> SelectedTokens:
        """Return memory for a selection of num_tokens."""
        assert self.config.indexer is not None
        return SelectedTokens.empty(num_tokens, self.config.indexer.topk, device)

    def reads(self, context: int) -> list[LayerReads]:
        """Return that layers read the selected tokens, and layers with an indexer the keys of all tokens."""
        assert self.config.indexer is not None
        topk, widths = self.config.indexer.topk, (self.config.latent_dim, self.config.kv_lora_rank)
        if context <= topk:
            return super().reads(context)
        return [
            LayerReads(self.num_index_layers, topk, *widths, num_keys=context, num_candidates=topk),
            LayerReads(self.num_layers - self.num_index_layers, topk, *widths),
        ]
