"""Layers of sparse MLA and layers of MLA with a window in one model (dots3), as a kind of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.costs import AttentionCosts, LatentCosts, LayerReads
from dcpmla.attention.gated import GatedAttention
from dcpmla.attention.kind import AttentionKind, DenseKind, Rotary
from dcpmla.attention.placement import Placement
from dcpmla.attention.routes import Rates
from dcpmla.attention.sparse.kind import SparseKind
from dcpmla.attention.sparse.step import SelectedTokens
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.windowed.costs import WindowedCosts
from dcpmla.attention.windowed.layer import WindowAttention
from dcpmla.attention.windowed.step import with_windows
from dcpmla.cache.formats import row_width
from dcpmla.cache.latent import LatentCache
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig, MLAConfig

FULL_ROTARY, WINDOW_ROTARY = "indexed_attention", "sliding_attention"  # types of transformers' rotary embedding


@dataclass(frozen=True, kw_only=True)
class WindowedKind(SparseKind):
    """Gated MLA: layers with an indexer of their own, and layers with a window, of other sizes.

    The config describes layers with an indexer.

    Attributes:
        windowed: Geometry of the layers with a window.
        window_layers: Numbers of the layers with a window, ascending, at least one.
        has_mtp: Whether the last layer is an MTP module's, which runs in passes of its own.
    """

    windowed: MLAConfig
    window_layers: tuple[int, ...]
    has_mtp: bool = False

    @property
    def _window(self) -> int:
        assert self.windowed.window is not None
        return self.windowed.window

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads of either kind of layers do not divide by the TP size."""
        super().check_layout(dcp)
        self.windowed.heads_per_rank(dcp.tensor_parallel_size)

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache of index keys, and of latents in rows of two widths."""
        plan = LatentCache.plan(self.config, dcp, self.num_layers, seq_lens, dtype, self.index_layers)
        width = row_width(plan.dtype, self.windowed.kv_lora_rank, self.windowed.qk_rope_head_dim)
        return replace(plan, window_layers=self.window_layers, window_row_width=width)

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with the angles of both kinds of layers, and memory for their selections."""

        def full_rotary(positions: Tensor, _: str) -> Tensor:
            return rotary(positions, FULL_ROTARY)

        step = super().prepare(step, full_rotary, dtype, layers)
        return with_windows(step, self._window, rotary(step.tokens.positions, WINDOW_ROTARY))

    def new_layer(self, layer: int, placement: Placement) -> GatedAttention:
        """Return the layer of a number; the first of a pass with a window writes the windows for all."""
        if layer in self.window_layers:
            selects = layer == self.window_layers[0] or (self.has_mtp and layer == self.num_layers - 1)
            return WindowAttention(self.windowed, placement, self.num_gates, selects)
        return GatedAttention(self.config, placement, self.num_gates)

    def claim_step(self, num_tokens: int, device: torch.device | str) -> Any:
        """Return memory for both selections of num_tokens."""
        return super().claim_step(num_tokens, device), SelectedTokens.empty(num_tokens, self._window, device)

    def reads(self, context: int) -> list[LayerReads]:
        """Return that some layers read selected tokens and index keys, others their window."""
        selected = SparseKind(self.config, self.num_index_layers, self.index_layers).reads(context)
        widths = self.windowed.latent_dim, self.windowed.kv_lora_rank
        num_rows = min(context, self._window)
        return [*selected, LayerReads(len(self.window_layers), num_rows, *widths, config=self.windowed)]

    def costs(self, dcp: DCPConfig, rates: Rates) -> AttentionCosts:
        """Return the modelled time of pieces of prompts, each by the cheaper route over all layers."""
        num_full, num_windowed = self.num_index_layers, len(self.window_layers)
        return WindowedCosts(
            LatentCosts(self.config, dcp, rates, num_layers=num_full, num_index_layers=num_full),
            LatentCosts(self.windowed, dcp, rates, num_layers=num_windowed, num_index_layers=0),
        )

    def dense_stack(self) -> AttentionKind | None:
        """Return layers of one size: without indexers, windows, gates and norms of k_pe."""
        return DenseKind(replace(self.config, indexer=None, norms_k_pe=False), self.num_layers)
