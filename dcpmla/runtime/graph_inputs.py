"""The static memory that captured graphs read: a step's numbers and its tokens' inputs, padded to a size."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments, decode_workspace
from dcpmla.attention.step.build import StepBuilder, lay_out
from dcpmla.attention.step.chunks import PrefillMetadata, segments_of
from dcpmla.attention.step.long_pieces import num_pieces
from dcpmla.attention.step.metadata import DecodeMetadata, Defer, StepMetadata
from dcpmla.attention.step.table import StepRequests, StepTable, StepTokens, TableSizes, cut_queries, pad_table
from dcpmla.cache.plan import CachePlan
from dcpmla.runtime.graph_sizes import GraphLimits, GraphSize, max_prompts
from dcpmla.upload import upload


class GraphInputs:
    """A step of one of several sizes, and its tokens' inputs, in memory that never moves.

    A token of padding has input 0 at position 0: its latent is not written, and it attends to no token. In sizes of
    decodes, a request with fewer tokens than the size's query_len repeats the last one, whose latent is written once.

    Args:
        input_like: Tensor [...] with the shape, dtype and device of a token's input: its id, or a row of hidden states.
        sizes: Sizes of steps, at least one.
        limits: Limits of the steps.
        plan: Plan of the cache.
        steps: Builder of steps over the cache.
    """

    def __init__(
        self, input_like: Tensor, sizes: Sequence[GraphSize], limits: GraphLimits, plan: CachePlan, steps: StepBuilder
    ) -> None:
        self._limits, self._steps, self._plan, self._input_like = limits, steps, plan, input_like
        self._device, self._has_ids = input_like.device, (input_like.shape, input_like.dtype) == ((), torch.int64)
        self._max_blocks = -(-limits.max_model_len // steps.layout.block_tokens)
        self._sizes = {size: self._table_sizes(size) for size in sizes}
        num_rows = max(size.num_tokens for size in sizes)
        num_blocks = max(each.num_reqs for each in self._sizes.values()) * self._max_blocks
        num_words = max(self._num_ids(size) + each.num_words for size, each in self._sizes.items())
        # Ids and columns, then the block ids of a step before they are spread over the rows of the static table.
        self._memory = torch.zeros(num_words + num_blocks, dtype=torch.int32, device=self._device)
        self._block_table = torch.zeros(num_blocks, dtype=torch.int32, device=self._device)
        self._tokens = StepTokens.empty(num_rows, self._device)
        num_hidden = 0 if self._has_ids else num_rows
        self._hidden = torch.zeros(num_hidden, *input_like.shape, dtype=input_like.dtype, device=self._device)
        self._workspace = decode_workspace(self._device)
        # Views are made once, because each takes the host a microsecond.
        self._columns = {size: self._columns_of(size) for size in sizes}
        self._tables = {size: self._table_of(size) for size in sizes}
        self._inputs = {size: self._inputs_of(size) for size in sizes}

    def clear(self, size: GraphSize) -> None:
        """Make all rows of a size padding."""
        self._memory.zero_()
        self._hidden.zero_()
        table, sizes = self._tables[size], self._sizes[size]
        table.states.fill_(-1)
        if sizes.num_pieces:  # A prompt of as many tokens takes kernels as long.
            padding = StepRequests([size.num_tokens], [size.num_tokens], [()], [-1])
            words = np.zeros(sizes.num_words, dtype=np.int32)
            numbers = StepTable.of(words, sizes, None)
            numbers.fill(padding, sizes)
            table.pieces.copy_(torch.from_numpy(numbers.pieces))
        self.lay_out(size)

    @torch.inference_mode()  # static memory must not inherit the gradient history of inputs
    def fill(
        self, size: GraphSize, inputs: Tensor, requests: StepRequests, num_rejected: Tensor | None = None
    ) -> Tensor | None:
        """Copy a step's numbers, padded to a size, in one transfer, and the inputs. Nothing waits for the device.

        Args:
            inputs: Inputs of all new tokens [n, ...]; token ids may be on the CPU, for the same transfer.
            requests: Requests of the step, no more than the size has, nor with more new tokens. Graphs compute the
                absorbed attention of its decodes.
            num_rejected: Positions to move each request back by [num_reqs], int64 on the device.
        Returns:
            The tokens' rows [n], int64 on the device; None for the first n.
        Raises:
            ValueError: An argument does not match these conditions.
        """
        blocks, rows = self._check(size, inputs, requests), None
        num_reqs, sizes, num_ids = len(requests.query_lens), self._sizes[size], self._num_ids(size)
        if size.query_len and len(inputs) != num_reqs * size.query_len:
            inputs, rows = self._repeat_last(inputs, np.asarray(requests.query_lens), size.query_len)
        num_words = num_ids + sizes.num_words
        # New memory, because the previous step's transfer may still read its memory.
        staged = torch.empty(num_words + blocks.size, dtype=torch.int32, pin_memory=self._memory.is_cuda)
        words = staged.numpy()
        words[:num_words] = 0
        words[num_words:] = blocks.ravel()
        numbers = StepTable.of(words[num_ids:num_words], sizes, None)
        numbers.fill(requests._replace(segment_len=self._limits.segment_len), sizes, self._limits.room(size))
        comes_along = self._has_ids and inputs.is_cpu
        if comes_along:
            words[:num_ids].view(np.int64)[: len(inputs)] = inputs.numpy()
        self._memory[: len(words)].copy_(staged, non_blocking=True)
        there = self._memory[num_words : len(words)].view(blocks.shape)
        self._tables[size].block_table[: blocks.shape[0], : blocks.shape[1]].copy_(there)
        if not comes_along:
            self._inputs[size][: len(inputs)].copy_(inputs)
            if not self._has_ids:
                self._hidden[len(inputs) : size.num_tokens].zero_()
        if num_rejected is not None:
            self._tables[size].num_rejected[:num_reqs].copy_(num_rejected)
        return rows

    @torch.inference_mode()
    def take(self, inputs: Tensor, other: "GraphInputs", size: GraphSize) -> None:
        """Copy the numbers of another step of a size over the same cache, and set the inputs [rows, ...]."""
        self._columns[size].copy_(other._columns[size])
        self._tables[size].block_table.copy_(other._tables[size].block_table)
        self._inputs[size].copy_(inputs)

    def lay_out(self, size: GraphSize) -> None:
        """Write the numbers of a size's tokens."""
        lay_out(self._tables[size], self._tokens.front(size.num_tokens), self._steps.layout)

    def step(self, size: GraphSize, defer: Defer | None = None) -> tuple[Tensor, StepMetadata]:
        """Return a size's inputs [size.num_tokens, ...] and metadata, in static memory, valid once laid out."""
        table, tokens, room = self._tables[size], self._tokens.front(size.num_tokens), self._limits.room(size)
        decode = prefill = None
        if room:
            is_even = size.query_len > 0
            decode = DecodeMetadata(
                block_table=table.block_table,
                local_seq_lens=tokens.local_seq_lens[:room],
                queries=None if is_even else Segments((0, room), table.segment_start),
                max_query_len=size.query_len or self._limits.segment_len,
                workspace=self._workspace,
                request_index=None if is_even else table.segment_request,
            )
        if self._limits.has_prompts and size.is_whole:
            num_prompts = max_prompts(size.num_tokens)
            starts = table.prefill_start[: num_prompts + 1] + table.num_attending  # rows of the whole step
            prefill = PrefillMetadata(Segments((), starts), table.prefill_position[:num_prompts], (), in_order=True)
        step = StepMetadata(
            layout=self._steps.layout,
            table=table,
            tokens=tokens,
            num_tokens=size.num_tokens,
            num_decode_tokens=room,
            num_decodes=len(table.num_tokens),
            num_blocks=0,  # checked in `fill` for each step
            max_seq_len=self._limits.max_model_len,
            decode=decode,
            prefill=prefill,
            defer=defer,
        )
        return self._inputs[size], step

    def replay(self, size: GraphSize, requests: StepRequests, workspace: Tensor | None) -> StepMetadata:
        """Return the step that was filled last, once laid out, for work between its graphs (`StepBuilder.step`)."""
        num_columns = -(-max(requests.seq_lens) // self._steps.layout.block_tokens)
        table = self._tables[size].front(len(requests.query_lens), num_columns)
        decodes = np.asarray(requests.query_lens[: requests.num_decodes])
        if len(decodes) and not (decodes.min() == decodes.max() <= requests.segment_len):
            segments, index = cut_queries(decodes, requests.segment_len)
            (request,) = upload([index], self._device)
            starts = segments_of(segments, self._device).start_loc
            table = table._replace(segment_start=starts, segment_request=request)
        return self._steps.step(table, requests, 0, workspace, self._tokens.front(sum(requests.query_lens)))

    def _table_sizes(self, size: GraphSize) -> TableSizes:
        limits, has_chunks = self._limits, self._steps.layout.traits.takes_chunks and not size.query_len
        num_reqs = size.num_tokens // size.query_len if size.query_len else limits.max_num_seqs
        num_segments = 0 if size.query_len or not limits.room(size) else limits.num_segments
        pieces = num_pieces(num_reqs, size.num_tokens) if has_chunks else 0
        return TableSizes(num_reqs, size.num_tokens, num_segments, size.query_len, pieces)

    def _columns_of(self, size: GraphSize) -> Tensor:
        begin = self._num_ids(size)
        return self._memory[begin : begin + self._sizes[size].num_words]

    def _table_of(self, size: GraphSize) -> StepTable:
        num_reqs = self._sizes[size].num_reqs
        block_table = self._block_table[: num_reqs * self._max_blocks].view(num_reqs, self._max_blocks)
        return StepTable.of(self._columns[size], self._sizes[size], block_table)

    def _num_ids(self, size: GraphSize) -> int:
        """Return the words of a size's token ids, before its columns, which begin at multiples of 16 bytes."""
        return -(-2 * size.num_tokens // 4) * 4 if self._has_ids else 0

    def _inputs_of(self, size: GraphSize) -> Tensor:
        if self._has_ids:
            return self._memory[: self._num_ids(size)].view(torch.int64)[: size.num_tokens]
        return self._hidden[: size.num_tokens]

    def _repeat_last(self, inputs: Tensor, query_lens: np.ndarray, query_len: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of requests that are padded to query_len tokens with their last one, and the rows of those
        that do not repeat another.
        """
        ends, index = np.cumsum(query_lens), np.arange(query_len)
        tokens = np.minimum((ends - query_lens)[:, None] + index, ends[:, None] - 1).ravel()
        tokens_there, rows = upload([tokens, np.flatnonzero(index < query_lens[:, None])], self._device)
        return inputs.index_select(0, torch.from_numpy(tokens) if inputs.is_cpu else tokens_there), rows

    def _check(self, size: GraphSize, inputs: Tensor, requests: StepRequests) -> np.ndarray:
        """Return the block table [num_reqs, blocks of the longest]; raise ValueError for invalid arguments."""
        self._steps.check(requests)
        query_lens, seq_lens, block_tables = requests[:3]
        blocks = pad_table(block_tables, seq_lens, self._steps.layout.block_tokens)
        if blocks.shape[1] > self._max_blocks:
            raise ValueError(
                f"seq_lens has {max(seq_lens)} tokens; the graph is for at most {self._limits.max_model_len}, raise "
                f"max_model_len"
            )
        if blocks.max() >= self._plan.num_blocks:
            raise ValueError(
                f"block_tables has block {blocks.max()}; the cache has {self._plan.num_blocks} blocks, numbered from 0"
            )
        if sum(query_lens) > size.num_tokens or len(query_lens) > self._sizes[size].num_reqs:
            raise ValueError(
                f"query_lens has {len(query_lens)} requests with {sum(query_lens)} tokens; the graph of {size} is for "
                f"at most {self._sizes[size].num_reqs} requests"
            )
        expected = torch.Size([sum(query_lens), *self._input_like.shape])
        if inputs.shape != expected:
            raise ValueError(f"inputs has shape {tuple(inputs.shape)}; expected {tuple(expected)}")
        dtype, device = self._input_like.dtype, self._device
        is_there = inputs.device == device or (self._has_ids and inputs.is_cpu)
        if inputs.dtype != dtype or not is_there:
            raise ValueError(f"inputs is {inputs.dtype} on {inputs.device}; the graph takes {dtype} on {device}")
        return blocks
