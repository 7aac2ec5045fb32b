"""A step: what one pass of a batch attends to. Built once from numbers that the host knows (`attention/build.py`), then
passed by hand to every layer.

A batch is flat: the tokens of decodes first (one each, or a few where tokens are speculated), then those of prefills.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dcpmla.attention.calls import Segments
from dcpmla.config import DCPConfig

if TYPE_CHECKING:
    from dcpmla.attention.compressed.step import CompressedMetadata
    from dcpmla.cache.compressed import CompressedPlan


@dataclass(frozen=True)
class DecodeMetadata:
    """Tokens that attend with absorbed queries: decodes, drafts, and short pieces of prompts.

    A long request is cut into several of at most max_query_len tokens, which share its row of the block table, so that
    the kernels spread it over the GPU as they do other requests.

    Attributes:
        block_table: [num_decodes, max_blocks] int32.
        local_seq_lens: [num_decode_tokens] int32, for each new token how many of its request's tokens on this rank it
            sees: those at its position and before. The causal bound is global, so a request's next token may see no
            more of them.
        queries: Rows of each request's new tokens; None when all requests have max_query_len of them.
        max_query_len: Most new tokens of a request.
        workspace: Memory of the kernels that split a request over programs (`decode_workspace`); None where none does.
        request_index: [num_reqs] int32, each request's row of block_table; None when no request is cut.
    """

    block_table: Tensor
    local_seq_lens: Tensor
    queries: Segments | None
    max_query_len: int
    workspace: Tensor | None
    request_index: Tensor | None = None

    @property
    def query_start_loc(self) -> Tensor | None:
        """Return where each request's new tokens start, [num_reqs + 1] int32 (`queries`)."""
        return None if self.queries is None else self.queries.start_loc

    def parts(self, max_tokens: int) -> Iterator[tuple[slice, "DecodeMetadata"]]:
        """Yield parts of whole requests and at most max_tokens tokens each, or of one request.

        The parts follow from numbers that are the same on all ranks, because each makes an exchange.
        """
        num_tokens = len(self.local_seq_lens)
        if num_tokens <= max_tokens:
            yield slice(0, num_tokens), self
            return
        size = self.max_query_len
        starts = range(0, num_tokens + 1, size) if self.queries is None else self.queries.start
        first = 0
        while first < len(starts) - 1:
            last = max(first + 1, bisect_right(starts, starts[first] + max_tokens) - 1)
            yield slice(starts[first], starts[last]), self._requests(first, last, slice(starts[first], starts[last]))
            first = last

    def _requests(self, first: int, last: int, tokens: slice) -> "DecodeMetadata":
        """Return requests [first, last), whose tokens these are."""
        table, index, queries = self.block_table, self.request_index, self.queries
        if queries is not None:
            start = tuple(at - tokens.start for at in queries.start[first : last + 1])
            queries = Segments(start, queries.start_loc[first : last + 1] - tokens.start)
        if index is None:
            table = table[first:last]
        else:
            index = index[first:last].clone()
        # Copies start at multiples of 16 bytes. Triton would compile another kernel for other addresses.
        lens = self.local_seq_lens[tokens].clone()
        return DecodeMetadata(table, lens, queries, self.max_query_len, self.workspace, index)


@dataclass(frozen=True)
class ContextChunk:
    """A piece of every prefill request's cached context, small enough for the workspace.

    Attributes:
        local_slots: [N] int64, this rank's cached tokens of the chunk, request after request, padded to the same N on
            all ranks.
        order: [S] int64, for each token of the chunk (request after request, in token order) its row in the gathered
            [W N] rows.
        tokens: [N] int64, for each of this rank's rows its token in [0, S), -1 for padding.
        keys: each request's tokens in S.
        first_position: [num_prefills] int32, of each request's first token here; of a request without any, where its
            context ends.
    """

    local_slots: Tensor
    order: Tensor
    tokens: Tensor
    keys: Segments
    first_position: Tensor


@dataclass(frozen=True)
class PrefillMetadata:
    """Requests with many new tokens.

    Attributes:
        queries: each request's new tokens, counted from the first prefill token.
        first_position: [num_prefills] int32, of each request's first new token.
        context_chunks: what was cached before this step; empty when nothing was.
    """

    queries: Segments
    first_position: Tensor
    context_chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True)
class SparseMetadata:
    """The tokens that each token of a step, decodes and prefills alike, may select from.

    Attributes:
        block_table: [num_reqs, max_blocks] int32, of all requests of the step.
        request: [num_tokens] int32, each token's request.
        seq_lens: [num_tokens] int32, tokens of its request at its position and before; 0 for padding.
        local_seq_lens: [num_tokens] int32, those of them on this rank.
        max_seq_len: no less than any of seq_lens, and the same on all ranks; nothing is selected where it is no more
            than topk.
    """

    block_table: Tensor
    request: Tensor
    seq_lens: Tensor
    local_seq_lens: Tensor
    max_seq_len: int

    def rows(self, tokens: slice) -> "SparseMetadata":
        """Return the metadata of some of the tokens."""
        per_token = self.request[tokens], self.seq_lens[tokens], self.local_seq_lens[tokens]
        return SparseMetadata(self.block_table, *per_token, self.max_seq_len)


@dataclass(frozen=True)
class SelectedTokens:
    """The tokens that each token of a step attends to: written by a layer with an indexer, read by it and by layers
    that reuse it.

    Attributes:
        positions: [T, topk] int32 in the request, in no particular order, -1 after the last; the same on all DCP ranks.
        slots: [T, N] int32 cache slots of those that this rank owns; contiguous columns, anything after the last.
        num_slots: [T] int32, how many.
        num_first: [T] int32, slots of each token that come before those selected (rows of a window, in V4), and count
            in num_slots; None for none.
    """

    positions: Tensor
    slots: Tensor
    num_slots: Tensor
    num_first: Tensor | None = None

    @classmethod
    def empty(cls, num_tokens: int, topk: int, device: torch.device | str) -> "SelectedTokens":
        """Return uninitialized memory for so many tokens."""
        positions, slots = (torch.empty(num_tokens, topk, dtype=torch.int32, device=device) for _ in range(2))
        return cls(positions, slots, torch.empty(num_tokens, dtype=torch.int32, device=device))

    def rows(self, tokens: slice) -> "SelectedTokens":
        """Return the selection of some of the tokens, in the same memory."""
        num_first = None if self.num_first is None else self.num_first[tokens]
        return SelectedTokens(self.positions[tokens], self.slots[tokens], self.num_slots[tokens], num_first)


@dataclass(frozen=True)
class StepMetadata:
    """One pass over a batch, as all layers see it. Rows past num_tokens in a layer's input are padding.

    Attributes:
        num_tokens, num_decode_tokens: real tokens, and how many of them (the first) are decodes.
        num_blocks: blocks that a cache must have at least for the step's block ids.
        positions: [num_tokens] int64 in each token's sequence.
        slot_mapping: [num_tokens] int64 cache slots, -1 where another rank owns the token; all -1 with `compressed`.
        decode, prefill: None when the batch has none; prefill also with `compressed`, whose context has what it needs.
        sparse: for layers with an indexer; None for dense models.
        cos_sin: [num_tokens, R] float32, the angles of RoPE (`apply_rope`); None for a model without positions (NoPE).
        query_factor: [num_tokens] in the model's dtype (`dcpmla.attention.rope.query_factor`), for a model with
            llama_4_scaling alone.
        compressed: for layers with entries (DeepSeek-V4) alone.
        selection: memory for what sparse layers select: one of them writes it, those that follow without an indexer
            read it. None where no token has more than topk before it.
    """

    num_tokens: int
    num_decode_tokens: int
    num_blocks: int
    positions: Tensor
    slot_mapping: Tensor
    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None
    sparse: SparseMetadata | None = None
    cos_sin: Tensor | None = None
    query_factor: Tensor | None = None
    selection: SelectedTokens | None = None
    compressed: "CompressedMetadata | None" = None

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        dcp: DCPConfig,
        dcp_rank: int,
        device: torch.device | str = "cpu",
        max_decode_query_len: int = 1,
        num_decodes: int | None = None,
        workspace: Tensor | None = None,
        is_sparse: bool = False,
        plan: "CompressedPlan | None" = None,
        states: Sequence[int] = (),
    ) -> "StepMetadata":
        """Lay out a step; `with_positions` and `with_selection` add what a model's layers ask for.

        Args:
            query_lens: [num_reqs] new tokens of each request; requests at the front with at most max_decode_query_len
                are decodes, all others prefills.
            num_decodes: Number of requests at the front that are decodes whatever their length: they attend with
                absorbed queries, longer ones in pieces of max_decode_query_len tokens. None counts as said above.
            seq_lens: [num_reqs] tokens of each request after this step.
            block_tables: [num_reqs] block ids of each request, enough for seq_lens.
            workspace: from `decode_workspace`, shared by steps that follow each other on one stream; None makes one for
                this step.
            is_sparse: for layers with an indexer over tokens.
            plan: of the caches of layers with entries (DeepSeek-V4), and for these alone; `with_angles` adds what they
                ask for.
            states: [num_reqs] with a plan, where each request's state is in its caches.
        Raises:
            ValueError: lengths that do not belong together, a block table too short, a negative block id, num_decodes
                outside [0, num_reqs].
        """
        from dcpmla.attention.build import StepBuilder  # it builds these classes, so it imports them

        if plan is not None:
            from dcpmla.attention.compressed.build import CompressedStepBuilder

            compressed = CompressedStepBuilder.of(plan, dcp_rank, device)
            return compressed.build_compressed(
                query_lens, seq_lens, block_tables, states, max_decode_query_len, num_decodes, workspace
            )
        builder = StepBuilder(dcp, dcp_rank, device)
        decodes = max_decode_query_len, num_decodes
        return builder.build(query_lens, seq_lens, block_tables, *decodes, workspace, is_sparse)

    def with_positions(self, cos_sin: Tensor | None, query_factor: Tensor | None = None) -> "StepMetadata":
        """Return the step with the angles of its tokens, and their query factor where the model has one."""
        return replace(self, cos_sin=cos_sin, query_factor=query_factor)

    def with_selection(self, topk: int) -> "StepMetadata":
        """Return the step with memory for topk selected tokens each; as it is, where no token has more before it."""
        if self.sparse is None or self.sparse.max_seq_len <= topk:
            return self
        return replace(self, selection=SelectedTokens.empty(self.num_tokens, topk, self.positions.device))

    def of_tokens(self, index: int) -> "StepMetadata":
        """Return the step of each request's token of this index alone, for decodes that all bring equally many."""
        decode, sparse = self.decode, self.sparse
        assert decode is not None
        assert decode.queries is None
        assert decode.request_index is None
        size = decode.max_query_len

        def tokens(column: Tensor) -> Tensor:
            # Not `contiguous`, which leaves a single one as it is, with its stride.
            return column[index::size].clone(memory_format=torch.contiguous_format)

        if sparse is not None:
            lens = tokens(sparse.seq_lens), tokens(sparse.local_seq_lens)
            sparse = SparseMetadata(sparse.block_table, tokens(sparse.request), *lens, sparse.max_seq_len)
        return StepMetadata(
            num_tokens=len(decode.block_table),
            num_decode_tokens=len(decode.block_table),
            num_blocks=self.num_blocks,
            positions=tokens(self.positions),
            slot_mapping=tokens(self.slot_mapping),
            decode=DecodeMetadata(decode.block_table, tokens(decode.local_seq_lens), None, 1, decode.workspace),
            prefill=None,
            sparse=sparse,
            compressed=None if self.compressed is None else self.compressed.of_tokens(index, size),
        )

    def check_blocks(self, num_blocks: int) -> None:
        """Raise ValueError for block ids beyond a cache of so many blocks."""
        if self.num_blocks > num_blocks:
            raise ValueError(
                f"block_tables has block {self.num_blocks - 1}; the cache has {num_blocks} blocks, numbered from 0"
            )
