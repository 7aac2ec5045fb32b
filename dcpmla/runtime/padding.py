"""The static memory that a captured graph reads: the numbers of a decode step, padded to a batch size."""

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.compressed.step import CompressedMetadata
from dcpmla.attention.step import DecodeMetadata, SparseMetadata, StepMetadata
from dcpmla.cache.compressed import AnyPlan, CompressedPlan

_NONE = -1  # the slot and the state of a token for which nothing is written
_ALIGNMENT = 4  # words: columns begin at multiples of 16 bytes


class _Numbers(NamedTuple):
    """A step's integers as parts of one int32 memory: columns for all rows, then the block table row by row, so that
    those of a small batch are a front of it. Tensors of the device, or arrays of the host.
    """

    positions: Any
    slot_mapping: Any
    local_seq_lens: Any
    seq_lens: Any
    states: Any
    block_table: Any

    @classmethod
    def of(cls, memory: Any, int64: Any, max_num_seqs: int, max_blocks: int) -> Self:
        """Cut a memory of at least 7 columns."""
        words = _column_words(max_num_seqs)
        positions, slots = (memory[at : at + 2 * max_num_seqs].view(int64) for at in (0, 2 * words))
        lens, seq_lens, states = (memory[at * words : at * words + max_num_seqs] for at in (4, 5, 6))
        return cls(positions, slots, lens, seq_lens, states, memory[7 * words :].reshape(-1, max_blocks))


def _column_words(max_num_seqs: int) -> int:
    return -(-max_num_seqs // _ALIGNMENT) * _ALIGNMENT


class PaddedStep:
    """A decode step of at most max_num_seqs requests, one token each, in memory that never moves.

    A row of padding is token 0 at position 0: its latent goes to no slot, and it attends to no token.

    Args:
        input_like: [...], shape, dtype and device of one request's input: a token id, or a row of hidden states.
        max_num_seqs: requests of the largest batch.
        max_model_len: tokens of the longest request.
        sizes: of the cache.
        dcp_rank: this rank's number in its DCP group.
    """

    def __init__(
        self,
        input_like: Tensor,
        max_num_seqs: int,
        max_model_len: int,
        sizes: AnyPlan,
        dcp_rank: int,
    ) -> None:
        device = input_like.device
        self._inputs = torch.zeros(max_num_seqs, *input_like.shape, dtype=input_like.dtype, device=device)
        self._shape = max_num_seqs, -(-max_model_len // sizes.block_tokens)
        self._padding = np.zeros(self._num_words(max_num_seqs), dtype=np.int32)
        padding = _Numbers.of(self._padding, np.int64, *self._shape)
        padding.slot_mapping[:] = padding.states[:] = _NONE
        self._memory = torch.empty(len(self._padding), dtype=torch.int32, device=device)
        self._numbers = _Numbers.of(self._memory, torch.int64, *self._shape)
        self._workspace = decode_workspace(device)
        self._max_model_len, self._sizes, self._dcp_rank = max_model_len, sizes, dcp_rank
        self._request = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Make every row padding."""
        self._inputs.zero_()
        self._memory.copy_(torch.from_numpy(self._padding))

    @torch.inference_mode()  # inputs may have a gradient's history: static memory must not take it over
    def fill(self, inputs: Tensor, metadata: StepMetadata, batch_size: int) -> None:
        """Copy a step's numbers, padded to batch_size rows: one transfer, and the inputs. Nothing waits for the device.

        Args:
            inputs: [n, ...], n = metadata.num_tokens.
            metadata: on the CPU, of n decodes of one token each, none longer than max_model_len.
        Raises:
            ValueError: anything else, or numbers of another dtype or device.
        """
        decode, num_tokens = self._check(inputs, metadata), metadata.num_tokens
        # Memory of its own, for the transfer of the step before may still read its own.
        num_words = self._num_words(batch_size)
        memory = torch.empty(num_words, dtype=torch.int32, pin_memory=self._memory.is_cuda)
        words, positions = memory.numpy(), metadata.positions.numpy()
        words[:] = self._padding[:num_words]
        numbers = _Numbers.of(words, np.int64, *self._shape)
        numbers.positions[:num_tokens] = positions
        numbers.slot_mapping[:num_tokens] = metadata.slot_mapping.numpy()
        numbers.local_seq_lens[:num_tokens] = decode.local_seq_lens.numpy()
        numbers.seq_lens[:num_tokens] = positions + 1
        if metadata.compressed is not None:
            numbers.states[:num_tokens] = metadata.compressed.states.numpy()
        numbers.block_table[:num_tokens, : decode.block_table.shape[1]] = decode.block_table.numpy()
        self._memory[:num_words].copy_(memory, non_blocking=True)
        self._inputs[:num_tokens].copy_(inputs)
        if num_tokens < batch_size:
            self._inputs[num_tokens:batch_size].zero_()

    def _num_words(self, batch_size: int) -> int:
        max_num_seqs, max_blocks = self._shape
        return 7 * _column_words(max_num_seqs) + batch_size * max_blocks

    def rows(self, batch_size: int) -> tuple[Tensor, StepMetadata]:
        """Return the first rows, as a step's inputs [batch_size, ...] and metadata."""
        numbers = self._numbers
        return (
            self._inputs[:batch_size],
            StepMetadata(
                num_tokens=batch_size,
                num_decode_tokens=batch_size,
                num_blocks=0,  # a replay's own is checked when it is filled in
                positions=numbers.positions[:batch_size],
                slot_mapping=numbers.slot_mapping[:batch_size],
                decode=DecodeMetadata(
                    block_table=numbers.block_table[:batch_size],
                    local_seq_lens=numbers.local_seq_lens[:batch_size],
                    query_start_loc=None,
                    max_query_len=1,
                    workspace=self._workspace,
                ),
                prefill=None,
                sparse=self._sparse(batch_size),
                compressed=self._compressed(batch_size),
            ),
        )

    def _sparse(self, batch_size: int) -> SparseMetadata | None:
        if isinstance(self._sizes, CompressedPlan) or not self._sizes.index_layers:
            return None
        numbers = self._numbers
        lens = numbers.seq_lens[:batch_size], numbers.local_seq_lens[:batch_size]
        return SparseMetadata(numbers.block_table[:batch_size], self._request[:batch_size], *lens, self._max_model_len)

    def _compressed(self, batch_size: int) -> CompressedMetadata | None:
        if not isinstance(self._sizes, CompressedPlan):
            return None
        numbers = self._numbers
        seq_lens = numbers.seq_lens[:batch_size]
        return CompressedMetadata(
            plan=self._sizes,
            dcp_rank=self._dcp_rank,
            positions=numbers.positions[:batch_size],
            request=self._request[:batch_size],
            first_position=seq_lens - 1,
            seq_lens=seq_lens,
            states=numbers.states[:batch_size],
            block_table=numbers.block_table[:batch_size],
            max_seq_len=self._max_model_len,
        )

    def _check(self, inputs: Tensor, metadata: StepMetadata) -> DecodeMetadata:
        decode, num_tokens = metadata.decode, metadata.num_tokens
        if metadata.prefill is not None or decode is None:
            raise ValueError(
                "metadata has prefills; a decode graph runs decodes alone, give such a step to the model itself"
            )
        if decode.max_query_len != 1 or decode.block_table.shape[0] != num_tokens:
            raise ValueError(
                f"metadata has {num_tokens} query tokens of {decode.block_table.shape[0]} requests, at most "
                f"{decode.max_query_len} each; a decode graph runs one a request"
            )
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
        for name, given, dtype, device in (
            ("inputs", inputs, self._inputs.dtype, self._inputs.device),
            ("metadata.positions", metadata.positions, torch.int64, cpu),
            ("metadata.slot_mapping", metadata.slot_mapping, torch.int64, cpu),
            ("metadata.decode.local_seq_lens", decode.local_seq_lens, torch.int32, cpu),
            ("metadata.decode.block_table", decode.block_table, torch.int32, cpu),
        ):
            if (given.dtype, given.device) != (dtype, device):
                raise ValueError(f"{name} is {given.dtype} on {given.device}; a decode graph takes {dtype} on {device}")
        return decode
