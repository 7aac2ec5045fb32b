"""The selection's two operators: the torch code against sorting in Python."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.select import topk as spec
from dcpmla.attention.select.candidates import candidate_width, unpack_positions
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.ownership import Owner

SCORES = [0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 3e38, math.inf, -math.inf, math.nan, 0.5]


def sorted_positions(scores: list[float], topk: int) -> set[int]:
    """Select for one token, by the words of the specification."""
    if len(scores) <= topk:
        return set(range(len(scores)))
    known = [-math.inf if math.isnan(score) else score for score in scores]
    return set(sorted(range(len(scores)), key=lambda position: (-known[position], position))[:topk])


def shard(
    scores: Tensor, seq_lens: Tensor, rank: int, size: int, interleave: int, num_columns: int
) -> tuple[Tensor, Tensor]:
    """Return a rank's scores [T, num_columns], NaN after each row's last, and how many of each row it has."""
    local = torch.full((len(scores), num_columns), torch.nan)
    position = torch.arange(scores.shape[1])
    owner = Owner(rank, size, interleave)
    mine = position[owner.rank_of(position) == rank]
    local[:, : len(mine)] = scores[:, mine]
    local_seq_lens = owner.local_seq_lens(seq_lens)
    local[torch.arange(num_columns) >= local_seq_lens[:, None]] = torch.nan
    return local, local_seq_lens


def owned(selection: SelectedTokens, row: int) -> list[int]:
    return selection.slots[row, : int(selection.num_slots[row])].tolist()


layouts = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4]))


@given(st.lists(st.lists(st.sampled_from(SCORES), max_size=40), min_size=1, max_size=3), st.integers(1, 12), layouts)
def test_every_layout_selects_what_sorting_does(rows: list[list[float]], topk: int, layout: tuple[int, int]) -> None:
    """Whatever the ranks, each selected token is in the slots of one of them, its owner, and nothing else is."""
    (size, interleave), block_size = layout, 4
    seq_lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    scores = torch.zeros(len(rows), 40)
    for row, known in zip(scores, rows, strict=True):
        row[: len(known)] = torch.tensor(known)
    blocks = torch.randperm(len(rows) * 10, generator=torch.Generator().manual_seed(1)).view(len(rows), 10).int()
    shards = [shard(scores, seq_lens, rank, size, interleave, 40) for rank in range(size)]
    parts = [
        spec.local_candidates(local, seq_lens, lens, topk, Owner(rank, size, interleave))
        for rank, (local, lens) in enumerate(shards)
    ]
    for part in parts:
        for positions in unpack_positions(part).tolist():
            known = [position for position in positions if position >= 0]
            assert positions == sorted(known) + [-1] * (len(positions) - len(known))
    selections = []
    for rank in range(size):
        selections.append(SelectedTokens.empty(len(rows), topk, "cpu"))
        request = torch.arange(len(rows), dtype=torch.int32)
        table = SlotLayout(blocks, request, block_size, Owner(rank, size, interleave))
        spec.choose_tokens(torch.cat(parts, 1), table, selections[rank])
    for row, known in enumerate(rows):
        wanted = sorted_positions(known, topk)
        for rank, selection in enumerate(selections):
            num_selected = len(wanted)
            assert set(selection.positions[row, :num_selected].tolist()) == wanted
            assert set(selection.positions[row, num_selected:].tolist()) <= {-1}
            owner = Owner(rank, size, interleave)
            mine = torch.tensor([each for each in wanted if owner.rank_of(each) == rank], dtype=torch.int64)
            slots = owner.slot_mapping(mine, blocks[row], block_size)
            assert sorted(owned(selection, row)) == sorted(slots.tolist())


@given(topk=st.integers(1, 3000), num_columns=st.integers(1, 5000))
def test_candidates_are_enough_and_of_few_widths(topk: int, num_columns: int) -> None:
    width = candidate_width(topk, num_columns)
    assert min(topk, num_columns) <= width <= topk
    assert len({candidate_width(topk, number) for number in range(1, 5000, 7)}) <= 16
