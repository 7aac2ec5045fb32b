"""The static memory that a captured graph reads: the numbers of a decode step, padded to a batch size."""

import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.compressed.step import CompressedMetadata
from dcpmla.attention.step import DecodeMetadata, SparseMetadata, StepMetadata
from dcpmla.cache.compressed import AnyPlan, CompressedPlan

_NO_SLOT = _NO_STATE = -1  # nothing is written for such a token


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
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._slot_mapping = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._local_seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        max_blocks = -(-max_model_len // sizes.block_tokens)
        self._block_table = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._workspace = decode_workspace(device)
        self._max_model_len, self._sizes, self._dcp_rank = max_model_len, sizes, dcp_rank
        self._states = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._request = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Make every row padding."""
        self._pad(0, self._inputs.shape[0])

    @torch.inference_mode()  # inputs may have a gradient's history: static memory must not take it over
    def fill(self, inputs: Tensor, metadata: StepMetadata, batch_size: int) -> None:
        """Copy a step's numbers, and pad them to batch_size rows.

        Args:
            inputs: [n, ...], n = metadata.num_tokens.
            metadata: of n decodes of one token each, none longer than max_model_len.
        Raises:
            ValueError: anything else, or numbers of another dtype or device.
        """
        decode = self._check(inputs, metadata)
        num_tokens = metadata.num_tokens
        self._inputs[:num_tokens].copy_(inputs)
        self._positions[:num_tokens].copy_(metadata.positions)
        self._slot_mapping[:num_tokens].copy_(metadata.slot_mapping)
        self._local_seq_lens[:num_tokens].copy_(decode.local_seq_lens)
        torch.add(metadata.positions, 1, out=self._seq_lens[:num_tokens])
        if metadata.compressed is not None:
            self._states[:num_tokens].copy_(metadata.compressed.states)
        self._block_table[:num_tokens, : decode.block_table.shape[1]].copy_(decode.block_table)
        self._pad(num_tokens, batch_size)

    def rows(self, batch_size: int) -> tuple[Tensor, StepMetadata]:
        """Return the first rows, as a step's inputs [batch_size, ...] and metadata."""
        return (
            self._inputs[:batch_size],
            StepMetadata(
                num_tokens=batch_size,
                num_decode_tokens=batch_size,
                num_blocks=0,  # a replay's own is checked when it is filled in
                positions=self._positions[:batch_size],
                slot_mapping=self._slot_mapping[:batch_size],
                decode=DecodeMetadata(
                    block_table=self._block_table[:batch_size],
                    local_seq_lens=self._local_seq_lens[:batch_size],
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
        lens = self._seq_lens[:batch_size], self._local_seq_lens[:batch_size]
        return SparseMetadata(self._block_table[:batch_size], self._request[:batch_size], *lens, self._max_model_len)

    def _compressed(self, batch_size: int) -> CompressedMetadata | None:
        if not isinstance(self._sizes, CompressedPlan):
            return None
        seq_lens = self._seq_lens[:batch_size]
        return CompressedMetadata(
            plan=self._sizes,
            dcp_rank=self._dcp_rank,
            positions=self._positions[:batch_size],
            request=self._request[:batch_size],
            first_position=seq_lens - 1,
            seq_lens=seq_lens,
            states=self._states[:batch_size],
            block_table=self._block_table[:batch_size],
            max_seq_len=self._max_model_len,
        )

    def _pad(self, first: int, end: int) -> None:
        # After a request's last block its row of the table may hold anything, so rows of padding stay as they are.
        self._inputs[first:end].zero_()
        self._positions[first:end].zero_()
        self._slot_mapping[first:end].fill_(_NO_SLOT)
        self._local_seq_lens[first:end].zero_()
        self._seq_lens[first:end].zero_()
        self._states[first:end].fill_(_NO_STATE)

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
        num_columns, max_blocks = decode.block_table.shape[1], self._block_table.shape[1]
        if num_columns > max_blocks:
            raise ValueError(
                f"metadata has a block table of {num_columns} columns; the decode graph is for at most {max_blocks}, "
                f"raise max_model_len"
            )
        if tuple(inputs.shape) != (num_tokens, *self._inputs.shape[1:]):
            raise ValueError(
                f"inputs has shape {tuple(inputs.shape)}; expected {(num_tokens, *self._inputs.shape[1:])}"
            )
        for name, given, static in (
            ("inputs", inputs, self._inputs),
            ("metadata.positions", metadata.positions, self._positions),
            ("metadata.slot_mapping", metadata.slot_mapping, self._slot_mapping),
            ("metadata.decode.local_seq_lens", decode.local_seq_lens, self._local_seq_lens),
            ("metadata.decode.block_table", decode.block_table, self._block_table),
        ):
            if (given.dtype, given.device) != (static.dtype, static.device):
                raise ValueError(
                    f"{name} is {given.dtype} on {given.device}; the decode graph's is {static.dtype} on "
                    f"{static.device}"
                )
        return decode
