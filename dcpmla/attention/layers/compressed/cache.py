"""The caches of a model with DeepSeek-V4's attention on one rank: entries under block ids, and one state a request.

A layer's rows (`cache/shared_format.py`) are the windows of all requests, then entries, so that one call of attention
reads both. Layers that read the same entries share rows, which begin with the windows of all these layers in turn.
Entries and an indexer's keys grow with the context and are sharded over the DCP ranks by entry. A request's state has a
fixed size and is the same on every rank: its windows, and the sums of the entries in progress.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.cache.carve import Described
from dcpmla.cache.formats import format_name, storage_dtype
from dcpmla.cache.index_keys import index_format_name, index_row_width, index_rows, index_storage_dtype
from dcpmla.cache.items import Items
from dcpmla.cache.layers import Cache
from dcpmla.cache.plan import CachePlan, LayerTensors, StateMemory
from dcpmla.cache.rows import StateRows, TokenRows
from dcpmla.cache.shared_format import PAGE_ROWS, row_items, rows_shape
from dcpmla.config import DCPConfig

NUM_SUMS = 3  # per column of an entry in progress: peak of its gates, sum of their softmax, weighted sum of its values


@dataclass(frozen=True, kw_only=True)
class CompressedPlan(CachePlan):
    """Sizes of caches that are not allocated yet.

    Attributes:
        config: Geometry of the layers.
        dcp: Layout of entries over the ranks, and formats.
        num_drafts: Maximum tokens of a request in a step that may be rejected: a window has num_drafts extra rows, and
            sums are kept for each of the last 1 + num_drafts tokens.
        dtype, index_dtype: Formats of the rows (`dcpmla.cache.shared_format`) and of the indexers' keys.
    """

    config: CompressedConfig
    dcp: DCPConfig

    @property
    def interleave(self) -> int:
        return self.dcp.cp_kv_cache_interleave_size

    @property
    def block_tokens(self) -> int:
        """Positions that a block id covers, over all ranks."""
        return self.dcp.virtual_block_size * self.config.row_tokens

    @property
    def ring_rows(self) -> int:
        """Rows of one request's window; the token at position p has row p % ring_rows. There are enough rows for drafts
        to overwrite no token that a later token sees.
        """
        num_rows = self.config.sliding_window + max(self.num_drafts, self.config.draft_block)
        return -(-num_rows // PAGE_ROWS) * PAGE_ROWS if self.dtype == torch.uint8 else num_rows

    @property
    def rows_per_ring(self) -> int:
        """Rows of all windows of one layer."""
        return self.num_states * self.ring_rows

    def window_rows(self, ratio: int) -> int:
        """Return the rows of all windows, before the entries: whole blocks of every ratio, and whole pages."""
        return -(-self.config.num_rings(ratio) * self.rows_per_ring // self._window_granule) * self._window_granule

    def first_entry_block(self, ratio: int) -> int:
        """Return the blocks of a layer's rows before the entries, of as many rows as blocks of entries have."""
        return self.window_rows(ratio) // self.entries_per_block(ratio)

    @cached_property
    def _window_granule(self) -> int:
        """Granule of window rows, computed once because torch.compile cannot trace an lcm of sizes that vary."""
        return math.lcm(PAGE_ROWS, *(self.entries_per_block(ratio) for ratio in self.config.ratios))

    def entries_per_block(self, ratio: int) -> int:
        """Return the number of entries of a ratio that a block holds on one rank."""
        return self.dcp.block_size * self.config.row_tokens // ratio

    def rows_shape(self, ratio: int) -> tuple[int, int, int]:
        """Return the shape of a layer's rows."""
        num_entries = self.num_blocks * self.entries_per_block(ratio) if ratio else 0
        return rows_shape(self.window_rows(ratio) + num_entries, self.config.head_dim, self.dtype)

    def index_shape(self, ratio: int) -> tuple[int, int, int]:
        """Return the shape of the index cache of a layer with an indexer."""
        width = index_row_width(self.index_dtype, self.config.indexer.head_dim)
        return self.num_blocks, self.entries_per_block(ratio), width

    def sums(self, kind: LayerKind, width: int) -> StateMemory:
        """Return a layer's sums of entries in progress: copy p % (1 + num_drafts) is the one after position p."""
        shape = self.num_copies, self.config.num_halves(kind), NUM_SUMS, width
        return StateMemory("sums of entries", shape, torch.float32)

    @cached_property
    def layer_tensors(self) -> list[LayerTensors]:
        """Return the memory of each layer: rows and index keys, and sums of entries, then of index keys."""
        sources = {layer: first for first, group in self.config.row_groups.items() for layer in group}
        return [
            self._own_tensors(kind) if kind.writes else LayerTensors({}, source=sources[layer])
            for layer, kind in enumerate(self.config.layer_kinds)
        ]

    def _own_tensors(self, kind: LayerKind) -> LayerTensors:
        """Return the memory of a layer with rows of its own."""
        config, states = self.config, list[StateMemory]()
        fields: dict[str, Described] = {"latents": (self.rows_shape(kind.ratio), self.dtype)}
        if kind.ratio:
            states.append(self.sums(kind, config.head_dim))
        if kind.has_indexer:
            fields["index_keys"] = self.index_shape(kind.ratio), self.index_dtype
            if not config.has_entry_keys:
                states.append(self.sums(kind, config.indexer.head_dim))
        return LayerTensors(fields, tuple(states))

    def allocate(self, device: torch.device) -> "CompressedCache":
        """Allocate the caches (`CachePlan.allocate`)."""
        return CompressedCache(self, device)

    def __str__(self) -> str:
        return (
            f"{self.tokens_total:,} tokens in {self.num_blocks:,} blocks of {self.block_tokens:,} over "
            f"{self.dcp_size} DCP ranks, and {self.num_states} states of {self.bytes_per_state / 2**20:,.1f} MiB: "
            f"{self.bytes_per_rank / 2**20:,.1f} MiB a rank; {self.bytes_total / 2**20:,.1f} MiB in total "
            f"({format_name(self.dtype)}, index cache {index_format_name(self.index_dtype)}: {self.bytes_per_token:,} "
            f"bytes a token, {self.tokens_per_gb:,} tokens a GB of each rank)"
        )


class CompressedCache(Cache):
    """The caches of all layers on one rank."""

    sizes: CompressedPlan

    @property
    def token_rows(self) -> list[list[TokenRows]]:
        """Each layer's own entries and their keys."""
        return [self._entries(number) for number in range(len(self.per_layer))]

    def _entries(self, number: int) -> list[TokenRows]:
        plan, layer, ratio = self.sizes, self[number], self.sizes.config.layer_kinds[number].ratio
        if not ratio or number not in plan.config.row_groups:
            return []
        planes = row_items(layer.latents, plan.config.head_dim, plan.window_rows(ratio))
        rows = [TokenRows(name, items, plan.entries_per_block(ratio), ratio) for name, items in planes.items()]
        return rows + index_rows(layer.index_keys, ratio)

    @property
    def state_rows(self) -> list[StateRows]:
        """Windows, and the sums of entries in progress."""
        plan, rows = self.sizes, list[StateRows]()
        for number, group in plan.config.row_groups.items():
            for ring in range(len(group)):
                planes = row_items(self[number].latents, plan.config.head_dim, ring * plan.rows_per_ring)
                window = plan.ring_rows, plan.config.sliding_window
                rows += [StateRows(f"window's {name}", items, *window) for name, items in planes.items()]
            rows += self.layer_states(number)
        return rows

    @property
    def state_items(self) -> list[Items]:
        """Memory of states: windows with whole pages, and the sums of entries in progress."""
        items, plan = list[Items](), self.sizes
        num_pages = plan.rows_per_ring // (PAGE_ROWS if plan.dtype == torch.uint8 else 1)
        for number, group in plan.config.row_groups.items():
            for pages in self[number].latents.split(num_pages)[: len(group)]:
                items.append(Items.of(pages.view(plan.num_states, -1)))
            items += [Items.of(sums) for sums in self[number].states]
        return items


def plan_compressed(
    config: CompressedConfig,
    dcp: DCPConfig,
    seq_lens: Sequence[int],
    dtype: torch.dtype,
    num_states: int | None = None,
    num_drafts: int = 0,
) -> CompressedPlan:
    """Return the sizes of caches that hold sequences of the given final lengths at once.

    Args:
        dcp: Config whose kv_cache_dtype and index_cache_dtype set the formats.
        seq_lens: Tokens of each sequence, prompt and answer; each starts on a block of its own.
        dtype: Dtype of the model.
        num_states: None for one a sequence.
        num_drafts: Maximum drafts of a request in a step.
    Raises:
        ValueError: No sequences, a negative length, or options or a format that the model cannot have.
    """
    config.check_layout(dcp)
    dcp = config.with_whole_blocks(dcp)
    plan = CompressedPlan(
        config=config,
        dcp=dcp,
        num_blocks=1,
        dcp_size=dcp.decode_context_parallel_size,
        num_states=len(seq_lens) if num_states is None else num_states,
        dtype=storage_dtype(dcp.kv_cache_dtype, dtype),
        index_dtype=index_storage_dtype(dcp.index_cache_dtype, dtype),
        num_drafts=num_drafts,
    )
    return plan.for_lengths(seq_lens)
