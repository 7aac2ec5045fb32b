"""The static memory that a captured graph reads: the numbers of a decode step, padded to a batch size."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, StepBuilder
from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.chunks import pad_table
from dcpmla.attention.step import DecodeMetadata, StepMetadata, StepRequests
from dcpmla.cache.plan import CachePlan
from dcpmla.runtime.layout import lay_out
from dcpmla.runtime.numbers import Numbers, Rows, num_words
from dcpmla.upload import upload


class GraphSize(NamedTuple):
    """Size that decode steps are padded to: requests, and tokens of each."""

    num_reqs: int
    query_len: int = 1

    @property
    def num_rows(self) -> int:
        """Return the number of tokens."""
        return self.num_reqs * self.query_len

    def __str__(self) -> str:
        return f"{self.num_reqs} requests" + (f" of {self.query_len} tokens" if self.query_len > 1 else "")


class GraphInputs:
    """A decode step of one of several batches, in memory that never moves.

    A request of padding has token 0 at position 0: its latent is not written, and it attends to no token. A request
    with fewer tokens than the batch's query_len repeats the last one, whose latent is written once.

    Args:
        input_like: Tensor [...] with the shape, dtype and device of a token's input: its id, or a row of hidden states.
        batches: Sizes of steps, at least one.
        max_model_len: Number of tokens of the longest request.
        plan: Plan of the cache.
        steps: Builder of steps over the cache.
    """

    def __init__(
        self,
        input_like: Tensor,
        batches: Sequence[GraphSize],
        max_model_len: int,
        plan: CachePlan,
        steps: StepBuilder,
    ) -> None:
        device = input_like.device
        num_rows = max(batch.num_rows for batch in batches)
        self._max_blocks = -(-max_model_len // plan.block_tokens)
        self._num_words = {batch: num_words(batch.num_rows, batch.num_reqs, self._max_blocks) for batch in batches}
        self._memory = torch.zeros(max(self._num_words.values()), dtype=torch.int32, device=device)
        self._numbers = {batch: self._cut(batch, self._memory, torch.int64) for batch in batches}
        self._rows = Rows.empty(num_rows, device)
        self._input_like = input_like
        self._has_ids = (input_like.shape, input_like.dtype) == ((), torch.int64)
        num_hidden = 0 if self._has_ids else num_rows
        self._hidden = torch.zeros(num_hidden, *input_like.shape, dtype=input_like.dtype, device=device)
        self._workspace = decode_workspace(device)
        self._max_model_len, self._plan, self._steps = max_model_len, plan, steps
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._request = {query_len: rows // query_len for _, query_len in batches}

    def clear(self) -> None:
        """Make every row padding."""
        self._memory.zero_()
        self._hidden.zero_()

    @torch.inference_mode()  # static memory must not inherit the gradient history of inputs
    def fill(
        self, inputs: Tensor, requests: StepRequests, batch: GraphSize, num_rejected: Tensor | None = None
    ) -> Tensor | None:
        """Copy a step's numbers, padded to a batch, in one transfer, and the inputs. Nothing waits for the device.

        Args:
            inputs: Inputs of all new tokens [n, ...]; token ids may be on the CPU, for the same transfer.
            requests: Requests of the step, no more than the batch has, nor with more new tokens.
            num_rejected: Positions to move each request back by [num_reqs], int64 on the device.
        Returns:
            The tokens' rows [n], int64 on the device; None for the first n.
        Raises:
            ValueError: An argument does not match these conditions.
        """
        table = self._check(inputs, requests)
        query_lens, seq_lens = np.array(requests.query_lens), np.array(requests.seq_lens)
        rows, num_reqs = None, len(query_lens)
        num_rows = num_reqs * batch.query_len
        if len(inputs) != num_rows:
            tokens, is_repeated = _repeat_last(query_lens, batch.query_len)
            tokens_there, rows = upload([tokens, np.flatnonzero(~is_repeated)], self._memory.device)
            inputs = inputs.index_select(0, torch.from_numpy(tokens) if inputs.is_cpu else tokens_there)
        # New memory, because the previous step's transfer may still read its memory.
        staged = torch.empty(self._num_words[batch], dtype=torch.int32, pin_memory=self._memory.is_cuda)
        words = staged.numpy()
        words[:] = 0
        numbers = self._cut(batch, words, np.int64)
        numbers.first_position[:num_reqs] = seq_lens - query_lens
        numbers.num_tokens[:num_reqs] = query_lens
        numbers.block_table[:num_reqs, : table.shape[1]] = table
        if self._plan.num_states:
            numbers.states[:num_reqs] = np.array(requests.states) + 1
        comes_along = self._has_ids and inputs.is_cpu
        if comes_along:
            numbers.token_ids[:num_rows] = inputs.numpy()
        self._memory[: len(words)].copy_(staged, non_blocking=True)
        if not comes_along:
            self._inputs(batch)[:num_rows].copy_(inputs)
        if not self._has_ids:
            self._hidden[num_rows : batch.num_rows].zero_()
        if num_rejected is not None:
            self._numbers[batch].num_rejected[:num_reqs].copy_(num_rejected)
        return rows

    @torch.inference_mode()
    def take(self, inputs: Tensor, other: "GraphInputs", batch: GraphSize) -> None:
        """Copy the numbers of another step of a batch over the same cache, and set the inputs [rows, ...]."""
        num_words = self._num_words[batch]
        self._memory[:num_words].copy_(other._memory[:num_words])
        self._inputs(batch).copy_(inputs)

    def lay_out(self, batch: GraphSize) -> None:
        """Write the numbers of a batch's rows."""
        lay_out(self._numbers[batch], self._rows.front(batch.num_rows), self._steps)

    def rows(self, batch: GraphSize) -> tuple[Tensor, StepMetadata]:
        """Return a batch's inputs [batch.num_rows, ...] and metadata, which is valid once laid out."""
        rows, numbers, num_rows = self._rows.front(batch.num_rows), self._numbers[batch], batch.num_rows
        step = StepMetadata(
            num_tokens=num_rows,
            num_decode_tokens=num_rows,
            num_blocks=0,  # checked in `fill` for each replay
            positions=rows.positions,
            slot_mapping=rows.slot_mapping,
            decode=DecodeMetadata(numbers.block_table, rows.local_seq_lens, None, batch.query_len, self._workspace),
        )
        static = GraphRows(
            query_len=batch.query_len,
            max_seq_len=self._max_model_len,
            block_table=numbers.block_table,
            states=numbers.states - 1,
            request=self._request[batch.query_len][:num_rows],
            positions=rows.positions,
            seq_lens=rows.seq_lens,
            local_seq_lens=rows.local_seq_lens,
        )
        return self._inputs(batch), self._steps.extend_graph(step, static)

    def _cut(self, batch: GraphSize, memory: Any, int64: Any) -> Numbers:
        return Numbers.of(memory, int64, batch.num_rows, batch.num_reqs, self._max_blocks)

    def _inputs(self, batch: GraphSize) -> Tensor:
        if self._has_ids:
            ids: Tensor = self._numbers[batch].token_ids
            return ids
        return self._hidden[: batch.num_rows]

    def _check(self, inputs: Tensor, requests: StepRequests) -> np.ndarray:
        """Return the block table [num_reqs, blocks of the longest]; raise ValueError for invalid arguments."""
        self._steps.check(requests)
        query_lens, seq_lens, block_tables, _ = requests
        table = pad_table(block_tables, seq_lens, self._plan.block_tokens)
        if table.shape[1] > self._max_blocks:
            raise ValueError(
                f"seq_lens has {max(seq_lens)} tokens; the decode graph is for at most {self._max_model_len}, raise "
                f"max_model_len"
            )
        if table.max() >= self._plan.num_blocks:
            raise ValueError(
                f"block_tables has block {table.max()}; the cache has {self._plan.num_blocks} blocks, numbered from 0"
            )
        expected = torch.Size([sum(query_lens), *self._input_like.shape])
        if inputs.shape != expected:
            raise ValueError(f"inputs has shape {tuple(inputs.shape)}; expected {tuple(expected)}")
        dtype, device = self._input_like.dtype, self._memory.device
        is_there = inputs.device == device or (self._has_ids and inputs.is_cpu)
        if inputs.dtype != dtype or not is_there:
            raise ValueError(f"inputs is {inputs.dtype} on {inputs.device}; a decode graph takes {dtype} on {device}")
        return table


def _repeat_last(query_lens: np.ndarray, query_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token [num_reqs * query_len] of each row of requests that are padded to query_len tokens with their
    last one, and which rows repeat it.
    """
    ends, index = np.cumsum(query_lens), np.arange(query_len)
    tokens = np.minimum((ends - query_lens)[:, None] + index, ends[:, None] - 1)
    return tokens.ravel(), (index >= query_lens[:, None]).ravel()
