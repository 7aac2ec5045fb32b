"""From scores to selected tokens: candidates of this rank, and the choice among those of all ranks.

A candidate is a token's score and position in one int64, so that comparing two of them is the total order of selection:
score descending, then position ascending. Whatever the number of ranks, and in whatever order candidates come together,
the same ones are selected. Layout: the score's bits, made comparable as an integer, over 2^31 - 1 - position. No 32-bit
half is ever -1, which marks memory that `direct` waits for.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs; GPUs run the kernels of
`attention/sparse/kernels/topk.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla import ownership
from dcpmla.operators import operator

EMPTY = -(2**63)  # no candidate: less than any
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
    """Return how many candidates a rank sends for a token, which may have num_columns tokens there: topk at most.

    A multiple of an eighth of topk: kernels are compiled for each width, and num_columns grows with every context.
    """
    step = max(1, topk // 8)
    return min(topk, -(-num_columns // step) * step)


@operator("local_candidates")
def local_candidates(
    scores: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, topk: int, dcp_rank: int, dcp_size: int, interleave: int
) -> Tensor:
    """Return the best tokens of this rank: whatever is selected of all ranks' tokens is among them.

    Args:
        scores: [T, N] float32, from `index_scores`; not looked at in rows with at most topk tokens (seq_lens).
        seq_lens, local_seq_lens: as in `SparseMetadata`.
    Returns:
        [T, candidate_width(topk, N)] int64 candidates, positions ascending, EMPTY after the last.
    """
    if scores.is_cuda:
        from dcpmla.attention.sparse.kernels import topk as kernels  # triton is there on Linux only

        return kernels.local_candidates(scores, seq_lens, local_seq_lens, topk, dcp_rank, dcp_size, interleave)
    index = torch.arange(scores.shape[1], device=scores.device)
    positions = ownership.global_position(index, dcp_rank, dcp_size, interleave)
    scores = scores.masked_fill((seq_lens <= topk)[:, None], 0.0)
    candidates = pack_candidates(scores, positions).masked_fill(index >= local_seq_lens[:, None], EMPTY)
    width = candidate_width(topk, scores.shape[1])
    return _best(F.pad(candidates, (0, max(0, width - scores.shape[1])), value=EMPTY), width)


@local_candidates.register_fake
def _(scores: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, topk: int, *_: object) -> Tensor:
    return scores.new_empty(scores.shape[0], candidate_width(topk, scores.shape[1]), dtype=torch.int64)


@operator("choose_tokens", mutates_args=("positions", "slots", "num_slots"))
def choose_tokens(
    candidates: Tensor,
    block_table: Tensor,
    request: Tensor,
    block_size: int,
    dcp_rank: int,
    dcp_size: int,
    interleave: int,
    num_first: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    num_slots: Tensor,
) -> None:
    """Select the best topk of all ranks' candidates, and find the slots of those that this rank owns.

    Args:
        candidates: [T, M] int64 of all ranks, in any order, EMPTY ones among them.
        block_table, request: as in `SparseMetadata`.
        num_first: [T] int32, slots of each token that are there already, and stay; None for none.
        positions, slots, num_slots: written, as in `SelectedTokens`; topk is the width of positions.
    """
    if candidates.is_cuda:
        from dcpmla.attention.sparse.kernels import topk as kernels

        where = block_size, dcp_rank, dcp_size, interleave
        kernels.choose_tokens(candidates, block_table, request, *where, num_first, positions, slots, num_slots)
        return
    topk = positions.shape[1]
    best = _best(candidates, min(topk, candidates.shape[1]))
    positions.fill_(-1)
    positions[:, : best.shape[1]] = unpack_positions(best)
    known = positions.clamp(min=0).long()
    is_mine = (positions >= 0) & (ownership.owner_rank(known, dcp_size, interleave) == dcp_rank)
    index = ownership.local_index(known, dcp_size, interleave)
    blocks = block_table[request.long()].gather(1, (index // block_size).clamp(max=block_table.shape[1] - 1))
    owned = blocks * block_size + index % block_size
    first = torch.sort(~is_mine, dim=1, stable=True).indices  # this rank's before the others, each in their order
    index = torch.arange(topk, device=slots.device).expand(len(slots), topk)
    if num_first is not None:
        index = index + num_first[:, None]
    slots.scatter_(1, index, owned.gather(1, first).to(slots.dtype))
    num_slots.copy_(is_mine.sum(1) + (0 if num_first is None else num_first))


@choose_tokens.register_fake
def _(*_: object) -> None:
    return None


def _best(candidates: Tensor, num: int) -> Tensor:
    """Return the largest `num` of each row in the order that they had; EMPTY ones come last."""
    chosen = candidates.topk(num, dim=1).indices.sort(1).values
    best = candidates.gather(1, chosen)
    return best.gather(1, torch.sort(best == EMPTY, dim=1, stable=True).indices)
