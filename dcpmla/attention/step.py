"""Attention metadata of a step, one pass of a batch. It is built once from numbers on the host (`attention/build.py`),
then passed to every layer as an argument.

A batch is flat: first the tokens of decodes (one each, or a few with speculation), then the tokens of prefills.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dcpmla.attention.calls import Segments
from dcpmla.config import MLAConfig

# A request is cut into pieces of this many query rows (tokens x heads): two tiles of 64, which read the same keys.
PIECE_ROWS = 128
PART_ROWS = 1 << 16  # Query rows that attend at a time. With DeepSeek's widths they take 75 MB.


class StepRequests(NamedTuple):
    """The requests of a step, on the host.

    Attributes:
        query_lens: New tokens of each request [num_reqs].
        seq_lens: Tokens of each request after the step [num_reqs].
        block_tables: Block ids of each request [num_reqs], enough for seq_lens.
        states: Index of each request's state in the cache [num_reqs], for linear attention and DeepSeek-V4 alone.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    states: Sequence[Any] = ()

    def first(self, num_reqs: int) -> "StepRequests":
        """Return the first requests."""
        query_lens, seq_lens, block_tables, states = self
        return StepRequests(query_lens[:num_reqs], seq_lens[:num_reqs], block_tables[:num_reqs], states[:num_reqs])


@dataclass(frozen=True)
class DecodeMetadata:
    """Tokens that attend with absorbed queries: decodes, drafts, and short pieces of prompts.

    A request with more than max_query_len new tokens is cut into pieces of at most max_query_len. Kernels treat a piece
    as a request and so spread it over the GPU; all pieces of a request use its row of the block table. Where no request
    is cut, each is one piece.

    Attributes:
        block_table: Block ids of each request [num_decodes, max_blocks], int32.
        local_seq_lens: Number of tokens on this rank that each new token sees: its request's, up to and including its
            own position [num_decode_tokens], int32. A token at a position of another rank sees no more here than the
            token before it.
        queries: Ranges of the pieces in the rows of new tokens; None when all pieces have max_query_len tokens.
        max_query_len: Maximum tokens of a piece.
        workspace: Memory of kernels that split a piece over programs (`decode_workspace`); None where no kernel does.
        request_index: Row of block_table of each piece [num_pieces], int32; None when no request is cut.
    """

    block_table: Tensor
    local_seq_lens: Tensor
    queries: Segments | None
    max_query_len: int
    workspace: Tensor | None
    request_index: Tensor | None = None

    @property
    def query_start_loc(self) -> Tensor | None:
        """Return the first row of each piece, and the end of the last, [num_pieces + 1] int32; None as `queries`."""
        return None if self.queries is None else self.queries.start_loc

    def parts(self, max_tokens: int) -> Iterator[tuple[slice, "DecodeMetadata"]]:
        """Yield parts of whole pieces that have at most max_tokens tokens together, or of a single larger piece.

        All ranks yield the same parts, because each part makes an exchange.
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
        """Return the part of pieces [first, last), which have these tokens."""
        table, index, queries = self.block_table, self.request_index, self.queries
        if queries is not None:
            start = tuple(at - tokens.start for at in queries.start[first : last + 1])
            queries = Segments(start, queries.start_loc[first : last + 1] - tokens.start)
        if index is None:
            table = table[first:last]
        else:
            index = index[first:last].clone()
        # Copies start at multiples of 16 bytes, because Triton would compile another kernel for other addresses.
        lens = self.local_seq_lens[tokens].clone()
        return DecodeMetadata(table, lens, queries, self.max_query_len, self.workspace, index)


@dataclass(frozen=True)
class ContextChunk:
    """A piece of every prefill request's cached context, small enough for the workspace.

    Attributes:
        local_slots: Slots of this rank's cached tokens of the chunk [N], int64, request after request, padded to the
            same N on all ranks.
        order: order[s] is the row of token s in the concatenation [W N] of all ranks' rows. The S tokens are sorted by
            request, then by position. [S], int64.
        tokens: tokens[n] is the token in [0, S) that this rank's row n holds, -1 for padding [N], int64. Collectives
            reorder by `order` after the gather; `direct` stores each row at its token's row by `tokens`.
        keys: Range of each request's tokens among the S tokens.
        first_position: Position of each request's first token here [num_prefills], int32. For a request without tokens
            here, the position up to which earlier chunks have its context.
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


class SharedMetadata(Protocol):
    """Numbers of a step that only one kind of attention reads."""

    def of_tokens(self, index: int, size: int) -> Self:
        """Return the values for token number `index` of each request, where requests have `size` tokens each.

        For drafts of speculative decoding, which are predicted one token at a time.
        """


Shared = TypeVar("Shared", bound=SharedMetadata)
# Function that interrupts a capture: cut(part, arguments) keeps both, and each replay calls part(*arguments, step).
Cut = Callable[[Callable[..., None], tuple[Any, ...]], None]


@dataclass(frozen=True)
class StepMetadata:
    """One pass over a batch, as all layers see it. Rows past num_tokens in a layer's input are padding.

    Attributes:
        num_tokens, num_decode_tokens: Number of real tokens, and of decode tokens, which come first.
        num_blocks: Largest block id of the step, plus 1: the cache must have at least as many blocks.
        positions: Position of each token in its sequence [num_tokens], int64.
        slot_mapping: Cache slots [num_tokens], int64; -1 where another rank owns the token, and for all tokens of a
            cache without slots.
        decode: Metadata of decodes; None without any, or if a graph has already computed their attention.
        prefill: Metadata of prefills; None without any, or where layers have no latent cache.
        cos_sin: Angles of RoPE (`apply_rope`) [num_tokens, R], float32, which the model adds (`AttentionKind.prepare`);
            None for a model without positions (NoPE).
        query_factor: Factor of queries [num_tokens] in the model's dtype (`projections.query_factor`); None without
            llama_4_scaling.
        shared: Numbers that all layers of one kind of attention share, by their class (`get`).
        cut: Function that interrupts the capture of a graph for a part of a layer (`vary`); None outside of captures.
    """

    num_tokens: int
    num_decode_tokens: int
    num_blocks: int
    positions: Tensor
    slot_mapping: Tensor
    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None = None
    cos_sin: Tensor | None = None
    query_factor: Tensor | None = None
    shared: Mapping[type, Any] = field(default_factory=dict)
    cut: Cut | None = None

    def vary(self, part: Callable[..., None], *arguments: Any) -> None:
        """Run the part of a layer that depends on the step's requests: part(*arguments, step).

        While a graph that serves many steps is captured, the part is kept instead (`cut`). Each replay runs the part
        with the replay's step, between two graphs.
        """
        if self.cut is None:
            part(*arguments, self)
        else:
            self.cut(part, arguments)

    def get(self, kind: type[Shared]) -> Shared | None:
        """Return the shared numbers of a class; None if the step has none."""
        return self.shared.get(kind)

    def share(self, numbers: SharedMetadata) -> "StepMetadata":
        """Return the step with the shared numbers of one class replaced."""
        return replace(self, shared={**self.shared, type(numbers): numbers})

    def with_positions(self, cos_sin: Tensor | None, query_factor: Tensor | None = None) -> "StepMetadata":
        """Return the step with the angles of its tokens, and their query factor where the model has one."""
        return replace(self, cos_sin=cos_sin, query_factor=query_factor)

    def of_tokens(self, index: int) -> "StepMetadata":
        """Return the step of token number `index` of each request alone, for drafts of decodes of equal length."""
        decode = self.decode
        assert decode is not None
        assert decode.queries is None
        assert decode.request_index is None
        size = decode.max_query_len
        return StepMetadata(
            num_tokens=len(decode.block_table),
            num_decode_tokens=len(decode.block_table),
            num_blocks=self.num_blocks,
            positions=tokens_of(self.positions, index, size),
            slot_mapping=tokens_of(self.slot_mapping, index, size),
            decode=DecodeMetadata(
                decode.block_table, tokens_of(decode.local_seq_lens, index, size), None, 1, decode.workspace
            ),
            shared={kind: numbers.of_tokens(index, size) for kind, numbers in self.shared.items()},
        )

    def check(self, config: MLAConfig, hidden_states: Tensor) -> None:
        """Raise ValueError for inputs that do not match the step, and for positions that do not match the model."""
        shape, device = tuple(hidden_states.shape), hidden_states.device
        if len(shape) != 2 or shape[1] != config.hidden_size or shape[0] < self.num_tokens:
            raise ValueError(
                f"hidden_states has shape {shape}; expected [at least {self.num_tokens}, {config.hidden_size}]"
            )
        expected = torch.float32, (self.num_tokens, config.qk_rope_head_dim), device
        if _described(self.cos_sin) != (expected if config.use_rope else None):
            added = f"{expected} (dtype, shape, device), which StepMetadata.with_positions adds"
            needed = added if config.use_rope else "None, for the model has no positions"
            raise ValueError(f"step.cos_sin is {_described(self.cos_sin)}; expected {needed}")
        scaled = None if config.llama_4_scaling is None else (hidden_states.dtype, (self.num_tokens,), device)
        if _described(self.query_factor) != scaled:
            raise ValueError(
                f"step.query_factor is {_described(self.query_factor)}; expected {scaled}, for config.llama_4_scaling "
                f"is {config.llama_4_scaling}"
            )

    def check_blocks(self, num_blocks: int) -> None:
        """Raise ValueError if block ids exceed a cache of num_blocks blocks."""
        if self.num_blocks > num_blocks:
            raise ValueError(
                f"block_tables has block {self.num_blocks - 1}; the cache has {num_blocks} blocks, numbered from 0"
            )


def tokens_of(column: Tensor, index: int, size: int) -> Tensor:
    """Return a column's value for token number `index` of each request, where requests have `size` tokens each."""
    # `contiguous` would return a single token unchanged, with its stride.
    return column[index::size].clone(memory_format=torch.contiguous_format)


def _described(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...], torch.device] | None:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.device)
