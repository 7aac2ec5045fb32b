"""Prefill over windows and entries, bounded in memory. Each rank gathers entries chunk by chunk and attends with its
own heads alone, or entries stay and queries of all heads are sent to the entries' ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, decode_workspace
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.lists import KEPT_ROWS, RowLists
from dcpmla.attention.layers.compressed.step import CompressedMetadata
from dcpmla.attention.mla.decode import dcp_mla_decode, mla_decode
from dcpmla.attention.mla.prefill import ContextGather, merge_part
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.step.chunks import ContextChunk
from dcpmla.attention.step.metadata import PART_ROWS
from dcpmla.cache.shared_rows import read_rows
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig

LISTED_ROWS = 1 << 23  # Row numbers that are listed at a time.


def attend_prefill(
    q: Tensor,
    new_rows: tuple[Tensor, Tensor],
    rows: Tensor,
    step: CompressedMetadata,
    kind: LayerKind,
    selection: SelectedTokens | None,
    exchange: Exchange,
    dcp: DCPConfig,
) -> tuple[Tensor, Tensor]:
    """Attend from prefill tokens to their windows and to entries of all ranks. Collective.

    Args:
        q: Queries of this rank's heads [T, h, D].
        new_rows: Rows of windows from earlier steps [C, D], and rows of the new tokens [T, D].
        rows: Cache of this layer (`cache/shared_format.py`), including this rank's entries of this step's tokens.
        selection: Selected entries of each token; None where tokens attend to all entries before them.
    Returns:
        out [T, h, D], lse [T, h] float32, without the sink.
    """
    prefill = _Prefill(q, step, selection, dcp.attention_backend, RowLists(step, kind, len(q)))
    if selection is None or prefill.lists.chunks:
        parts = _attend_gathered(prefill, new_rows, rows, exchange)
    else:
        parts = _attend_in_place(prefill, new_rows, rows, selection, exchange, dcp.decode_context_parallel_size)
    out, lse = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    return out, lse


def touch_prefill_memory(
    num_tokens: int,
    num_heads: int,
    config: CompressedConfig,
    kind: LayerKind,
    exchange: Exchange,
    dcp: DCPConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Allocate and free the memory of `attend_prefill` for num_tokens with num_heads on this rank. Collective."""

    def new(num_rows: int) -> Tensor:
        return torch.empty(num_rows, config.head_dim, dtype=dtype, device=device)

    num_entries = dcp.context_workspace_tokens if kind.ratio else 0
    # The workspace has an aligned chunk for each request of a step, which brings a window without its last token.
    num_requests = min(num_tokens, dcp.context_workspace_tokens // config.chunk_alignment(dcp))
    num_before = num_requests * (config.sliding_window - 1)
    num_rows = min(num_tokens * num_heads * dcp.decode_context_parallel_size, PART_ROWS)
    touched = [
        # Queries and outputs, which are float32 until the last chunk.
        new(3 * num_tokens * num_heads),
        # A tile's gathered queries, and its outputs before and in the exchange.
        new(4 * num_rows),
        # Windows are read, then joined with new rows and a chunk.
        new(2 * num_before + num_tokens + num_entries),
        # Row numbers of entries are joined with row numbers of windows. Some are kept for the next layers.
        torch.empty(2 * LISTED_ROWS + KEPT_ROWS, dtype=torch.int32, device=device),
        decode_workspace(device),
    ]
    if kind.ratio:
        exchange.reserve_context(num_entries, config.head_dim, dtype, device)
    del touched  # after the exchange's memory, because the allocator's peak counts


@dataclass(frozen=True)
class _Prefill:
    """The prefill tokens of a step, attending to gathered rows.

    Attributes:
        q: Queries of this rank's heads [T, h, D].
        selection: Selected entries of each token; None where tokens attend to all entries before them.
        lists: Lists of the rows that tokens attend to.
    """

    q: Tensor
    step: CompressedMetadata
    selection: SelectedTokens | None
    backend: str
    lists: RowLists

    @property
    def workspace(self) -> Tensor | None:
        """Memory from `decode_workspace`."""
        assert self.step.context is not None
        return self.step.context.workspace

    def tiles(self, num_entries: int, max_tokens: int) -> list[slice]:
        """Return the tokens that attend at a time, at most max_tokens, each to at most num_entries."""
        num_rows, num_tokens = self.step.plan.config.sliding_window + num_entries, len(self.q)
        size = max(1, min(LISTED_ROWS // num_rows, max_tokens))
        if num_tokens <= size:  # A compiler makes a graph for each length of the loop.
            return [slice(0, num_tokens)]
        return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

    def attend(self, tokens: slice, keys: Tensor, number: int | None, num_before: int) -> tuple[Tensor, Tensor]:
        """Attend to gathered rows [N, D]: to windows if num_before rows come before the chunk's, and to the entries of
        the chunk of a number if there is one.
        """
        if number is None:
            rows, num = self.lists.of_windows(tokens)
        else:
            rows, num = self.lists.of_chunk(tokens, number, self.selection, num_before)
        return mla_decode(self.call_of(tokens, keys[:, None], rows, num))

    def call_of(self, tokens: slice, cache: Tensor, rows: Tensor, num: Tensor) -> DecodeCall:
        """Return the call of attention to the first num [n] of rows [n, N] of a cache."""
        sizes = self.step.plan.config.scale, self.q.shape[-1]
        return DecodeCall(
            self.q[tokens], None, cache, rows, num, *sizes, workspace=self.workspace, backend=self.backend
        )

    def attend_tiles(
        self, tiles: Sequence[slice], keys: Tensor, number: int | None, num_before: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Attend from each tile of tokens (`attend`)."""
        return [self.attend(tokens, keys, number, num_before) for tokens in tiles]

    def num_listed(self, chunk: ContextChunk) -> int:
        """Return the maximum entries of a chunk that are listed for a token."""
        return max(chunk.keys.lens) if self.selection is None else self.selection.positions.shape[1]


def _attend_gathered(
    prefill: _Prefill, new_rows: tuple[Tensor, Tensor], rows: Tensor, exchange: Exchange
) -> list[tuple[Tensor, Tensor]]:
    """Attend to windows and to chunks of entries: return out and lse of each tile of tokens.

    Windows come with the first chunk, so that short contexts take one call of attention. Each later chunk is gathered
    during the attention to the previous chunk.
    """

    chunks, dtype, num_new = prefill.lists.chunks, prefill.q.dtype, sum(map(len, new_rows))
    # Results of several chunks are in float32, so that merges take more memory than one call for all tokens.
    max_tokens = PART_ROWS // prefill.q.shape[1] if len(chunks) > 1 else len(prefill.q)
    tiles = prefill.tiles(max([0, *map(prefill.num_listed, chunks)]), max_tokens)
    if not chunks:
        return prefill.attend_tiles(tiles, torch.cat(new_rows), None, num_new)
    width = prefill.q.shape[-1]
    gather = ContextGather(exchange, chunks, lambda chunk: read_rows(rows, chunk.local_slots, width, dtype))
    parts: list[tuple[Tensor, Tensor]] = []
    for number, gathered in gather:
        if number == 0:
            parts = prefill.attend_tiles(tiles, torch.cat([*new_rows, gathered]), number, num_new)
        else:
            # Results are rounded once, after the last chunk.
            merged = dtype if number == len(chunks) - 1 else torch.promote_types(dtype, torch.float32)
            for part, tokens in enumerate(tiles):
                parts[part] = merge_part(*parts[part], *prefill.attend(tokens, gathered, number, 0), merged)
        del gathered  # The next gather needs this memory: at most two chunks exist at a time.
    return parts


def _attend_in_place(
    prefill: _Prefill,
    new_rows: tuple[Tensor, Tensor],
    rows: Tensor,
    selection: SelectedTokens,
    exchange: Exchange,
    dcp_size: int,
) -> list[tuple[Tensor, Tensor]]:
    """Attend to windows, and as in decode to selected entries on the ranks that own them: return out and lse of each
    tile of tokens.
    """
    parts, q, keys = [], prefill.q, torch.cat(new_rows)
    for tokens in prefill.tiles(0, PART_ROWS // (q.shape[1] * dcp_size)):
        chosen = selection.rows(tokens)
        # Copies start at multiples of 16 bytes, because Triton would compile another kernel for other addresses.
        call = prefill.call_of(tokens, rows, chosen.slots.clone(), chosen.num_slots.clone())
        of_entries = dcp_mla_decode(call._replace(q=exchange.gather_heads(call.q)), exchange)
        parts.append(merge_part(*prefill.attend(tokens, keys, None, len(keys)), *of_entries, q.dtype))
    return parts
