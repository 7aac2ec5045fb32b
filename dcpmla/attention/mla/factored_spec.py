"""Layers of sparse MLA whose queries have factors of their heads, with and without positions (Mistral Large 4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from dcpmla.attention.head_factors import log_positions
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.mla.position_factors import FactoredAttention, ReusedLatents, ReusingAttention
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.step import with_selection
from dcpmla.attention.spec import MAIN_ROTARY, Rotary
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LayerMemory
from dcpmla.config import DCPConfig, MLAConfig


@dataclass(frozen=True)
class FactoredSpec(LatentSpec):
    """A layer with factors of its heads' queries.

    Attributes:
        source: Number of the layer whose latents the layer attends to; None for its own. A source has positions if the
            layer has them.
        is_source: Whether later layers attend to the layer's latents.
    """

    source: int | None = None
    is_source: bool = False
    num_selected = None

    def memory(self, dcp: DCPConfig, dtype: torch.dtype, num_drafts: int) -> LayerMemory:
        """Return the rows of a source, or the layer's own."""
        return super().memory(dcp, dtype, num_drafts)._replace(source=self.source)

    def new_layer(self, placement: Placement) -> FactoredAttention:
        """Return a layer with factors."""
        skip_topk = not self.has_indexer
        if self.source is not None:
            return ReusingAttention(self.config, placement, skip_topk)
        return FactoredAttention(self.config, placement, skip_topk, self.is_source)

    @classmethod
    def prepare(cls, layers: Sequence[Self], step: StepMetadata, rotary: Rotary, dtype: torch.dtype) -> StepMetadata:
        """Return a step with its positions' angles and logarithms, memory for a selection, and of latents."""
        indexer, positions = layers[0].config.indexer, step.tokens.positions
        assert indexer is not None
        step = step.with_cos_sin(rotary(positions, MAIN_ROTARY), log_positions(positions, dtype))
        return with_selection(step, indexer.topk).sharing(ReusedLatents())

    @classmethod
    def touch_peak_memory(cls, layers: Sequence[Self], num_tokens: int, device: torch.device | str) -> Any:
        """Return memory for a selection of num_tokens, and for the latents of two sources in at most float32."""
        num_sources = 2 if any(layer.is_source for layer in layers) else 0
        latents = torch.empty(num_sources, num_tokens, layers[0].config.latent_dim, device=device)
        return super().touch_peak_memory(layers, num_tokens, device), latents


def without_positions(config: MLAConfig) -> MLAConfig:
    """Return the geometry of a layer without positions in a model whose other layers have them.

    It has P + R columns in the nope part of its heads, and zeros for q_pe and k_pe: rows of all layers have one width,
    and the same kernels read them.
    """
    return replace(config, qk_nope_head_dim=config.qk_head_dim, use_rope=False, projects_pe=False)
