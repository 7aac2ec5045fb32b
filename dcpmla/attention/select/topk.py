"""From scores to selected tokens: this rank's candidates, and the choice among all ranks' candidates.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs; GPUs run the kernels of
`attention/select/kernels/topk.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.select.candidates import EMPTY, candidate_width, pack_candidates, unpack_positions
from dcpmla.attention.select.slots import SlotLayout, find_slots
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.operators import is_on_gpu, nothing, operator
from dcpmla.ownership import Owner


@operator(
    "local_candidates",
    kernel="dcpmla.attention.select.kernels.topk:local_candidates",
    fake=lambda scores, _seq_lens, _local_seq_lens, topk, _owner: scores.new_empty(
        scores.shape[0], candidate_width(topk, scores.shape[1]), dtype=torch.int64
    ),
    runs=is_on_gpu,
)
def local_candidates(scores: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, topk: int, owner: Owner) -> Tensor:
    """Return the best tokens of this rank, which include all its tokens that can be selected.

    Args:
        scores: Result [T, N] float32 of `index_scores`; ignored in rows with at most topk tokens (seq_lens).
        seq_lens, local_seq_lens: Columns of `SparseMetadata`.
    Returns:
        [T, candidate_width(topk, N)] int64 candidates, positions ascending, EMPTY after the last.
    """
    index = torch.arange(scores.shape[1], device=scores.device)
    positions = owner.global_position(index)
    scores = scores.masked_fill((seq_lens <= topk)[:, None], 0.0)
    candidates = pack_candidates(scores, positions).masked_fill(index >= local_seq_lens[:, None], EMPTY)
    width = candidate_width(topk, scores.shape[1])
    return _best(F.pad(candidates, (0, max(0, width - scores.shape[1])), value=EMPTY), width)


@operator(
    "choose_tokens",
    kernel="dcpmla.attention.select.kernels.topk:choose_tokens",
    fake=nothing,
    runs=is_on_gpu,
    mutates_args=("positions", "slots", "num_slots"),
)
def choose_tokens(candidates: Tensor, layout: SlotLayout, selection: SelectedTokens) -> None:
    """Select the best topk of all ranks' candidates, and find the slots of the tokens that this rank owns.

    Args:
        candidates: Candidates of all ranks, in any order, some EMPTY, [T, M] int64.
        layout: Cache that slots are in.
        selection: Selection, written; the first num_first slots are filled already and kept. topk is the width of
            positions.
    """
    positions = selection.positions
    topk = positions.shape[1]
    best = _best(candidates, min(topk, candidates.shape[1]))
    positions.fill_(-1)
    positions[:, : best.shape[1]] = unpack_positions(best)
    find_slots(layout, selection)


def _best(candidates: Tensor, num: int) -> Tensor:
    """Return the largest `num` candidates of each row in their original order, EMPTY candidates last."""
    chosen = candidates.topk(num, dim=1).indices.sort(1).values
    best = candidates.gather(1, chosen)
    return best.gather(1, torch.sort(best == EMPTY, dim=1, stable=True).indices)
