"""What the tokens of a step select from, and what they selected."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseMetadata:
    """What each token of a step, decodes and prefills alike, may select from.

    Attributes:
        block_table: [num_reqs, max_blocks] int32, of all requests of the step.
        request: [num_tokens] int32, each token's request.
        seq_lens: [num_tokens] int32, tokens of its request at its position and before; 0 for padding.
        local_seq_lens: [num_tokens] int32, those of them on this rank.
        max_seq_len: no less than any of seq_lens, and the same on all ranks: where it is no more than top-k,
            nothing is selected.
    """

    block_table: Tensor
    request: Tensor
    seq_lens: Tensor
    local_seq_lens: Tensor
    max_seq_len: int

    def rows(self, tokens: slice) -> "SparseMetadata":
        """Of some of the tokens."""
        per_token = self.request[tokens], self.seq_lens[tokens], self.local_seq_lens[tokens]
        return SparseMetadata(self.block_table, *per_token, self.max_seq_len)


@dataclass(frozen=True)
class SelectedTokens:
    """The tokens that each token of a step attends to: written by a layer with an indexer, read by it and by layers
    that reuse it.

    Attributes:
        positions: [T, topk] int32 in the request, -1 behind the last; the same on all DCP ranks, in no order that
        means anything.
        slots: [T, topk] int32 cache slots of those that this rank owns, laid side by side; anything behind the last.
        num_slots: [T] int32, how many this rank owns.
    """

    positions: Tensor
    slots: Tensor
    num_slots: Tensor

    @classmethod
    def empty(cls, num_tokens: int, topk: int, device: torch.device | str) -> "SelectedTokens":
        """Memory for a step, of the layers of one pass."""
        positions, slots = (torch.empty(num_tokens, topk, dtype=torch.int32, device=device) for _ in range(2))
        return cls(positions, slots, torch.empty(num_tokens, dtype=torch.int32, device=device))

    def rows(self, tokens: slice) -> "SelectedTokens":
        """Of some of the tokens, in the same memory."""
        return SelectedTokens(self.positions[tokens], self.slots[tokens], self.num_slots[tokens])
