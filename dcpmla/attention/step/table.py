"""A step as two tables: numbers of requests, which the host knows (`StepTable`), and numbers of tokens, which follow
from them on the device (`StepTokens`). Both are in memory of the step's own, or in static memory that CUDA graphs read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.step.long_pieces import PieceSizes
from dcpmla.config import DCPConfig
from dcpmla.ownership import Owner
from dcpmla.upload import aligned_slices

_ALIGNMENT = 4  # words: columns begin at multiples of 16 bytes, because Triton compiles another kernel for others


class StepTraits(NamedTuple):
    """Properties of a model's attention that its steps depend on; dense MLA has the defaults.

    Attributes:
        plan: Plan of the caches, for layers that read it.
        block_tokens: Positions that a block id covers, over all ranks; None for those of latents.
        num_states: Number of requests' states in the cache; 0 where it has none.
        has_slots: Whether each token has a slot in the cache's blocks.
        absorbs_pieces: Whether pieces of prompts, of any number of tokens, may attend with absorbed queries.
        has_static_decodes: Whether the graphs of a step with prompts can include the attention of its decodes.
        takes_chunks: Whether linear attention computes long pieces in chunks.
        max_decode_len: Maximum new tokens of a decode; None for any number.
    """

    plan: Any = None
    block_tokens: int | None = None
    num_states: int = 0
    has_slots: bool = True
    absorbs_pieces: bool = True
    has_static_decodes: bool = True
    takes_chunks: bool = False
    max_decode_len: int | None = None


@dataclass(frozen=True)
class StepLayout:
    """The layout of steps over the caches of one rank.

    Attributes:
        dcp: Layout of the cache over the ranks.
        owner: This rank, as the owner of tokens.
        device: Device of the steps' tensors.
        traits: What steps depend on in the model's attention.
    """

    dcp: DCPConfig
    owner: Owner
    device: torch.device
    traits: StepTraits = StepTraits()

    @property
    def block_tokens(self) -> int:
        """Return the positions that a block id covers, over all ranks."""
        return self.traits.block_tokens or self.dcp.virtual_block_size


class StepRequests(NamedTuple):
    """The requests of a step, on the host.

    Attributes:
        query_lens: New tokens of each request [num_reqs].
        seq_lens: Tokens of each request after the step [num_reqs].
        block_tables: Block ids of each request [num_reqs], enough for seq_lens.
        states: Index of each request's state in the cache [num_reqs], for linear attention and DeepSeek-V4; Nones or
            empty for others.
        num_decodes: Number of requests that attend with absorbed queries, the first ones (`StepBuilder.build`).
        segment_len: Maximum tokens of a segment; longer decodes are cut (`segments`).
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    states: Sequence[Any] = ()
    num_decodes: int = 0
    segment_len: int = 1

    def check(self, layout: StepLayout) -> None:
        """Raise ValueError for requests that `StepBuilder.build` refuses."""
        query_lens, seq_lens, block_tables, states = self[:4]
        room, num_states = layout.block_tokens, layout.traits.num_states
        if not query_lens or not len(query_lens) == len(seq_lens) == len(block_tables):
            raise ValueError(
                f"query_lens, seq_lens and block_tables have {len(query_lens)}, {len(seq_lens)} and "
                f"{len(block_tables)} requests; they must have the same number, at least 1"
            )
        for request, (query, seq, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
            if not 1 <= query <= seq:
                needed = "1 <= query_lens <= seq_lens must hold"
                raise ValueError(f"request {request}: query_lens is {query} and seq_lens {seq}; {needed}")
            if len(blocks) * room < seq:
                has = f"{len(blocks)} blocks, room for {len(blocks) * room} tokens"
                raise ValueError(f"request {request}: block_tables has {has}; seq_lens is {seq}")
        num_reqs, is_valid = len(query_lens), all(0 <= state < num_states for state in states if num_states)
        if num_states and not (len(states) == len(set(states)) == num_reqs and is_valid):
            raise ValueError(
                f"states is {list(states)}; expected one for each of {num_reqs} requests, in [0, {num_states}), "
                f"none twice"
            )

    def segments(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the tokens and the request of each segment of decodes; None if decodes are equally long segments."""
        lens = np.asarray(self.query_lens[: self.num_decodes])
        is_cut = len(lens) and not lens.min() == lens.max() <= self.segment_len
        return cut_queries(lens, self.segment_len) if is_cut else None


class TableSizes(NamedTuple):
    """The sizes of a step's tables: those of its requests and tokens, or what a graph pads them to.

    Attributes:
        num_reqs, num_tokens, num_segments: Number of requests, tokens, and segments of absorbed attention.
        num_ids: Words before the columns, in which a graph has its tokens' ids.
        room: Number of first rows whose absorbed attention is in a graph; 0 outside of graphs.
        query_len: Rows of each request, of which a shorter one repeats its last token; 0 where each request has as many
            rows as tokens.
        has_pieces: Whether linear attention computes long pieces in chunks (`PieceSizes`).
    """

    num_reqs: int
    num_tokens: int
    num_segments: int
    query_len: int = 0
    has_pieces: bool = False
    room: int = 0
    num_ids: int = 0

    @property
    def columns(self) -> list[slice]:
        """Return the words of each column of `StepTable` but the block table."""
        num_pieces = PieceSizes(self.num_reqs, self.num_tokens).columns[-1].stop if self.has_pieces else 0
        return _columns(self.num_ids, self.num_reqs, self.num_segments, num_pieces)

    @property
    def num_words(self) -> int:
        """Return the words of ids and columns, a multiple of 4."""
        return (self.columns[-1].stop // _ALIGNMENT + 1) * _ALIGNMENT


class StepTable(NamedTuple):
    """The numbers of a step's requests, int32, arrays on the host or tensors on the device. Requests that attend with
    absorbed queries come first.

    Attributes:
        first_position, num_tokens, states: Position of each request's first new token, its new tokens, and its state
            [num_reqs]. Padding has 0 tokens, and -1 for a state.
        num_rejected: Positions that each request is moved back by, which only the device knows [num_reqs].
        begin, end: Position of each request's first new token and of the one after its last, once it is moved back
            [num_reqs]; 0 for padding. `lay_out` writes them.
        row_start: First row of each request, and the end [num_reqs + 1].
        prefill_start: First row of each prefill among those of prefills, and the end, which is repeated [num_reqs + 1].
        prefill_position: Position of each prefill's first new token [num_reqs].
        segment_start, segment_request: First row of each segment, and the end, which is repeated [num_segments + 1];
            request of each segment [num_segments].
        num_attending: Number of first rows that get local_seq_lens [1].
        pieces: Numbers of long pieces (`PieceSizes.fill`).
        block_table: Block ids of each request [num_reqs, max_blocks].
    """

    first_position: Any
    num_tokens: Any
    states: Any
    num_rejected: Any
    begin: Any
    end: Any
    row_start: Any
    prefill_start: Any
    prefill_position: Any
    segment_start: Any
    segment_request: Any
    num_attending: Any
    pieces: Any
    block_table: Any

    @classmethod
    def of(cls, words: Any, sizes: TableSizes, block_table: Any) -> "StepTable":
        """Return the columns that are parts of sizes.num_words words."""
        return StepTable._make([*map(words.__getitem__, sizes.columns), block_table])

    @classmethod
    def stage(cls, requests: StepRequests, sizes: TableSizes, blocks: np.ndarray, device: torch.device) -> Tensor:
        """Return a step's numbers and padding, then block ids [num_reqs, max_blocks], as words for one copy."""
        num_words = sizes.num_words
        # New memory, because the previous step's transfer may still read its memory.
        staged = torch.empty(num_words + blocks.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        words = staged.numpy()
        words[:num_words] = 0
        words[num_words:] = blocks.ravel()
        cls.of(words, sizes, None).fill(requests, sizes)
        return staged

    def fill(self, requests: StepRequests, sizes: TableSizes) -> None:
        """Write a step's numbers, except block ids, into arrays of zeros, and padding after them."""
        num_decodes, room = requests.num_decodes, sizes.room
        lens, num_reqs = np.asarray(requests.query_lens), len(requests.query_lens)
        self.first_position[:num_reqs] = first = np.subtract(requests.seq_lens, lens)
        self.num_tokens[:num_reqs] = lens
        self.states[num_reqs:] = -1
        if len(requests.states) and requests.states[0] is not None:
            self.states[:num_reqs] = requests.states
        if sizes.query_len:
            self.row_start[:] = np.arange(sizes.num_reqs + 1) * sizes.query_len
            self.num_attending[0] = sizes.num_tokens
            return
        starts = np.asarray(starts_of(lens))
        num_decode_tokens = int(starts[num_decodes])
        self.row_start[: num_reqs + 1] = starts
        self.row_start[num_reqs + 1 :] = starts[-1]
        # Outside of graphs, layers that select also read the local lengths of prefills.
        self.num_attending[0] = num_decode_tokens if room else sizes.num_tokens
        if num_decodes < num_reqs:
            num_prefills = num_reqs - num_decodes
            self.prefill_start[: num_prefills + 1] = starts[num_decodes:] - num_decode_tokens
            self.prefill_start[num_prefills + 1 :] = starts[-1] - num_decode_tokens
            self.prefill_position[:num_prefills] = first[num_decodes:]
        if sizes.num_segments:
            self._cut(lens[:num_decodes], requests.segment_len, room or num_decode_tokens)
        if len(self.pieces):
            pieces = PieceSizes(sizes.num_reqs, sizes.num_tokens)
            pieces.fill(self.pieces, lens, first, self.states[:num_reqs], starts)

    def _cut(self, lens: np.ndarray, segment_len: int, room: int) -> None:
        """Cut decodes, and the rows of padding after them, into segments."""
        num_padding = room - int(lens.sum())
        padded = np.append(lens, num_padding) if num_padding > 0 else lens
        segment_lens, request = cut_queries(padded, segment_len)
        self.segment_start[: len(segment_lens)] = np.cumsum(segment_lens) - segment_lens
        self.segment_start[len(segment_lens) :] = room
        self.segment_request[: len(request)] = np.where(request < len(lens), request, 0)

    def front(self, num_reqs: int, num_columns: int) -> "StepTable":
        """Return the numbers of the first requests, with num_columns block ids of each."""
        per_request = [column[:num_reqs] for column in self[:6]]
        block_table = self.block_table[:num_reqs, :num_columns].contiguous()
        return StepTable._make([*per_request, self.row_start[: num_reqs + 1], *self[7:-1], block_table])

    def nth_token(self, index: int) -> "StepTable":
        """Return the table of token number `index` of each request alone; a request with fewer tokens has none."""
        begin = self.begin + index
        end = (begin + 1).minimum(self.end).maximum(begin)
        starts = torch.arange(len(begin) + 1, dtype=torch.int32, device=begin.device)
        return self._replace(begin=begin, end=end, num_tokens=end - begin, row_start=starts, pieces=self.pieces[:0])


@lru_cache(maxsize=512)
def _columns(num_ids: int, reqs: int, segments: int, num_pieces: int) -> list[slice]:
    """Return the words of each column but the block table; each begins at a multiple of 16 bytes."""
    lengths = num_ids, *[reqs] * 6, reqs + 1, reqs + 1, reqs, segments + 1, segments, 1, num_pieces
    return aligned_slices(lengths, _ALIGNMENT)[1:]


class StepTokens(NamedTuple):
    """The numbers of a step's tokens, on the device; decodes and prefills alike.

    Attributes:
        request: Request of each token [T], int32; 0 in padding after the last one's rows.
        seq_lens: Number of its request's tokens up to and including the token, on all ranks [T], int32; 0 for padding.
        local_seq_lens: The same number on this rank [T], int32 (`Owner.local_seq_lens`); 0 from row num_attending on.
        positions: Position of each token in its sequence [T], int64.
        slots: Cache slots [T], int64; -1 where another rank owns the token, in padding, in rows that repeat others, and
            in a cache without slots.
    """

    request: Tensor
    seq_lens: Tensor
    local_seq_lens: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def empty(cls, num_tokens: int, device: torch.device | str) -> Self:
        """Return memory for the numbers of tokens."""
        dtypes = *(torch.int32,) * 3, torch.int64, torch.int64
        return cls(*(torch.empty(num_tokens, dtype=dtype, device=device) for dtype in dtypes))

    def map(self, function: Callable[[Tensor], Tensor]) -> "StepTokens":
        """Return the results of a function for each column."""
        return StepTokens(*map(function, self))

    def front(self, num_tokens: int) -> "StepTokens":
        """Return the numbers of the first tokens."""
        return self.map(lambda column: column[:num_tokens])


def cut_queries(lens: np.ndarray, max_query_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut requests of one token or more into segments of max_query_len tokens; a request's last may be shorter.

    Returns:
        The length of each segment, and its request, int32.
    """
    num_segments = -(-lens // max_query_len)
    request = np.repeat(np.arange(len(lens), dtype=np.int32), num_segments)
    segment_lens = np.full(len(request), max_query_len)
    segment_lens[np.cumsum(num_segments) - 1] = lens - (num_segments - 1) * max_query_len
    return segment_lens, request


def starts_of(lens: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Return the first row of each of consecutive segments with the given lengths, then the end of the last."""
    return (0, *np.cumsum(lens).tolist())


def pad_table(block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int], block_tokens: int) -> np.ndarray:
    """Return [num_reqs, max_blocks] int32: the block ids of each request, then zeros, which nothing reads.

    Args:
        block_tokens: Number of positions that a block id covers.
    Raises:
        ValueError: A block id is negative.
    """
    num_columns = -(-max(seq_lens) // block_tokens)
    table = np.zeros((len(block_tables), num_columns), dtype=np.int64)  # NumPy reads lists into int32 ten times slower
    for row, blocks, seq_len in zip(table, block_tables, seq_lens, strict=True):
        num_blocks = -(-seq_len // block_tokens)
        row[:num_blocks] = blocks[:num_blocks]
    if table.min() < 0:
        request, column = np.argwhere(table < 0)[0]
        raise ValueError(f"request {request}: block_tables has block {table[request, column]}; ids start at 0")
    return table.astype(np.int32)
