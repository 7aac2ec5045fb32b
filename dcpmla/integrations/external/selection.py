"""A step of sparse MLA whose selection another indexer has made: of an engine's own, or of a layer in another step."""

from dataclasses import replace

import torch
from torch import Tensor

from dcpmla.attention.layers.pooled.expand import expand_pools
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens, check_positions, selectable
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.config import DCPConfig


def with_selected(step: StepMetadata, positions: Tensor, dcp: DCPConfig, dcp_rank: int) -> StepMetadata:
    """Return the step with a selection that has been made; layers with skip_topk attend to it.

    Args:
        step: Step; it gets no selection where no token has more than topk before it.
        positions: Positions in the tokens' requests [at least T, topk] int32, the same on all ranks of the DCP group;
            read now. Each row has positions up to the token's own, in any order, none twice, and -1 after the last. A
            token with at most topk tokens before and with it lists all. Rows are checked on CPUs alone: on GPUs this
            would wait for the device. There a -1 anywhere is ignored, decodes count a position as often as it is
            listed, and one after the token's own reads other tokens' rows.
        dcp, dcp_rank: Layout of the cache, and this rank's part of it.
    Raises:
        ValueError: positions are not such a tensor or, on CPUs, have other rows.
    """
    sparse, topk = selectable(step), positions.shape[-1]
    check_positions(positions, step, topk)
    if sparse.max_seq_len <= topk:
        return step.sharing(sparse)
    if positions.device.type == "cpu":
        _check_rows(positions[: step.num_tokens], sparse.seq_lens[: step.num_tokens])
    layout = SlotLayout(sparse.block_table, sparse.request, dcp.block_size, dcp.owner(dcp_rank))
    selection = SelectedTokens.empty(step.num_tokens, topk, positions.device)
    expand_pools(positions[: step.num_tokens], sparse.seq_lens, 1, layout, selection)  # pools of one token
    return step.sharing(replace(sparse, selection=selection))


def _check_rows(positions: Tensor, seq_lens: Tensor) -> None:
    """Raise ValueError for a row of positions [T, topk] that no token with seq_lens [T] may have (`with_selected`)."""
    topk, lens = positions.shape[1], seq_lens[:, None]
    num_selected = (positions >= 0).sum(1)
    is_last = torch.arange(topk) >= num_selected[:, None]
    ordered = positions.sort(1).values
    wrong = (
        ((positions < 0) != is_last).any(1)
        | (positions < -1).any(1)
        | (positions >= lens).any(1)
        | ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
        | ((num_selected < seq_lens) & (seq_lens <= topk))
        | ((num_selected == 0) & (seq_lens > 0))
    )
    if wrong.any():
        row = int(wrong.nonzero()[0])
        num = int(seq_lens[row])
        listed = f"all of [0, {num})" if num <= topk else f"some of [0, {num})"
        raise ValueError(
            f"positions[{row}] is {positions[row].tolist()}; a token after {num - 1} others lists {listed}, each once, "
            "then -1"
        )
