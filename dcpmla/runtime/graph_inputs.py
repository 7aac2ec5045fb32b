"""The static memory that captured graphs read: a step's numbers and its tokens' inputs, padded to a size."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments, decode_workspace
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import DecodeMetadata, Defer, StepBuilder, StepMetadata, lay_out
from dcpmla.attention.step.table import StepRequests, StepTable, StepTokens, TableSizes, pad_table, starts_of
from dcpmla.cache.plan import CachePlan
from dcpmla.runtime.graph_sizes import GraphLimits, GraphSize, max_prompts
from dcpmla.upload import upload


class _Views(NamedTuple):
    """The parts of static memory that a size uses, made once, because each takes the host a microsecond.

    Attributes:
        sizes: Sizes of its tables.
        words, table: Ids of tokens and numbers of requests as words, and the numbers as columns with a block table.
        tokens: Numbers of tokens.
        inputs: Inputs of tokens.
    """

    sizes: TableSizes
    words: Tensor
    table: StepTable
    tokens: StepTokens
    inputs: Tensor


class _Transfer(NamedTuple):
    """The parts of static memory that a step's numbers go to: all words, the block ids among them [num_reqs,
    max_blocks], and the part of the static table over which these are spread.
    """

    words: Tensor
    blocks: Tensor
    table: Tensor


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
        tables = {size: self._table_sizes(size) for size in sizes}
        num_rows = max(size.num_tokens for size in sizes)
        num_blocks = max(each.num_reqs for each in tables.values()) * self._max_blocks
        num_words = max(each.num_words for each in tables.values())
        # Ids and columns, then the block ids of a step before they are spread over the rows of the static table.
        self._memory = torch.zeros(num_words + num_blocks, dtype=torch.int32, device=self._device)
        self._block_table = torch.zeros(num_blocks, dtype=torch.int32, device=self._device)
        self._tokens = StepTokens.empty(num_rows, self._device)
        num_hidden = 0 if self._has_ids else num_rows
        self._hidden = torch.zeros(num_hidden, *input_like.shape, dtype=input_like.dtype, device=self._device)
        self._workspace = decode_workspace(self._device)
        self._views = {size: self._views_of(size, tables[size]) for size in sizes}
        self._transfer = lru_cache(maxsize=64)(self._transfer_of)  # the same for many steps

    def clear(self, size: GraphSize) -> None:
        """Make all rows of a size padding."""
        self._memory.zero_()
        self._hidden.zero_()
        sizes, table = self._views[size].sizes, self._views[size].table
        table.states.fill_(-1)
        if len(table.pieces):  # A prompt of as many tokens takes kernels as long.
            padding = StepRequests([size.num_tokens], [size.num_tokens], [()], [-1])
            words = StepTable.stage(padding, sizes, np.zeros((1, 0), np.int32), torch.device("cpu"))
            table.pieces.copy_(StepTable.of(words, sizes, None).pieces)
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
        num_reqs, (sizes, _, table, _, target) = len(requests.query_lens), self._views[size]
        transfer = self._transfer(size, *blocks.shape)
        if size.query_len and len(inputs) != num_reqs * size.query_len:
            inputs, rows = self._repeat_last(inputs, np.asarray(requests.query_lens), size.query_len)
        if sizes.num_segments:
            requests = requests._replace(segment_len=self._limits.segment_len)
        staged = StepTable.stage(requests, sizes, blocks, self._device)
        comes_along = self._has_ids and inputs.is_cpu
        if comes_along:
            staged.numpy()[: 2 * len(inputs)].view(np.int64)[:] = inputs.numpy()  # faster than a tensor's views
        transfer.words.copy_(staged, non_blocking=True)
        transfer.table.copy_(transfer.blocks)
        if not comes_along:
            target[: len(inputs)].copy_(inputs)
            if not self._has_ids:
                target[len(inputs) :].zero_()
        if num_rejected is not None:
            table.num_rejected[:num_reqs].copy_(num_rejected)
        return rows

    @torch.inference_mode()
    def take(self, inputs: Tensor, other: "GraphInputs", size: GraphSize) -> None:
        """Copy the numbers of another step of a size over the same cache, and set the inputs [rows, ...]."""
        own, others = self._views[size], other._views[size]
        num_words = min(len(own.words), len(others.words))  # one may have no ids before its columns
        own.words[-num_words:].copy_(others.words[-num_words:])
        own.table.block_table.copy_(others.table.block_table)
        own.inputs.copy_(inputs)

    def lay_out(self, size: GraphSize) -> None:
        """Write the numbers of a size's tokens."""
        lay_out(self._views[size].table, self._views[size].tokens, self._steps.layout)

    def step(self, size: GraphSize, defer: Defer | None = None) -> tuple[Tensor, StepMetadata]:
        """Return a size's inputs [size.num_tokens, ...] and metadata, in static memory, valid once laid out."""
        sizes, _, table, tokens, inputs = self._views[size]
        decode, prefill, room = None, None, sizes.room
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
            prefill = PrefillMetadata(
                Segments((), starts), table.prefill_position[:num_prompts], (), is_deterministic=True
            )
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
        return inputs, step

    def replay(self, size: GraphSize, requests: StepRequests, workspace: Tensor | None) -> StepMetadata:
        """Return the step that was filled last, once laid out, for work between its graphs (`StepBuilder.step`)."""
        num_columns = -(-max(requests.seq_lens) // self._steps.layout.block_tokens)
        table = self._views[size].table.front(len(requests.query_lens), num_columns)
        segments = requests.segments()
        if segments is not None:
            starts, index = upload([np.array(starts_of(segments[0]), np.int32), segments[1]], self._device)
            table = table._replace(segment_start=starts, segment_request=index)
        return self._steps.step(table, requests, 0, workspace, self._tokens.front(sum(requests.query_lens)))

    def _table_sizes(self, size: GraphSize) -> TableSizes:
        limits, query_len, room = self._limits, size.query_len, self._limits.room(size)
        num_reqs = size.num_tokens // query_len if query_len else limits.max_num_seqs
        num_segments = limits.num_segments if room and not query_len else 0
        has_pieces = self._steps.layout.traits.takes_chunks and not query_len
        num_ids = 2 * size.num_tokens * self._has_ids
        return TableSizes(num_reqs, size.num_tokens, num_segments, query_len, has_pieces, room, num_ids)

    def _views_of(self, size: GraphSize, sizes: TableSizes) -> _Views:
        block_table = self._block_table[: sizes.num_reqs * self._max_blocks].view(sizes.num_reqs, self._max_blocks)
        inputs = self._memory[: sizes.num_ids].view(torch.int64) if self._has_ids else self._hidden[: size.num_tokens]
        words, tokens = self._memory[: sizes.num_words], self._tokens.front(size.num_tokens)
        return _Views(sizes, words, StepTable.of(words, sizes, block_table), tokens, inputs)

    def _transfer_of(self, size: GraphSize, num_reqs: int, num_columns: int) -> _Transfer:
        begin, end = self._views[size].sizes.num_words, self._views[size].sizes.num_words + num_reqs * num_columns
        blocks = self._memory[begin:end].view(num_reqs, num_columns)
        return _Transfer(self._memory[:end], blocks, self._views[size].table.block_table[:num_reqs, :num_columns])

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
        requests.check(self._steps.layout)
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
        if sum(query_lens) > size.num_tokens or len(query_lens) > self._views[size].sizes.num_reqs:
            raise ValueError(
                f"query_lens has {len(query_lens)} requests with {sum(query_lens)} tokens; the graph of {size} is for "
                f"at most {self._views[size].sizes.num_reqs} requests"
            )
        expected = torch.Size([sum(query_lens), *self._input_like.shape])
        if inputs.shape != expected:
            raise ValueError(f"inputs has shape {tuple(inputs.shape)}; expected {tuple(expected)}")
        dtype, device = self._input_like.dtype, self._device
        is_there = inputs.device == device or (self._has_ids and inputs.is_cpu)
        if inputs.dtype != dtype or not is_there:
            raise ValueError(f"inputs is {inputs.dtype} on {inputs.device}; the graph takes {dtype} on {device}")
        return blocks
