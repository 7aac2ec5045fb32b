"""DeepSeek-V4's attention, windows and compressed entries, as a kind of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcpmla.attention.compressed.cache import CompressedPlan, plan_compressed
from dcpmla.attention.compressed.config import CompressedConfig
from dcpmla.attention.compressed.costs import CompressedCosts, layer_reads, row_bytes
from dcpmla.attention.compressed.layer import CompressedAttention
from dcpmla.attention.compressed.step import compressed_traits, with_angles
from dcpmla.attention.costs import AttentionCosts, LayerReads
from dcpmla.attention.kind import MAIN_ROTARY, AttentionKind, Rotary
from dcpmla.attention.placement import Placement
from dcpmla.attention.routes import Rates
from dcpmla.attention.sparse.step import SelectedTokens
from dcpmla.attention.step.build import StepBuilder
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class CompressedKind:
    """DeepSeek-V4's attention: layers of windows alone, and two kinds of layers with entries.

    Attributes:
        keeps_token_ids: Whether the cache keeps the tokens' ids (`CachePlan`).
    """

    config: CompressedConfig
    keeps_token_ids: bool = False

    @property
    def num_index_layers(self) -> int:
        """Return the number of layers with an indexer."""
        return sum(kind.has_indexer for kind in self.config.layer_kinds)

    @property
    def num_layers(self) -> int:
        """Return the number of layers, each with a cache."""
        return len(self.config.layer_kinds)

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError for sizes and options that the layers do not support."""
        self.config.heads_per_rank(dcp.tensor_parallel_size)
        self.config.check_layout(dcp)

    def chunk_alignment(self, dcp: DCPConfig) -> int:
        """Return how many tokens a context chunk is a multiple of."""
        return self.config.chunk_alignment(dcp)

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache of windows, entries and states."""
        plan = plan_compressed(self.config, dcp, list(seq_lens), dtype, num_states, num_drafts)
        return replace(plan, keeps_token_ids=self.keeps_token_ids)

    def step_builder(self, plan: CachePlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str) -> StepBuilder:
        """Return the builder of steps over windows and entries."""
        assert isinstance(plan, CompressedPlan)
        return StepBuilder(plan.dcp, dcp_rank, device, compressed_traits(plan))

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with the angles of tokens and entries, and memory for a selection."""

        def of_layers(positions: Tensor, is_compressed: bool) -> Tensor:
            return rotary(positions, "compress" if is_compressed else MAIN_ROTARY)

        return with_angles(step, of_layers, layers)

    def new_layer(self, layer: int, placement: Placement) -> CompressedAttention:
        """Return the layer of a number, of the config's kind for it."""
        return CompressedAttention(self.config, self.config.layer_kinds[layer], placement, self.config.rings[layer])

    def claim_step(self, num_tokens: int, device: torch.device | str) -> tuple[SelectedTokens, Tensor]:
        """Return memory for a selection of num_tokens, and for their candidate blocks."""
        # Slots begin with the windows' slots.
        selection = SelectedTokens.empty(num_tokens, self.config.sliding_window + self.config.indexer.topk, device)
        num_blocks = 0 if self.config.candidates is None else self.config.candidates.num_blocks
        return selection, torch.empty(num_tokens, num_blocks, dtype=torch.int32, device=device)

    def reads(self, context: int) -> list[LayerReads]:
        """Return that layers read windows, entries and keys of entries."""
        return layer_reads(self.config, context)

    def row_bytes(self, kv_cache_dtype: str) -> int:
        """Return the bytes of a row, of a token in a window or of an entry."""
        return row_bytes(self.config, kv_cache_dtype)

    def costs(self, dcp: DCPConfig, rates: Rates) -> AttentionCosts:
        """Return the modelled time of pieces of prompts."""
        return CompressedCosts(self.config, dcp, rates)

    def dense_stack(self) -> AttentionKind | None:
        """Return None: no layer is MLA."""
        return None
