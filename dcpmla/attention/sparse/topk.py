"""From scores to selected tokens: candidates of this rank, and the choice among those of all ranks.

Operators of torch (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs; GPUs run the kernels of
`attention/sparse/kernels/topk.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla import ownership
from dcpmla.attention.sparse.candidates import EMPTY, candidate_width, pack_candidates, unpack_positions


@torch.library.custom_op("dcpmla::local_candidates", mutates_args=())
def local_candidates(
    scores: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, topk: int, dcp_rank: int, dcp_size: int, interleave: int
) -> Tensor:
    """The best tokens of this rank: whatever is selected of all ranks' tokens is among them.

    Args:
        scores: [T, N] float32, from `index_scores`; those of rows with at most topk tokens (seq_lens) are not
        looked at.
        seq_lens, local_seq_lens: as in `SparseMetadata`.
    Returns:
        [T, candidate_width(topk, N)] int64 (`sparse.candidates`), this rank's tokens in ascending order, EMPTY
        behind them.
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


@torch.library.custom_op("dcpmla::choose_tokens", mutates_args=("positions", "slots", "num_slots"))
def choose_tokens(
    candidates: Tensor,
    block_table: Tensor,
    request: Tensor,
    block_size: int,
    dcp_rank: int,
    dcp_size: int,
    interleave: int,
    positions: Tensor,
    slots: Tensor,
    num_slots: Tensor,
) -> None:
    """Select the best topk of all ranks' candidates, and find those of them that this rank owns in its cache.

    Args:
        candidates: [T, M] int64 of all ranks, in any order, EMPTY ones among them.
        block_table, request: as in `SparseMetadata`.
        positions, slots, num_slots: written, as in `SelectedTokens`; topk is their width.
    """
    if candidates.is_cuda:
        from dcpmla.attention.sparse.kernels import topk as kernels

        where = block_size, dcp_rank, dcp_size, interleave
        kernels.choose_tokens(candidates, block_table, request, *where, positions, slots, num_slots)
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
    first = torch.sort(
        ~is_mine, dim=1, stable=True
    ).indices  # those that are mine before the others, each in their order
    slots.copy_(owned.gather(1, first))
    num_slots.copy_(is_mine.sum(1))


@choose_tokens.register_fake
def _(*_: object) -> None:
    return None


def _best(candidates: Tensor, num: int) -> Tensor:
    """The largest `num` of each row, in the order that they stand in; what is EMPTY comes last."""
    chosen = candidates.topk(num, dim=1).indices.sort(1).values
    best = candidates.gather(1, chosen)
    return best.gather(1, torch.sort(best == EMPTY, dim=1, stable=True).indices)
