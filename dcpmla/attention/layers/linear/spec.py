"""Layers of Kimi Delta Attention."""

from dataclasses import dataclass
from typing import Any

import torch

from dcpmla.attention.costs import LayerReads, Rates
from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.attention.layers.linear.costs import DeltaCosts
from dcpmla.attention.layers.linear.delta import takes_chunks
from dcpmla.attention.layers.linear.layer import DeltaAttention
from dcpmla.attention.placement import Placement, refuse_order
from dcpmla.attention.spec import LayerSpec
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.latent import LayerMemory
from dcpmla.cache.plan import StateMemory
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class DeltaSpec(LayerSpec):
    """A layer of linear attention. Its states have the heads of a TP rank, so it needs no exchange."""

    config: DeltaConfig
    has_indexer = False

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or for dcp.deterministic."""
        refuse_order("linear attention", dcp)
        self.config.heads_per_rank(dcp.tensor_parallel_size)

    def memory(self, dcp: DCPConfig, dtype: torch.dtype, num_drafts: int) -> LayerMemory:
        """Return the states of a request (`DeltaState`): recent inputs of the convolution, and memories."""
        num_heads, dim = self.config.heads_per_rank(dcp.tensor_parallel_size), self.config.head_dim
        num_recent, width = self.config.conv_size - 1, 3 * num_heads * dim
        inputs = StateMemory("inputs of convolutions", (num_recent + num_drafts, width), dtype, num_recent, 3)
        memories = StateMemory("memories", (1 + num_drafts, num_heads, dim, dim), torch.float32, 1, 1)
        return LayerMemory(states=(inputs, memories))

    def restrict(self, traits: StepTraits, plan: Any, device: torch.device) -> StepTraits:
        """Return the traits of steps over states."""
        inputs, _ = next(layer.states for layer in plan.layers if not layer.row_width)
        return traits._replace(
            plan=plan,
            num_states=plan.num_states,
            absorbs_pieces=False,
            has_static_decodes=False,
            takes_chunks=takes_chunks(device, inputs.dtype),
        )

    def new_layer(self, placement: Placement) -> DeltaAttention:
        """Return a layer of linear attention."""
        return DeltaAttention(self.config, placement)

    def reads(self, context: int) -> LayerReads:
        """Return that a token reads and writes a state."""
        return LayerReads(0, 0, 0, state_bytes=2 * self.config.state_bytes)

    def costs(self, dcp: DCPConfig, rates: Rates) -> DeltaCosts:
        """Return the modelled time of pieces of prompts."""
        return DeltaCosts(self.config, dcp, rates)
