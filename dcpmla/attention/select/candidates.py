"""Candidates for selection: a token's score and position in one int64.

Their order as integers is the total order of selection: score descending, then position ascending. The same candidates
are selected for every number of ranks, and in every order of arrival. Layout: the score's bits, made
comparable as an integer, over 2^31 - 1 - position. No 32-bit half is ever -1, which marks memory that `direct` waits
for.
"""

import torch
from torch import Tensor

EMPTY = -(2**63)  # no candidate; less than all candidates
LAST_POSITION = 2**31 - 1
_ALL_BUT_SIGN = 0x7FFFFFFF
_LOW_HALF = 0xFFFFFFFF


def pack_candidates(scores: Tensor, positions: Tensor) -> Tensor:
    """Return candidates int64 of scores float32 and positions (integers in [0, 2^31)) that broadcast; NaN counts as
    -inf.
    """
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ _ALL_BUT_SIGN, bits)
    return (order.to(torch.int64) << 32) | (LAST_POSITION - positions)


def unpack_positions(candidates: Tensor) -> Tensor:
    """Return the int32 positions of candidates int64, -1 for EMPTY."""
    positions = LAST_POSITION - (candidates & _LOW_HALF)
    return positions.masked_fill(candidates == EMPTY, -1).to(torch.int32)


def candidate_width(topk: int, num_columns: int) -> int:
    """Return the number of candidates that a rank with num_columns tokens sends for a token, at most topk.

    It is topk, a half, a quarter or an eighth of it, because kernels are compiled for each width, and num_columns grows
    with the context.
    """
    needed = min(topk, num_columns)
    return min(width for part in (1, 2, 4, 8) if (width := -(-topk // part)) >= needed) if needed else 0
