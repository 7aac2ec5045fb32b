"""Layers of dense MLA and of linear attention in one model, as a kind of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dcpmla.attention.costs import AttentionCosts, LayerReads
from dcpmla.attention.gated import GatedAttention
from dcpmla.attention.kind import AttentionKind, AttentionLayer, DenseKind, Rotary
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.linear.cache import HybridPlan
from dcpmla.attention.linear.chunked import takes_chunks
from dcpmla.attention.linear.config import DeltaConfig
from dcpmla.attention.linear.costs import HybridCosts, delta_token_us
from dcpmla.attention.linear.layer import DeltaAttention
from dcpmla.attention.placement import Placement, refuse_order
from dcpmla.attention.routes import Rates
from dcpmla.attention.step.build import StepBuilder
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.latent import LatentCache
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class HybridKind(DenseKind):
    """Layers of dense MLA and of Kimi Delta Attention.

    Attributes:
        delta: Geometry of the layers of linear attention.
        is_linear: Whether each layer has linear attention.
        num_gates: Number of gates of a head's output in MLA: none, one (Ling), or one for each column (Kimi-K3).
    """

    delta: DeltaConfig
    is_linear: tuple[bool, ...]
    num_gates: int = 0

    @property
    def num_latent_layers(self) -> int:
        """Return the number of layers of MLA."""
        return self.num_layers - sum(self.is_linear)

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads of either attention do not divide by the TP size, or for an index cache."""
        super().check_layout(dcp)
        refuse_order("linear attention", dcp)
        self.delta.heads_per_rank(dcp.tensor_parallel_size)

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache of latents and states."""
        latents = LatentCache.plan(self.config, dcp, self.num_latent_layers, seq_lens, dtype, ())
        return HybridPlan(
            num_blocks=latents.num_blocks,
            dcp_size=latents.dcp_size,
            dtype=latents.dtype,
            num_states=num_states,
            latents=replace(latents, num_blocks=1),
            delta=self.delta,
            num_heads=self.delta.heads_per_rank(dcp.tensor_parallel_size),
            is_linear=self.is_linear,
            state_dtype=dtype,
            num_drafts=num_drafts,
        )

    def step_builder(self, plan: CachePlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str) -> StepBuilder:
        """Return the builder of steps over latents and states."""
        assert isinstance(plan, HybridPlan)
        traits = StepTraits(
            plan=plan,
            num_states=plan.num_states,
            absorbs_pieces=False,
            has_static_decodes=False,
            takes_chunks=takes_chunks(torch.device(device), plan.state_dtype),
        )
        return StepBuilder(dcp, dcp_rank, device, traits)

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with its positions' angles, or as it is for a model without positions (NoPE)."""
        return super().prepare(step, rotary, dtype, layers) if self.config.use_rope else step

    def new_layer(self, layer: int, placement: Placement) -> AttentionLayer:
        """Return the layer of a number, of the attention that it has."""
        if self.is_linear[layer]:
            return DeltaAttention(self.delta, placement)
        if self.num_gates:
            return GatedAttention(self.config, placement, self.num_gates)
        return MLAAttention(self.config, placement)

    def reads(self, context: int) -> list[LayerReads]:
        """Return that layers of MLA read all tokens, and layers of linear attention read and write a state."""
        return [
            LayerReads(self.num_latent_layers, context, self.config.latent_dim, self.config.kv_lora_rank),
            LayerReads(sum(self.is_linear), 0, 0, 0, state_bytes=2 * self.delta.state_bytes),
        ]

    def costs(self, dcp: DCPConfig, rates: Rates) -> AttentionCosts:
        """Return the modelled time of pieces of prompts in both sorts of layers."""
        sizes = {"num_layers": self.num_latent_layers, "num_index_layers": self.num_index_layers}
        delta_us = sum(self.is_linear) * delta_token_us(self.delta, dcp, rates)
        return HybridCosts(self.config, dcp, rates, **sizes, delta_us=delta_us)

    def dense_stack(self) -> AttentionKind | None:
        """Return the layers of MLA alone."""
        return DenseKind(replace(self.config, indexer=None), self.num_latent_layers)
