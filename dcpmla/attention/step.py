"""Attention metadata of a step, one pass of a batch. It is built once from numbers on the host (`attention/build.py`),
then passed to every layer as an argument.

A batch is flat: first the tokens of decodes (one each, or a few with speculation), then the tokens of prefills.
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


PIECE_ROWS = 128  # Query rows, a token's heads each, of a cut request: two tiles, which read the same keys together.
PART_ROWS = 1 << 16  # Query rows that attend at a time. With DeepSeek's widths they take 75 MB.


@dataclass(frozen=True)
class DecodeMetadata:
    """Tokens that attend with absorbed queries: decodes, drafts, and short pieces of prompts.

    A long request is cut into several of at most max_query_len tokens, which share its row of the block table, so that
    the kernels spread it over the GPU as they do other requests.

    Attributes:
        block_table: Block ids of each request [num_decodes, max_blocks], int32.
        local_seq_lens: Number of its request's tokens on this rank that each new token sees, at its position and before
            [num_decode_tokens], int32. The causal bound is global, so a request's next token may see no more.
        queries: Rows of each request's new tokens; None when all requests have max_query_len new tokens.
        max_query_len: Most new tokens of a request.
        workspace: Memory of kernels that split a request over programs (`decode_workspace`); None where no kernel does.
        request_index: Row of block_table of each request [num_reqs], int32; None when no request is cut.
    """

    block_table: Tensor
    local_seq_lens: Tensor
    queries: Segments | None
    max_query_len: int
    workspace: Tensor | None
    request_index: Tensor | None = None

    @property
    def query_start_loc(self) -> Tensor | None:
        """Return the first new token of each request, [num_reqs + 1] int32 (`queries`)."""
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
        """Return requests [first, last), which have these tokens."""
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
        local_slots: Slots of this rank's cached tokens of the chunk [N], int64, request after request, padded to the
            same N on all ranks.
        order: Row in the gathered [W N] rows of each token of the chunk [S], int64, request after request, in token
            order.
        tokens: Token in [0, S) of each of this rank's rows [N], int64, -1 for padding.
        keys: Tokens of each request in S.
        first_position: Position of each request's first token here [num_prefills], int32; for a request without any,
            the end of its context.
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
        queries: New tokens of each request, counted from the first prefill token.
        first_position: Position of each request's first new token [num_prefills], int32.
        context_chunks: Context that was cached before this step; empty when there is none.
    """

    queries: Segments
    first_position: Tensor
    context_chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True)
class SparseMetadata:
    """The tokens that each token of a step, decodes and prefills alike, may select from.

    Attributes:
        block_table: Block ids of all requests of the step [num_reqs, max_blocks], int32.
        request: Request of each token [num_tokens], int32.
        seq_lens: Number of its request's tokens at each token's position and before [num_tokens], int32; 0 for padding.
        local_seq_lens: The same number over this rank's tokens [num_tokens], int32.
        max_seq_len: Upper bound of seq_lens, the same on all ranks; up to topk, nothing is selected.
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
        positions: Positions in the request [T, topk], int32, unordered, -1 after the last; the same on all DCP ranks.
        slots: Cache slots of the selected tokens that this rank owns [T, N], int32; contiguous columns, undefined
            after the last.
        num_slots: Number of slots of each token [T], int32.
        num_first: Number of slots before the selected ones (rows of a window, in V4), included in num_slots [T], int32;
            None for none.
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
        num_tokens, num_decode_tokens: Number of real tokens, and of decode tokens, which come first.
        num_blocks: Smallest number of cache blocks that the step's block ids allow.
        positions: Position of each token in its sequence [num_tokens], int64.
        slot_mapping: Cache slots [num_tokens], int64, -1 where another rank owns the token; all -1 with `compressed`.
        decode, prefill: Metadata of decodes and prefills, or None without any. With `compressed`, prefill is None:
            its context replaces it.
        sparse: Metadata for layers with an indexer; None for dense models.
        cos_sin: Angles of RoPE (`apply_rope`) [num_tokens, R], float32; None for a model without positions (NoPE).
        query_factor: Factor of queries [num_tokens] in the model's dtype (`dcpmla.attention.rope.query_factor`); None
            without llama_4_scaling.
        compressed: Metadata for layers with entries (DeepSeek-V4), else None.
        selection: Memory for the selection of sparse layers: a layer with an indexer writes it, later layers without
            one read it. None where no token has more than topk before it.
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
        """Lay out a step; `with_positions` and `with_selection` add fields that a model's layers need.

        Args:
            query_lens: New tokens of each request [num_reqs]; requests at the front with at most max_decode_query_len
                are decodes, all others prefills.
            num_decodes: Number of requests at the front that are decodes of any length: they attend with absorbed
                queries, long ones in pieces of max_decode_query_len tokens. None counts as query_lens says.
            seq_lens: Tokens of each request after this step [num_reqs].
            block_tables: Block ids of each request [num_reqs], enough for seq_lens.
            workspace: Memory from `decode_workspace`, shared by consecutive steps on one stream; None allocates it for
                this step.
            is_sparse: Whether layers have an indexer over tokens.
            plan: Plan of the caches of layers with entries (DeepSeek-V4), else None; `with_angles` adds fields that
                these layers need.
            states: Index of each request's state in its caches [num_reqs], with a plan.
        Raises:
            ValueError: Lengths do not match, a block table is too short, a block id is negative, or num_decodes is
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
        """Return the step with memory for topk selected tokens each; unchanged where no token has more before it."""
        if self.sparse is None or self.sparse.max_seq_len <= topk:
            return self
        return replace(self, selection=SelectedTokens.empty(self.num_tokens, topk, self.positions.device))

    def of_tokens(self, index: int) -> "StepMetadata":
        """Return the step of only each request's token of this index, for decodes of equal length."""
        decode, sparse = self.decode, self.sparse
        assert decode is not None
        assert decode.queries is None
        assert decode.request_index is None
        size = decode.max_query_len

        def tokens(column: Tensor) -> Tensor:
            # `contiguous` would return a single token unchanged, with its stride.
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
        """Raise ValueError if block ids exceed a cache of num_blocks blocks."""
        if self.num_blocks > num_blocks:
            raise ValueError(
                f"block_tables has block {self.num_blocks - 1}; the cache has {num_blocks} blocks, numbered from 0"
            )
