"""Attention metadata of a step, one pass of a batch. It is built once from numbers on the host (`attention/build.py`),
then passed to every layer as an argument.

A batch is flat: first tokens that attend with absorbed queries (decodes), then tokens that attend by MHA (prefills).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dcpmla.attention.calls import Segments
from dcpmla.config import DCPConfig, MLAConfig

PART_ROWS = 1 << 16  # Maximum query rows of a part. With DeepSeek's widths they take 75 MB.


def part_tokens(num_heads: int, dcp: DCPConfig) -> int:
    """Return the maximum tokens of a part, with num_heads heads in a DCP group, each with rows for each own class."""
    return max(1, PART_ROWS // (num_heads * (dcp.num_own_classes or 1)))


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
    """Decodes, the requests that attend with absorbed queries: generated tokens, drafts, and pieces of prompts for
    which `attention/routes.py` chose absorbed queries.

    A request with more than max_query_len new tokens is cut into segments of at most max_query_len. Kernels treat a
    segment as a request, and so spread a long request over the GPU; all segments of a request use the same row of the
    block table. A request that is not cut is one segment.

    Attributes:
        block_table: Block ids of each request [num_decodes, max_blocks], int32.
        local_seq_lens: Number of this rank's tokens that each new token sees [num_decode_tokens], int32: tokens of the
            same request, up to and including the new token. A new token that another rank stores sees as many tokens
            here as the token before it.
        queries: Rows of each segment among the new tokens; None when all segments have max_query_len tokens.
        max_query_len: Maximum tokens of a segment.
        workspace: Memory of kernels that split a segment over programs (`decode_workspace`); None if no kernel does.
        request_index: Row of block_table of each segment [num_segments], int32; None when no request is cut.
    """

    block_table: Tensor
    local_seq_lens: Tensor
    queries: Segments | None
    max_query_len: int
    workspace: Tensor | None
    request_index: Tensor | None = None

    @property
    def query_start_loc(self) -> Tensor | None:
        """Return the first row of each segment, and the end [num_segments + 1] int32; None if `queries` is None."""
        return None if self.queries is None else self.queries.start_loc

    def parts(self, max_tokens: int) -> Iterator[tuple[slice, "DecodeMetadata"]]:
        """Yield the rows and metadata of parts. A part has at most max_tokens tokens, or one longer segment.

        Each part gathers and combines on its own. All ranks yield the same parts: local lengths have no influence.
        Raises:
            ValueError: There are several parts, but `queries` has no start of each segment for the host.
        """
        num_tokens = len(self.local_seq_lens)
        if num_tokens <= max_tokens:
            yield slice(0, num_tokens), self
            return
        starts = range(0, num_tokens + 1, self.max_query_len) if self.queries is None else self.queries.start
        if self.queries is not None and len(starts) != len(self.queries.start_loc):
            raise ValueError(f"max_tokens is {max_tokens}; a CUDA graph's step of {num_tokens} tokens must be one part")
        first = 0
        while first < len(starts) - 1:
            last = max(first + 1, bisect_right(starts, starts[first] + max_tokens) - 1)
            yield slice(starts[first], starts[last]), self._part(first, last, slice(starts[first], starts[last]))
            first = last

    def _part(self, first: int, last: int, tokens: slice) -> "DecodeMetadata":
        """Return the part of segments [first, last), which have these tokens."""
        table, index, queries, lens = self.block_table, self.request_index, self.queries, self.local_seq_lens[tokens]
        if queries is not None:
            start = tuple(at - tokens.start for at in queries.start[first : last + 1])
            queries = Segments(start, queries.start_loc[first : last + 1] - tokens.start)
        # Slices are copied, because they may begin between multiples of 16 bytes: Triton would compile another kernel.
        if index is None:
            table = table[first:last].clone()
        else:
            index = index[first:last].clone()
        return replace(self, block_table=table, local_seq_lens=lens.clone(), queries=queries, request_index=index)


@dataclass(frozen=True)
class ContextChunk:
    """A range of each prefill's cached context. Ranges may differ and be empty; together they have at most
    `context_workspace_tokens` tokens.

    Attributes:
        local_slots: Slots of this rank's cached tokens of the chunk [N], int64, request after request. Each request's
            slots are padded to the same number on all ranks.
        order: order[s] is the row of token s in the concatenation [W N] of all ranks' rows: s if W is 1. The S tokens
            are sorted by request, then by position. [S], int64.
        tokens: tokens[n] is the token in [0, S) that this rank's row n holds, -1 for padding [N], int64. Collectives
            reorder by `order` after the gather; `direct` stores each row at its token's row by `tokens`.
        keys: Rows of each request among the S tokens.
        first_position: Position of each request's first token in the chunk [num_prefills], int32; for a request
            without tokens in the chunk, the number of its tokens in the chunks before.
    """

    local_slots: Tensor
    order: Tensor
    tokens: Tensor
    keys: Segments
    first_position: Tensor


@dataclass(frozen=True)
class PrefillMetadata:
    """Requests that attend by MHA.

    Attributes:
        queries: Rows of each request among the prefill tokens. In a graph only the device knows them (`start` is
            empty): they are among all tokens, and the first request may begin after the first one.
        first_position: Position of each request's first new token [num_prefills], int32.
        context_chunks: Context that was cached before this step; empty when there is none. With dcp.deterministic
            chunks include the new tokens.
        window: Number of last tokens, its own included, among which a token selects; None where it selects among all.
    """

    queries: Segments
    first_position: Tensor
    context_chunks: tuple[ContextChunk, ...]
    window: int | None = None


class KindMetadata(Protocol):
    """Metadata of a step that only one kind of attention reads."""

    def of_tokens(self, index: int, size: int) -> Self:
        """Return the metadata of token number `index` of each request, where requests have `size` tokens each.

        For drafts of speculative decoding, which are predicted one token at a time.
        """


Metadata = TypeVar("Metadata", bound=KindMetadata)
# Function that interrupts a capture: cut(work, arguments) keeps both, and each replay calls work(*arguments, step).
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
        cos_sin: Cosines and sines of RoPE (`apply_rope`) [num_tokens, R], float32, which the model adds
            (`AttentionKind.prepare`); None for a model without positions (NoPE).
        query_factor: Factor of queries [num_tokens] in the model's dtype (`projections.query_factor`), or ln(p + 1)
            where each head has a factor of its own; None without either.
        kinds: Metadata that only one kind of attention reads, by its class (`get`).
        cut: Function that interrupts the capture of a graph for work of a layer (`vary`); None outside of captures.
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
    kinds: Mapping[type, Any] = field(default_factory=dict)
    cut: Cut | None = None

    def vary(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run the work of a layer that depends on the step's requests: work(*arguments, step).

        While a graph that serves many steps is captured, the work is kept instead (`cut`). Each replay runs it with the
        replay's step, between two graphs.
        """
        if self.cut is None:
            work(*arguments, self)
        else:
            self.cut(work, arguments)

    @property
    def shares_rows(self) -> bool:
        """Return whether only the device knows which tokens are decodes and which are prefills."""
        return self.prefill is not None and len(self.prefill.queries.start) == 0

    def get(self, kind: type[Metadata]) -> Metadata | None:
        """Return the metadata of a class; None if the step has none."""
        return self.kinds.get(kind)

    def with_kind(self, metadata: KindMetadata) -> "StepMetadata":
        """Return the step with the metadata of one class added or replaced."""
        return replace(self, kinds={**self.kinds, type(metadata): metadata})

    def with_cos_sin(self, cos_sin: Tensor | None, query_factor: Tensor | None = None) -> "StepMetadata":
        """Return the step with the cosines and sines of its tokens, and their query factor if the model has one."""
        return replace(self, cos_sin=cos_sin, query_factor=query_factor)

    def of_tokens(self, index: int) -> "StepMetadata":
        """Return a step of token number `index` of each request, for drafts. All requests are equally long decodes."""
        decode = self.decode
        assert decode is not None
        assert decode.queries is None is decode.request_index
        size = decode.max_query_len
        lens = tokens_of(decode.local_seq_lens, index, size)
        return StepMetadata(
            num_tokens=len(decode.block_table),
            num_decode_tokens=len(decode.block_table),
            num_blocks=self.num_blocks,
            positions=tokens_of(self.positions, index, size),
            slot_mapping=tokens_of(self.slot_mapping, index, size),
            decode=DecodeMetadata(decode.block_table, lens, None, 1, decode.workspace),
            kinds={kind: metadata.of_tokens(index, size) for kind, metadata in self.kinds.items()},
        )

    def check(self, config: MLAConfig, hidden_states: Tensor) -> None:
        """Raise ValueError for inputs that do not match the step, or a cos_sin or query_factor not as in the model."""
        shape, device = tuple(hidden_states.shape), hidden_states.device
        if len(shape) != 2 or shape[1] != config.hidden_size or shape[0] < self.num_tokens:
            raise ValueError(
                f"hidden_states has shape {shape}; expected [at least {self.num_tokens}, {config.hidden_size}]"
            )
        expected = torch.float32, (self.num_tokens, config.qk_rope_head_dim), device
        if _described(self.cos_sin) != (expected if config.use_rope else None):
            added = f"{expected} (dtype, shape, device), which StepMetadata.with_cos_sin adds"
            needed = added if config.use_rope else "None, because the model has no positions"
            raise ValueError(f"step.cos_sin is {_described(self.cos_sin)}; expected {needed}")
        is_scaled = config.llama_4_scaling is not None or config.has_query_factors
        scaled = (hidden_states.dtype, (self.num_tokens,), device) if is_scaled else None
        if _described(self.query_factor) != scaled:
            raise ValueError(
                f"step.query_factor is {_described(self.query_factor)}; expected {scaled}, because "
                f"config.llama_4_scaling is {config.llama_4_scaling} and has_query_factors {config.has_query_factors}"
            )

    def check_blocks(self, num_blocks: int) -> None:
        """Raise ValueError if block ids exceed a cache of num_blocks blocks."""
        if self.num_blocks > num_blocks:
            raise ValueError(
                f"block_tables has block {self.num_blocks - 1}; the cache has {num_blocks} blocks, numbered from 0"
            )


def tokens_of(column: Tensor, index: int, size: int) -> Tensor:
    """Return a column's value for token number `index` of each request, where requests have `size` tokens each."""
    # `contiguous` would return a view of one element as it is, but kernels require the stride 1.
    return column[index::size].clone(memory_format=torch.contiguous_format)


def _described(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...], torch.device] | None:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.device)
