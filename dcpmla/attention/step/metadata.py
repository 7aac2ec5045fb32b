"""Attention metadata of a step, one pass of a batch (`StepMetadata`). `StepBuilder` builds it once, from numbers on the
host to tensors on a device, for every model; then every layer gets it as an argument.

A batch is flat: first tokens that attend with absorbed queries (decodes), then tokens that attend by MHA (prefills).
Global lengths alone determine the collectives and their sizes, so all ranks of a DCP group build the same sequence of
exchanges.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments, decode_workspace, shape_error
from dcpmla.attention.step.chunks import PrefillMetadata, lay_out_prefills
from dcpmla.attention.step.table import (
    StepLayout,
    StepRequests,
    StepTable,
    StepTokens,
    StepTraits,
    TableSizes,
    pad_table,
    starts_of,
)
from dcpmla.config import DCPConfig, MLAConfig

PART_ROWS = 1 << 16  # Maximum query rows of a part. With DeepSeek's widths they take 75 MB.


def part_tokens(num_heads: int, dcp: DCPConfig) -> int:
    """Return the maximum tokens of a part, with num_heads heads in a DCP group, each with rows for each own lane."""
    return max(1, PART_ROWS // (num_heads * (dcp.num_own_lanes or 1)))


@dataclass(frozen=True)
class DecodeMetadata:
    """Decodes, the requests that attend with absorbed queries: generated tokens, drafts, and pieces of prompts for
    which `attention/costs.py` chose absorbed queries.

    A request with more than max_query_len new tokens is cut into segments of at most max_query_len. Kernels treat a
    segment as a request, and so spread a long request over the GPU; all segments of a request use the same row of the
    block table. A request that is not cut is one segment.

    Attributes:
        block_table: Block ids of each request [num_decodes, max_blocks], int32.
        local_seq_lens: Number of this rank's tokens that each new token sees [num_decode_tokens], int32: of the tokens
            of its request up to and including the new token (`Owner.local_seq_lens`).
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


# Function that interrupts a capture: defer(work, arguments) keeps both, and each replay calls work(*arguments, step).
Defer = Callable[[Callable[..., None], tuple[Any, ...]], None]
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class StepMetadata:
    """One pass over a batch, as all layers see it. Rows past num_tokens in a layer's input are padding.

    Attributes:
        layout: Where the tokens are in the caches of this rank.
        table, tokens: Numbers of the step's requests and tokens, on the device.
        num_tokens, num_decode_tokens: Number of real tokens, and of decode tokens, which come first.
        num_decodes: Number of requests that attend with absorbed queries, the first ones.
        num_blocks: Largest block id of the step, plus 1: the cache must have at least as many blocks.
        max_seq_len: Upper bound of tokens.seq_lens, the same on all ranks.
        decode: Metadata of decodes; None without any, or if a graph has already computed their attention.
        prefill: Metadata of prefills; None without any, or where layers have no latent cache.
        requests: Requests on the host; None in a graph.
        cos_sin: Cosines and sines of RoPE (`apply_rope`) [num_tokens, R], float32, which the model adds
            (`Stack.prepare`); None for a model without positions (NoPE).
        query_factor: Factor of queries [num_tokens] in the model's dtype (`projections.query_factor`), or ln(p + 1)
            where each head has a factor of its own; None without either.
        shared: What layers of one kind share in this step, by its class (`get`).
        derived: Numbers that were derived from the step once (`derive`), by their class.
        defer: Function that interrupts the capture of a graph for work of a layer (`run_outside_graph`); None outside
            of captures.
    """

    layout: StepLayout
    table: StepTable
    tokens: StepTokens
    num_tokens: int
    num_decode_tokens: int
    num_decodes: int
    num_blocks: int
    max_seq_len: int
    decode: DecodeMetadata | None = None
    prefill: PrefillMetadata | None = None
    requests: StepRequests | None = None
    cos_sin: Tensor | None = None
    query_factor: Tensor | None = None
    shared: Mapping[type, Any] = field(default_factory=dict)
    derived: dict[type, Any] = field(default_factory=dict)
    defer: Defer | None = None

    def run_outside_graph(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run the work of a layer that depends on the step's requests: work(*arguments, step).

        While a graph that serves many steps is captured, the work is kept instead (`defer`). Each replay runs it with
        the replay's step, between two graphs.
        """
        if self.defer is None:
            work(*arguments, self)
        else:
            self.defer(work, arguments)

    def compute_ahead(self, work: Callable[..., Shared], *arguments: Any) -> Shared | None:
        """Return work(*arguments, step) while a graph is captured: the graph then contains what has the same shapes in
        each replay, for the work that runs outside of it. None elsewhere.
        """
        return None if self.defer is None else work(*arguments, self)

    @property
    def shares_rows(self) -> bool:
        """Return whether only the device knows which tokens are decodes and which are prefills."""
        return self.prefill is not None and len(self.prefill.queries.start) == 0

    def get(self, kind: type[Shared]) -> Shared | None:
        """Return what layers share under a class; None if the step has none."""
        return self.shared.get(kind)

    def sharing(self, value: object) -> "StepMetadata":
        """Return the step with what layers share under the value's class added or replaced."""
        return replace(self, shared={**self.shared, type(value): value})

    def derive(self, kind: type, make: Callable[["StepMetadata"], Shared]) -> Shared:
        """Return make(step). The result is kept, so an MTP module's pass over the same step reuses it."""
        if kind not in self.derived:
            self.derived[kind] = make(self)
        value: Shared = self.derived[kind]
        return value

    def with_cos_sin(self, cos_sin: Tensor | None, query_factor: Tensor | None = None) -> "StepMetadata":
        """Return the step with the cosines and sines of its tokens, and their query factor if the model has one."""
        return replace(self, cos_sin=cos_sin, query_factor=query_factor)

    def nth_token(self, index: int) -> "StepMetadata":
        """Return a step of token number `index` of each request, for drafts. All requests are equally long decodes."""
        decode = self.decode
        assert decode is not None
        assert decode.queries is None is decode.request_index
        # `contiguous` would return a view of one element as it is, but kernels require the stride 1.
        tokens = self.tokens.map(
            lambda column: column[index :: decode.max_query_len].clone(memory_format=torch.contiguous_format)
        )
        singles = DecodeMetadata(decode.block_table, tokens.local_seq_lens, None, 1, decode.workspace)
        num, table = len(tokens.positions), self.table.nth_token(index)
        return StepMetadata(self.layout, table, tokens, num, num, num, self.num_blocks, self.max_seq_len, singles)

    def check(self, config: MLAConfig, hidden_states: Tensor) -> None:
        """Raise ValueError for inputs that do not match the step, or a cos_sin or query_factor not as in the model."""
        shape, device, width = tuple(hidden_states.shape), hidden_states.device, config.input_parts * config.hidden_size
        if len(shape) != 2 or shape[1] != width or shape[0] < self.num_tokens:
            raise shape_error("hidden_states", hidden_states, f"[at least {self.num_tokens}, {width}]")
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


def _described(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...], torch.device] | None:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.device)


def begin_attention(loads: list[torch.cuda.Event] | None, starts: list[torch.cuda.Event] | None) -> None:
    """Wait for copies into a layer's cache, and record that its attention begins: the layers before it have written
    theirs (`cache.layers.LayerCache`).
    """
    while loads:
        loads.pop().wait()
    while starts:
        starts.pop().record()


class StepBuilder:
    """Builder of one rank's steps.

    Args:
        dcp: Layout of the cache over the ranks.
        dcp_rank: Rank in the DCP group.
        device: Device of the steps' tensors.
        traits: What steps depend on in the model's attention; dense MLA's without it.
    Attributes:
        layout: Where tokens are in the caches of this rank.
    """

    def __init__(
        self,
        dcp: DCPConfig,
        dcp_rank: int,
        device: torch.device | str = "cpu",
        traits: StepTraits = StepTraits(),  # noqa: B008  a tuple does not change
    ) -> None:
        self.layout = StepLayout(dcp, dcp.owner(dcp_rank), torch.device(device), traits)

    def build(
        self,
        requests: StepRequests,
        max_decode_query_len: int = 1,
        num_decodes: int | None = None,
        workspace: Tensor | None = None,
    ) -> StepMetadata:
        """Lay out a step, without waiting for the device: one transfer, and one kernel.

        What layers share, cos_sin and query_factor among it, is still missing: the model adds it
        (`Stack.prepare`).

        Args:
            requests: Requests of the step, decodes first.
            max_decode_query_len: Maximum tokens of a segment; decodes with more new tokens are cut into segments.
            num_decodes: Number of decodes, pieces of prompts with absorbed queries (`attention/costs.py`) among them.
                None counts the requests before the first one with more than max_decode_query_len new tokens.
            workspace: Memory from `decode_workspace`, shared by consecutive steps on one stream; None allocates it.
        Raises:
            ValueError: Lengths do not match, a block table is too short, a block id is negative, num_decodes is
                outside [0, num_reqs], a decode has more tokens than the layers take, or states are missing, out of
                range or given twice.
        """
        requests.check(self.layout)
        query_lens, segment_len = requests.query_lens, self.segment_len(max_decode_query_len)
        if num_decodes is None:
            longer = (index for index, length in enumerate(query_lens) if length > segment_len)
            num_decodes = next(longer, len(query_lens))
        elif not 0 <= num_decodes <= len(query_lens):
            raise ValueError(f"num_decodes is {num_decodes}; it must be in [0, {len(query_lens)}], 0 to all requests")
        is_limited = self.layout.traits.max_decode_len is not None
        if is_limited and max(query_lens[:num_decodes], default=0) > segment_len:
            raise ValueError(
                f"num_decodes is {num_decodes}; of {list(query_lens)} new tokens decodes have at most {segment_len}"
            )
        requests = requests._replace(num_decodes=num_decodes, segment_len=segment_len)
        blocks = pad_table(requests.block_tables, requests.seq_lens, self.layout.block_tokens)
        return self.step(self.table(requests, blocks), requests, int(blocks.max()) + 1, workspace)

    def table(self, requests: StepRequests, blocks: np.ndarray) -> StepTable:
        """Return the numbers of requests with block ids [num_reqs, max_blocks] int32, on the device in one transfer."""
        num_reqs, num_tokens, segments = len(requests.query_lens), sum(requests.query_lens), requests.segments()
        num_segments, has_pieces = 0 if segments is None else len(segments[0]), self.layout.traits.takes_chunks
        sizes = TableSizes(num_reqs, num_tokens, num_segments, has_pieces=has_pieces)
        words = StepTable.stage(requests, sizes, blocks, self.layout.device).to(self.layout.device, non_blocking=True)
        return StepTable.of(words, sizes, words[sizes.num_words :].view(blocks.shape))

    def step(
        self,
        table: StepTable,
        requests: StepRequests,
        num_blocks: int,
        workspace: Tensor | None,
        tokens: StepTokens | None = None,
    ) -> StepMetadata:
        """Return the step of a table and its tokens, if they are laid out already, for a cache of num_blocks blocks."""
        if tokens is None:
            tokens = StepTokens.empty(sum(requests.query_lens), self.layout.device)
            lay_out(table, tokens, self.layout)
        query_lens, seq_lens, num_decodes = requests.query_lens, requests.seq_lens, requests.num_decodes
        num_decode_tokens, decode, prefill = sum(query_lens[:num_decodes]), None, None
        if num_decodes:
            num_columns, segments = -(-max(seq_lens[:num_decodes]) // self.layout.block_tokens), requests.segments()
            lens = np.asarray(query_lens[:1]) if segments is None else segments[0]
            is_even, has_index = lens.min() == lens.max(), segments is not None and len(lens) > num_decodes
            decode = DecodeMetadata(
                block_table=table.block_table[:num_decodes, :num_columns],
                local_seq_lens=tokens.local_seq_lens[:num_decode_tokens],
                queries=None if is_even else Segments(starts_of(lens), table.segment_start),
                max_query_len=int(lens.max()),
                workspace=decode_workspace(self.layout.device) if workspace is None else workspace,
                request_index=table.segment_request if has_index else None,
            )
        if self.layout.traits.has_slots and num_decodes < len(query_lens):
            num_prefills, prefills = len(query_lens) - num_decodes, slice(num_decodes, None)
            columns = table.prefill_start[: num_prefills + 1], table.prefill_position[:num_prefills]
            numbers = query_lens[prefills], seq_lens[prefills], table.block_table[prefills]
            prefill = lay_out_prefills(self.layout, *numbers, columns)
        return StepMetadata(
            layout=self.layout,
            table=table,
            tokens=tokens,
            num_tokens=len(tokens.positions),
            num_decode_tokens=num_decode_tokens,
            num_decodes=num_decodes,
            num_blocks=num_blocks,
            max_seq_len=max(seq_lens),
            decode=decode,
            prefill=prefill,
            requests=requests,
        )

    def segment_len(self, max_decode_query_len: int) -> int:
        """Return the maximum tokens of a segment: the argument, or fewer where decodes must be shorter."""
        limit = self.layout.traits.max_decode_len
        return max_decode_query_len if limit is None else min(max_decode_query_len, limit)


def lay_out(table: StepTable, tokens: StepTokens, layout: StepLayout) -> None:
    """Write the columns of tokens, and table.begin and table.end. A request's tokens begin at its first position, less
    its rejected drafts. A request with fewer tokens than rows repeats its last token.
    """
    if tokens.positions.is_cuda:
        from dcpmla.attention.step import kernels  # triton exists on Linux only

        per_rank, traits = layout.block_tokens // layout.owner.size, layout.traits
        kernels.lay_out(table, tokens, layout.owner, per_rank, traits.has_slots)
        return
    numbers = StepTable(*(column.numpy() for column in table))  # NumPy takes a tenth of torch's time on a CPU
    owner, num_rows, num_tokens = layout.owner, len(tokens.positions), numbers.num_tokens
    first = (numbers.first_position - numbers.num_rejected) * (num_tokens > 0)
    numbers.begin[:], numbers.end[:] = first, first + num_tokens
    request = row = np.arange(num_rows)
    if len(num_tokens) == num_rows and num_tokens.max() == 1 == num_tokens.min():
        positions, is_written = first.astype(np.int64), True
        seen = positions + 1
    else:
        request = np.searchsorted(numbers.row_start[1:], row, "right")
        request *= request < len(num_tokens)
        num, index = num_tokens[request], row - numbers.row_start[request]
        is_here = (num > 0) & (row < numbers.row_start[-1])
        positions = (first[request] + np.minimum(index, num - 1)) * is_here
        seen, is_written = (positions + 1) * is_here, is_here & (index < num)
    local = owner.local_seq_lens(seen) * (row < numbers.num_attending)
    slots: np.ndarray | int = -1
    if layout.traits.has_slots:
        block, offset = np.divmod(positions, layout.block_tokens)
        blocks = numbers.block_table[request, block].astype(np.int64)
        mine = blocks * (layout.block_tokens // owner.size) + owner.local_index(offset)
        slots = np.where(is_written & (owner.rank_of(offset) == owner.rank), mine, -1)
    for column, values in zip(tokens, (request, seen, local, positions, slots), strict=True):
        column.numpy()[...] = values
