"""Layers of sparse MLA with and without positions in one model (Mistral Large 4), as a kind of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dcpmla.attention.head_factors import log_positions
from dcpmla.attention.kind import AttentionKind, DenseKind, Rotary
from dcpmla.attention.placement import Placement
from dcpmla.attention.scaled import ScaledAttention
from dcpmla.attention.sparse.kind import SparseKind
from dcpmla.attention.step import StepMetadata
from dcpmla.config import MLAConfig


@dataclass(frozen=True)
class MixedKind(SparseKind):
    """Sparse MLA whose queries have factors of their heads, with and without positions.

    The config is that of layers with positions. A layer without them has P + R columns in the nope part of its heads,
    and zeros for q_pe and k_pe: rows of all layers have one width, and the same kernels read them.

    Attributes:
        nope_layers: Numbers of the layers without positions.
    """

    nope_layers: tuple[int, ...]

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with its positions' angles and logarithms, and memory for a selection."""
        step = super().prepare(step, rotary, dtype, layers)
        return step.with_cos_sin(step.cos_sin, log_positions(step.positions, dtype))

    def layer_config(self, layer: int) -> MLAConfig:
        """Return the geometry of the layer of a number."""
        if layer not in self.nope_layers:
            return self.config
        return replace(self.config, qk_nope_head_dim=self.config.qk_head_dim, use_rope=False, projects_pe=False)

    def new_layer(self, layer: int, placement: Placement) -> ScaledAttention:
        """Return the layer of a number, with an indexer of its own if it is among index_layers."""
        return ScaledAttention(self.layer_config(layer), placement, skip_topk=layer not in self.index_layers)

    def dense_stack(self) -> AttentionKind | None:
        """Return layers with positions, without indexers and factors."""
        return DenseKind(replace(self.config, indexer=None, has_query_factors=False), self.num_layers)
