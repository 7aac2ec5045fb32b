"""The builder of steps, from numbers on the host to tensors on a device, for every model (`StepBuilder`).

Global lengths alone determine the collectives and their sizes, so all ranks of a DCP group build the same sequence of
exchanges.
"""

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments, decode_workspace
from dcpmla.attention.step.chunks import lay_out_prefills
from dcpmla.attention.step.long_pieces import num_pieces
from dcpmla.attention.step.metadata import DecodeMetadata, StepMetadata
from dcpmla.attention.step.table import (
    StepLayout,
    StepRequests,
    StepTable,
    StepTokens,
    StepTraits,
    TableSizes,
    cut_queries,
    pad_table,
    starts_of,
)
from dcpmla.config import DCPConfig
from dcpmla.upload import upload


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
        self.check(requests)
        requests = self._with_decodes(requests, max_decode_query_len, num_decodes)
        blocks = pad_table(requests.block_tables, requests.seq_lens, self.layout.block_tokens)
        return self.step(self.table(requests, blocks), requests, int(blocks.max()) + 1, workspace)

    def table(self, requests: StepRequests, blocks: np.ndarray) -> StepTable:
        """Return the numbers of requests with block ids [num_reqs, max_blocks] int32, on the device in one transfer."""
        num_reqs, num_tokens, segments = len(requests.query_lens), sum(requests.query_lens), _segments(requests)
        pieces = num_pieces(num_reqs, num_tokens) if self.layout.traits.takes_chunks else 0
        sizes = TableSizes(num_reqs, num_tokens, 0 if segments is None else len(segments), num_pieces=pieces)
        words = np.zeros(sizes.num_words, dtype=np.int32)
        StepTable.of(words, sizes, blocks).fill(requests, sizes)
        there, block_table = upload([words, blocks], self.layout.device)
        return StepTable.of(there, sizes, block_table)

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
            num_columns, segments = -(-max(seq_lens[:num_decodes]) // self.layout.block_tokens), _segments(requests)
            is_even = segments is None or segments.min() == segments.max()
            decode = DecodeMetadata(
                block_table=table.block_table[:num_decodes, :num_columns],
                local_seq_lens=tokens.local_seq_lens[:num_decode_tokens],
                queries=None if segments is None or is_even else Segments(starts_of(segments), table.segment_start),
                max_query_len=query_lens[0] if segments is None else int(segments.max()),
                workspace=decode_workspace(self.layout.device) if workspace is None else workspace,
                request_index=None if segments is None or len(segments) == num_decodes else table.segment_request,
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

    def check(self, requests: StepRequests) -> None:
        """Raise ValueError for lengths that do not match, a short block table, and states as `build` documents."""
        query_lens, seq_lens, block_tables, states = requests[:4]
        room, num_states = self.layout.block_tokens, self.layout.traits.num_states
        if not query_lens or not len(query_lens) == len(seq_lens) == len(block_tables):
            raise ValueError(
                f"query_lens, seq_lens and block_tables have {len(query_lens)}, {len(seq_lens)} and "
                f"{len(block_tables)} requests; they must have the same number, at least 1"
            )
        for request, (query, seq, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
            if not 1 <= query <= seq:
                raise ValueError(
                    f"request {request}: query_lens is {query} and seq_lens {seq}; 1 <= query_lens <= seq_lens must "
                    f"hold"
                )
            if len(blocks) * room < seq:
                raise ValueError(
                    f"request {request}: block_tables has {len(blocks)} blocks, room for "
                    f"{len(blocks) * room} tokens; seq_lens is {seq}"
                )
        num_reqs = len(query_lens)
        if num_states and not (
            len(states) == len(set(states)) == num_reqs and all(0 <= state < num_states for state in states)
        ):
            raise ValueError(
                f"states is {list(states)}; expected one for each of {num_reqs} requests, in [0, {num_states}), "
                f"none twice"
            )

    def segment_len(self, max_decode_query_len: int) -> int:
        """Return the maximum tokens of a segment: the argument, or fewer where decodes must be shorter."""
        limit = self.layout.traits.max_decode_len
        return max_decode_query_len if limit is None else min(max_decode_query_len, limit)

    def _with_decodes(self, requests: StepRequests, max_query_len: int, num_decodes: int | None) -> StepRequests:
        """Return requests with the number of decodes, and the maximum tokens of a segment (`build`)."""
        query_lens, segment_len = requests.query_lens, self.segment_len(max_query_len)
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
        return requests._replace(num_decodes=num_decodes, segment_len=segment_len)


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


def _segments(requests: StepRequests) -> np.ndarray | None:
    """Return the tokens of each segment of decodes; None if each decode is one, of as many tokens as the others."""
    lens = np.asarray(requests.query_lens[: requests.num_decodes])
    if not len(lens) or lens.min() == lens.max() <= requests.segment_len:
        return None
    return cut_queries(lens, requests.segment_len)[0]
