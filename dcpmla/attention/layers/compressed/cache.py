"""The caches of a model with DeepSeek-V4's attention on one rank: entries under block ids, and one state a request.

A layer's rows (`cache/shared_format.py`) are the windows of all requests, then entries, so that one call of attention
reads both. Layers that read the same entries share rows, which begin with the windows of all these layers in turn.
Entries and an indexer's keys grow with the context and are sharded over the DCP ranks by entry. A request's state has a
fixed size and is the same on every rank: its windows, and the sums of the entries in progress.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.cache.carve import Described, carve, carved_bytes
from dcpmla.cache.formats import format_name, storage_dtype
from dcpmla.cache.index_keys import index_format_name, index_row_width, index_rows, index_storage_dtype
from dcpmla.cache.items import Items
from dcpmla.cache.memory import zeros
from dcpmla.cache.plan import Cache, CachePlan
from dcpmla.cache.rows import StateRows, TokenRows
from dcpmla.cache.shared_format import PAGE_ROWS, row_items, rows_shape
from dcpmla.cache.token_ids import allocate_token_ids, token_id_bytes
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
        """Rows of one request's window; the token at position p has row p % ring_rows."""
        num_rows = self.config.sliding_window + self.num_drafts
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
        return self.config.entries_per_block(ratio, self.dcp.block_size)

    def rows_shape(self, ratio: int) -> tuple[int, int, int]:
        """Return the shape of a layer's rows."""
        num_entries = self.num_blocks * self.entries_per_block(ratio) if ratio else 0
        return rows_shape(self.window_rows(ratio) + num_entries, self.config.head_dim, self.dtype)

    def index_shape(self, ratio: int) -> tuple[int, int, int]:
        """Return the shape of the index cache of a layer with an indexer."""
        width = index_row_width(self.index_dtype, self.config.indexer.head_dim)
        return self.num_blocks, self.entries_per_block(ratio), width

    def sums_shape(self, kind: LayerKind, width: int) -> tuple[int, int, int, int]:
        """Return the shape of a layer's sums of entries in progress.

        A state has 1 + num_drafts copies: copy p % (1 + num_drafts) holds the sums after the token at position p.
        """
        return self.num_states * self.num_copies, self.config.num_halves(kind), NUM_SUMS, width

    def layer_tensors(self, kind: LayerKind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor that a layer adds to its `CompressedLayerCache`, by the field."""
        if not kind.writes:
            return {}
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"rows": (self.rows_shape(kind.ratio), self.dtype)}
        if kind.ratio:
            tensors["sums"] = self.sums_shape(kind, self.config.head_dim), torch.float32
        if kind.has_indexer:
            tensors["index_keys"] = self.index_shape(kind.ratio), self.index_dtype
        if kind.has_indexer and not self.config.has_entry_keys:
            tensors["index_sums"] = self.sums_shape(kind, self.config.indexer.head_dim), torch.float32
        return tensors

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers, on one rank."""
        more = replace(self, num_blocks=self.num_blocks + 64)  # small blocks share pages
        return (more.bytes_per_rank - self.bytes_per_rank) // 64

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one request's state in all layers, on each rank."""
        more = replace(self, num_states=self.num_states + 64)
        return (more.bytes_per_rank - self.bytes_per_rank) // 64

    @property
    def tensors(self) -> list[Described]:
        """The shape and dtype of each tensor, layer after layer; ids of tokens are left out."""
        return [tensor for kind in self.config.layer_kinds for tensor in self.layer_tensors(kind).values()]

    @property
    def bytes_per_rank(self) -> int:
        return token_id_bytes(self) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)

    @property
    def bytes_carved(self) -> int:
        """Bytes of memory that a `CompressedCache` can be cut from; ids of tokens are left out."""
        return carved_bytes(self.tensors)

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


class CompressedLayerCache(NamedTuple):
    """The cache of one layer on one rank.

    Attributes:
        rows: Windows, then entries (`dcpmla.cache.shared_format`); the same memory in layers that share them.
        sums: Sums of entries in progress, float32 [num_states (1 + num_drafts), 1 or 2, 3, D]; None in a layer that
            writes no entries.
        index_keys: Keys of the entries [num_blocks, entries_per_block, width] (`dcpmla.cache.index_keys`), as shared as
            these; None if no indexer selects among them.
        index_sums: Sums of index keys in progress, float32 [num_states (1 + num_drafts), 2, 3, indexer's D]; None if
            keys are projected from entries.
        loads: Ends of copies into the layer's memory that its next step waits for.
        starts: Events to record where its attention begins: by then the layers before it have written their memory.
    """

    rows: Tensor
    sums: Tensor | None = None
    index_keys: Tensor | None = None
    index_sums: Tensor | None = None
    loads: list[torch.cuda.Event] | None = None
    starts: list[torch.cuda.Event] | None = None


class CompressedCache(Cache):
    """The caches of all layers on one rank; `cache[layer]` is one layer's.

    Attributes:
        sizes: Plan of the caches.
    """

    def __init__(self, plan: CompressedPlan, device: torch.device, memory: Tensor | None = None) -> None:
        """Allocate a plan's bytes, or take them from memory.

        Args:
            memory: Bytes of an engine's own cache, contiguous, at least `plan.bytes_carved`; None to allocate.
        Raises:
            ValueError: The device, or the memory, has too little room.
        """
        if memory is None:
            plan.check_fits(device)
        self.sizes, self._plan = plan, plan
        self.token_ids = allocate_token_ids(plan, device)
        layers = [plan.layer_tensors(kind) for kind in plan.config.layer_kinds]
        if memory is None:
            tensors = [zeros(shape, dtype, device) for shape, dtype in plan.tensors]
        else:
            tensors = carve(memory, plan.tensors)
        parts = iter(tensors)
        new: list[dict[str, Any]] = [{field: next(parts) for field in fields} for fields in layers]
        self._own = {layer: CompressedLayerCache(**new[layer]) for layer in plan.config.row_groups}
        sources = {layer: first for first, group in plan.config.row_groups.items() for layer in group}
        self.loads, self.starts = ([list[torch.cuda.Event]() for _ in new] for _ in range(2))
        self.per_layer = [
            (self._own[layer] if layer in self._own else self._own[sources[layer]]._replace(sums=None))._replace(
                loads=loads, starts=starts
            )
            for layer, (loads, starts) in enumerate(zip(self.loads, self.starts, strict=True))
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the cache."""
        tensors = [tensor for layer in self._own.values() for tensor in layer if isinstance(tensor, Tensor)]
        return tensors if self.token_ids is None else [*tensors, self.token_ids]

    @property
    def token_rows(self) -> list[list[TokenRows]]:
        """Each layer's own entries and their keys."""
        plan, rows = self._plan, [list[TokenRows]() for _ in self.per_layer]
        for number, layer in self._own.items():
            ratio = plan.config.layer_kinds[number].ratio
            if ratio:
                per_block = plan.entries_per_block(ratio)
                planes = row_items(layer.rows, plan.config.head_dim, plan.window_rows(ratio))
                rows[number] += [TokenRows(name, items, per_block, ratio) for name, items in planes.items()]
            if layer.index_keys is not None:
                rows[number] += index_rows(layer.index_keys, ratio)
        return rows

    @property
    def state_rows(self) -> list[StateRows]:
        """Windows, and the sums of entries in progress."""
        plan, rows = self._plan, list[StateRows]()
        for number, layer in self._own.items():
            for ring in range(len(plan.config.row_groups[number])):
                planes = row_items(layer.rows, plan.config.head_dim, ring * plan.rows_per_ring)
                window = plan.ring_rows, plan.config.sliding_window
                rows += [StateRows(f"window's {name}", items, *window) for name, items in planes.items()]
            rows += [
                StateRows("sums of entries", Items.in_pages(sums.flatten(1)[:, None]), plan.num_copies, 1)
                for sums in (layer.sums, layer.index_sums)
                if sums is not None
            ]
        return rows

    @property
    def state_items(self) -> list[Items]:
        """Memory of states: windows with whole pages, and the sums of entries in progress."""
        items, num_states = list[Items](), self._plan.num_states
        num_pages = self._plan.rows_per_ring // (PAGE_ROWS if self._plan.dtype == torch.uint8 else 1)
        for number, layer in self._own.items():
            for ring in range(len(self._plan.config.row_groups[number])):
                pages = layer.rows[ring * num_pages : (ring + 1) * num_pages]
                items.append(Items.of(pages.view(num_states, -1)))
            sums = [sums for sums in (layer.sums, layer.index_sums) if sums is not None]
            items += [Items.of(each.view(num_states, -1)) for each in sums]
        return items


def plan_compressed(
    config: CompressedConfig,
    dcp: DCPConfig,
    seq_lens: list[int],
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
    if not seq_lens or min(seq_lens) < 0:
        raise ValueError(f"seq_lens is {seq_lens}; it must be a list of lengths that are not negative")
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
    num_blocks = max(1, sum(-(-seq_len // plan.block_tokens) for seq_len in seq_lens))
    return replace(plan, num_blocks=num_blocks)
