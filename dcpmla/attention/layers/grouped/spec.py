"""Layers with keys and values of each head, or of each group of heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from dcpmla.attention.costs import LayerReads, Rates
from dcpmla.attention.layers.grouped.config import GroupedConfig
from dcpmla.attention.layers.grouped.costs import GroupedCosts
from dcpmla.attention.layers.grouped.layer import GroupedAttention
from dcpmla.attention.placement import Placement
from dcpmla.attention.spec import MAIN_ROTARY, LayerSpec, Rotary
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.formats import storage_dtype
from dcpmla.cache.latent import LayerMemory
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class GroupedSpec(LayerSpec):
    """A layer whose cached rows are keys and values in the model's dtype, whatever the format of latents is."""

    config: GroupedConfig

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or heads of keys and values by the DCP groups."""
        self.config.heads_per_rank(dcp.tensor_parallel_size)
        num_kv_heads = self.config.num_kv_heads
        num_groups = dcp.tensor_parallel_size // dcp.decode_context_parallel_size
        if num_kv_heads % num_groups and num_groups % num_kv_heads:
            raise ValueError(
                f"decode_context_parallel_size (-dcp) is {dcp.decode_context_parallel_size}, which makes {num_groups} "
                f"groups of ranks; their number must divide the layer's {num_kv_heads} heads of keys and values "
                "(num_key_value_heads), or be a multiple of them"
            )

    def memory(self, dcp: DCPConfig, dtype: torch.dtype, num_drafts: int) -> LayerMemory:
        """Return rows with the keys and values of a DCP group's heads."""
        num_groups = dcp.tensor_parallel_size // dcp.decode_context_parallel_size
        num_bytes = self.config.kv_width(num_groups) * dtype.itemsize
        return LayerMemory(
            num_bytes // storage_dtype(dcp.kv_cache_dtype, dtype).itemsize,
            name="keys and values",
            num_shares=self.config.num_shares(num_groups),
        )

    def new_layer(self, placement: Placement) -> GroupedAttention:
        """Return a layer."""
        return GroupedAttention(self.config, placement)

    def reads(self, context: int) -> LayerReads:
        """Return that a token reads all tokens."""
        return LayerReads(context, self.config.head_dim, self.config.head_dim)

    def row_bytes(self, kv_cache_dtype: str, num_groups: int = 1) -> int:
        """Return the bytes of a token's keys and values in 16 bits."""
        return self.config.kv_width(num_groups) * torch.bfloat16.itemsize

    def costs(self, dcp: DCPConfig, rates: Rates) -> GroupedCosts:
        """Return the modelled time of pieces of prompts."""
        return GroupedCosts(self.config, dcp, rates)

    @classmethod
    def prepare(cls, layers: Sequence[Self], step: StepMetadata, rotary: Rotary, dtype: torch.dtype) -> StepMetadata:
        """Return a step with its positions' angles."""
        return step.with_cos_sin(rotary(step.tokens.positions, MAIN_ROTARY))
