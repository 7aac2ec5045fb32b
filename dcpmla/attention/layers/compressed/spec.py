"""Layers of DeepSeek-V4's attention: a window and, in two sorts of layers, entries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dcpmla.attention.costs import LayerReads, Rates
from dcpmla.attention.layers.compressed.cache import plan_compressed
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.costs import CompressedCosts, row_bytes
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.attention.layers.compressed.step import compressed_traits, with_angles
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.spec import MAIN_ROTARY, LayerSpec, Rotary
from dcpmla.attention.stack import Stack
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class CompressedSpec(LayerSpec):
    """A layer with a window and entries.

    Attributes:
        config: Geometry of the model's layers, this one among them.
        kind: Entries of the layer.
        ring: Index of the layer's windows in the rows that it shares (`CompressedConfig.rings`).
    """

    config: CompressedConfig
    kind: LayerKind
    ring: int

    @property
    def has_indexer(self) -> bool:  # type: ignore[override]
        """Return whether the layer has an indexer of its own."""
        return self.kind.has_indexer

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError for sizes and options that the layers do not support."""
        self.config.heads_per_rank(dcp.tensor_parallel_size)
        self.config.check_layout(dcp)

    def chunk_alignment(self, dcp: DCPConfig) -> int:
        """Return how many tokens a context chunk is a multiple of."""
        return self.config.chunk_alignment(dcp)

    def restrict(self, traits: StepTraits, plan: Any, device: torch.device) -> StepTraits:
        """Return the traits of steps over windows and entries."""
        return compressed_traits(plan)

    def new_layer(self, placement: Placement) -> CompressedAttention:
        """Return a layer with a window and entries."""
        return CompressedAttention(self.config, self.kind, placement, self.ring)

    def reads(self, context: int) -> LayerReads:
        """Return what a token reads of windows, entries and keys of entries."""
        config, kind, topk = self.config, self.kind, self.config.indexer.topk
        window, widths = min(context, config.sliding_window), (config.head_dim, config.head_dim)
        num_entries = context // kind.ratio if kind.ratio else 0
        if not kind.selects or num_entries <= topk:
            return LayerReads(window + num_entries, *widths)
        if not kind.has_indexer:
            return LayerReads(window + topk, *widths)
        return LayerReads(window + topk, *widths, num_keys=num_entries, num_candidates=topk)

    def row_bytes(self, kv_cache_dtype: str, num_groups: int = 1) -> int:
        """Return the bytes of a row, of a token in a window or of an entry."""
        return row_bytes(self.config, kv_cache_dtype)

    def costs(self, dcp: DCPConfig, rates: Rates) -> CompressedCosts:
        """Return the modelled time of pieces of prompts."""
        return CompressedCosts(self.config, self.kind, dcp, rates)

    @classmethod
    def plan(
        cls,
        layers: Iterable[Self],
        dcp: DCPConfig,
        seq_lens: Sequence[int],
        dtype: torch.dtype,
        num_states: int,
        num_drafts: int,
    ) -> CachePlan:
        """Return the sizes of a cache of windows, entries and states."""
        (config,) = {layer.config for layer in layers}
        return plan_compressed(config, dcp, seq_lens, dtype, num_states, num_drafts)

    @classmethod
    def prepare(cls, layers: Sequence[Self], step: StepMetadata, rotary: Rotary, dtype: torch.dtype) -> StepMetadata:
        """Return a step with the angles of tokens and entries, and memory for a selection."""

        def of_layers(positions: Tensor, is_compressed: bool) -> Tensor:
            return rotary(positions, "compress" if is_compressed else MAIN_ROTARY)

        return with_angles(step, of_layers, [layer.kind for layer in layers])

    @classmethod
    def touch_peak_memory(cls, layers: Sequence[Self], num_tokens: int, device: torch.device | str) -> Any:
        """Return memory for a selection of num_tokens, and for their candidate blocks."""
        config = layers[0].config
        # Slots begin with the windows' slots.
        selection = SelectedTokens.empty(num_tokens, config.sliding_window + config.indexer.topk, device)
        num_blocks = 0 if config.candidates is None else config.candidates.num_blocks
        return selection, torch.empty(num_tokens, num_blocks, dtype=torch.int32, device=device)


def compressed_stack(config: CompressedConfig, keeps_token_ids: bool = False) -> Stack:
    """Return the layers of a geometry."""
    layers = zip(config.layer_kinds, config.rings, strict=True)
    return Stack(config, tuple(CompressedSpec(config, *layer) for layer in layers), keeps_token_ids)
