"""The static memory that a captured graph reads: the numbers of a decode step, padded to a batch size."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.compressed.step import CompressedMetadata
from dcpmla.attention.step import DecodeMetadata, SparseMetadata, StepMetadata
from dcpmla.cache.compressed import AnyPlan, CompressedPlan
from dcpmla.runtime.layout import UNWRITTEN, Numbers, move_back, num_words
from dcpmla.upload import upload

_NONE = -1  # the state of a request that has none


class Batch(NamedTuple):
    """A size that decode steps are padded to: requests, and tokens of each."""

    num_reqs: int
    query_len: int = 1

    @property
    def num_rows(self) -> int:
        """Return how many tokens it has."""
        return self.num_reqs * self.query_len

    def __str__(self) -> str:
        return f"{self.num_reqs} requests" + (f" of {self.query_len} tokens" if self.query_len > 1 else "")


class PaddedStep:
    """A decode step of one of several batches, in memory that never moves.

    A request of padding has token 0 at position 0: its latent goes to no slot, and it attends to no token. A request
    with fewer tokens than its batch gives it repeats the last one, whose latent is written once.

    Args:
        input_like: [...], shape, dtype and device of one token's input: its id, or a row of hidden states.
        batches: at least one.
        max_model_len: tokens of the longest request.
        sizes: of the cache.
        dcp_rank: this rank's number in its DCP group.

    Attributes:
        moves_in_steps: a step begins with `move_back`: where it may have drafts, the one before may have lost some.
    """

    def __init__(
        self,
        input_like: Tensor,
        batches: Sequence[Batch],
        max_model_len: int,
        sizes: AnyPlan,
        dcp_rank: int,
    ) -> None:
        device = input_like.device
        num_rows = max(batch.num_rows for batch in batches)
        self._shape = num_rows, -(-max_model_len // sizes.block_tokens)
        self._padding = np.zeros(self._num_words(max(batch.num_reqs for batch in batches)), dtype=np.int32)
        padding = Numbers.of(self._padding, np.int64, *self._shape)
        padding.slot_mapping[:], padding.states[:] = UNWRITTEN, _NONE
        self._memory = torch.empty(len(self._padding), dtype=torch.int32, device=device)
        self._numbers = Numbers.of(self._memory, torch.int64, *self._shape)
        self._has_ids = (input_like.shape, input_like.dtype) == ((), torch.int64)
        self._inputs: Tensor = self._numbers.token_ids
        if not self._has_ids:
            self._inputs = torch.zeros(num_rows, *input_like.shape, dtype=input_like.dtype, device=device)
        self._workspace = decode_workspace(device)
        self._max_model_len, self._sizes, self._dcp_rank = max_model_len, sizes, dcp_rank
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._request = {query_len: rows // query_len for _, query_len in batches}
        self.moves_in_steps = len(self._request) > 1
        self.clear()

    def clear(self) -> None:
        """Make every row padding."""
        self._inputs.zero_()
        self._memory.copy_(torch.from_numpy(self._padding))

    @torch.inference_mode()  # inputs may have a gradient's history: static memory must not take it over
    def fill(
        self, inputs: Tensor, metadata: StepMetadata, batch: Batch, num_rejected: Tensor | None = None
    ) -> Tensor | None:
        """Copy a step's numbers, padded to a batch: one transfer, and the inputs. Nothing waits for the device.

        Args:
            inputs: [n, ...], n = metadata.num_tokens; token ids may be on the CPU, for the same transfer.
            metadata: on the CPU, of n tokens of decodes, none longer than max_model_len.
            batch: of at least as many requests, and tokens of each.
            num_rejected: [num_reqs] int64 on the device, positions to move each request back by.
        Returns:
            [n] int64, on the device, the tokens' rows; None where these are the first n.
        Raises:
            ValueError: anything else, or numbers of another dtype or device.
        """
        decode, num_tokens = self._check(inputs, metadata), metadata.num_tokens
        tokens = rows = None
        num_rows, num_reqs = num_tokens, len(decode.block_table)
        if decode.query_start_loc is not None or decode.max_query_len < batch.query_len:
            num_rows = num_reqs * batch.query_len
            tokens, is_repeated = _repeat_last(decode, num_reqs, batch.query_len)
            tokens_there, rows = upload([tokens, np.flatnonzero(~is_repeated)], self._inputs.device)
            inputs = inputs.index_select(0, torch.from_numpy(tokens) if inputs.is_cpu else tokens_there)
        numbers = metadata.positions.numpy(), metadata.slot_mapping.numpy(), decode.local_seq_lens.numpy()
        positions, slots, local_seq_lens = numbers if tokens is None else (array[tokens] for array in numbers)
        # Memory of its own, for the transfer of the step before may still read its own.
        num_words = self._num_words(batch.num_reqs)
        memory = torch.empty(num_words, dtype=torch.int32, pin_memory=self._memory.is_cuda)
        words = memory.numpy()
        words[:] = self._padding[:num_words]
        padded = Numbers.of(words, np.int64, *self._shape)
        padded.positions[:num_rows] = positions
        padded.slot_mapping[:num_rows] = slots if tokens is None else np.where(is_repeated, UNWRITTEN, slots)
        padded.local_seq_lens[:num_rows] = local_seq_lens
        padded.seq_lens[:num_rows] = positions + 1
        if metadata.compressed is not None:
            padded.states[:num_reqs] = metadata.compressed.states.numpy()
            padded.slot_mapping[:num_rows] = UNWRITTEN  # its layers' slots follow from states and positions
        padded.block_table[:num_reqs, : decode.block_table.shape[1]] = decode.block_table.numpy()
        is_on_host = self._has_ids and inputs.is_cpu
        if is_on_host:
            padded.token_ids[:num_rows] = inputs.numpy()
        self._memory[:num_words].copy_(memory, non_blocking=True)
        if not is_on_host:
            self._inputs[:num_rows].copy_(inputs)
            self._inputs[num_rows : batch.num_rows].zero_()
        if num_rejected is not None:
            self._numbers.num_rejected[:num_reqs].copy_(num_rejected)
            if not self.moves_in_steps:
                self.move_back(batch)
        return rows

    def move_back(self, batch: Batch) -> None:
        """Move each request back by its rejected drafts."""
        move_back(self._numbers.front(batch.num_rows, batch.num_reqs), self._sizes, self._dcp_rank)

    @torch.inference_mode()
    def take(self, inputs: Tensor, other: "PaddedStep", batch: Batch) -> None:
        """Copy the numbers of another step of a batch over the same cache, and give its rows inputs [rows, ...]."""
        self._inputs[: batch.num_rows].copy_(inputs)
        own, theirs = (step._numbers.front(batch.num_rows, batch.num_reqs) for step in (self, other))
        for target, source in zip(own[1:], theirs[1:], strict=True):  # all but token ids
            target.copy_(source)
        own.num_rejected.zero_()  # it has been moved back

    def _num_words(self, num_reqs: int) -> int:
        num_rows, max_blocks = self._shape
        return num_words(num_rows, num_reqs, max_blocks)

    def rows(self, batch: Batch) -> tuple[Tensor, StepMetadata]:
        """Return a batch's inputs [batch.num_rows, ...] and metadata."""
        numbers, num_rows = self._numbers, batch.num_rows
        return (
            self._inputs[:num_rows],
            StepMetadata(
                num_tokens=num_rows,
                num_decode_tokens=num_rows,
                num_blocks=0,  # a replay's own is checked when it is filled in
                positions=numbers.positions[:num_rows],
                slot_mapping=numbers.slot_mapping[:num_rows],
                decode=DecodeMetadata(
                    block_table=numbers.block_table[: batch.num_reqs],
                    local_seq_lens=numbers.local_seq_lens[:num_rows],
                    query_start_loc=None,
                    max_query_len=batch.query_len,
                    workspace=self._workspace,
                ),
                prefill=None,
                sparse=self._sparse(batch),
                compressed=self._compressed(batch),
            ),
        )

    def _sparse(self, batch: Batch) -> SparseMetadata | None:
        if isinstance(self._sizes, CompressedPlan) or not self._sizes.index_layers:
            return None
        numbers, num_rows = self._numbers, batch.num_rows
        lens = numbers.seq_lens[:num_rows], numbers.local_seq_lens[:num_rows]
        request = self._request[batch.query_len][:num_rows]
        return SparseMetadata(numbers.block_table[: batch.num_reqs], request, *lens, self._max_model_len)

    def _compressed(self, batch: Batch) -> CompressedMetadata | None:
        if not isinstance(self._sizes, CompressedPlan):
            return None
        numbers, num_reqs, num_rows = self._numbers, batch.num_reqs, batch.num_rows
        seen = numbers.seq_lens[:num_rows].view(num_reqs, batch.query_len)  # 0 for padding
        return CompressedMetadata(
            plan=self._sizes,
            dcp_rank=self._dcp_rank,
            positions=numbers.positions[:num_rows],
            request=self._request[batch.query_len][:num_rows],
            first_position=seen[:, 0] - 1,
            seq_lens=seen[:, -1].contiguous(),
            states=numbers.states[:num_reqs],
            block_table=numbers.block_table[:num_reqs],
            max_seq_len=self._max_model_len,
        )

    def _check(self, inputs: Tensor, metadata: StepMetadata) -> DecodeMetadata:
        decode, num_tokens = metadata.decode, metadata.num_tokens
        assert decode is not None
        num_columns, max_blocks = decode.block_table.shape[1], self._shape[1]
        if num_columns > max_blocks:
            raise ValueError(
                f"metadata has a block table of {num_columns} columns; the decode graph is for at most {max_blocks}, "
                f"raise max_model_len"
            )
        if tuple(inputs.shape) != (num_tokens, *self._inputs.shape[1:]):
            raise ValueError(
                f"inputs has shape {tuple(inputs.shape)}; expected {(num_tokens, *self._inputs.shape[1:])}"
            )
        cpu = torch.device("cpu")
        of_inputs = cpu if self._has_ids and inputs.is_cpu else self._inputs.device
        for name, given, dtype, device in (
            ("inputs", inputs, self._inputs.dtype, of_inputs),
            ("metadata.positions", metadata.positions, torch.int64, cpu),
            ("metadata.slot_mapping", metadata.slot_mapping, torch.int64, cpu),
            ("metadata.decode.local_seq_lens", decode.local_seq_lens, torch.int32, cpu),
            ("metadata.decode.block_table", decode.block_table, torch.int32, cpu),
        ):
            if (given.dtype, given.device) != (dtype, device):
                raise ValueError(f"{name} is {given.dtype} on {given.device}; a decode graph takes {dtype} on {device}")
        return decode


def _repeat_last(decode: DecodeMetadata, num_reqs: int, query_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token [num_reqs * query_len] of each row of requests that are padded to query_len tokens with their
    last one, and which rows repeat it.
    """
    if decode.query_start_loc is None:
        starts = np.arange(num_reqs + 1) * decode.max_query_len
    else:
        starts = decode.query_start_loc.numpy()
    offsets = np.arange(query_len)
    tokens = np.minimum(starts[:-1, None] + offsets, starts[1:, None] - 1)
    return tokens.ravel(), (offsets >= np.diff(starts)[:, None]).ravel()
