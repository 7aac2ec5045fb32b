"""Candidate blocks of scores on several ranks, compared with a choice over all scores at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dcpmla.attention.select.blocks import Candidates
from dcpmla.ownership import Owner
from tests.support.kernels import on_both

NUM_TOKENS, SIZE, NUM_BLOCKS = 12, 4, 3
LENS = torch.tensor([0, 1, 4, 12, 13, 16, 31, 32, 33, 50, 63, 64], dtype=torch.int32)


def draw_scores(seed: int) -> Tensor:
    """Return scores of 64 keys, with ties between blocks."""
    return torch.randint(0, 12, (NUM_TOKENS, 64), generator=torch.Generator().manual_seed(seed)).float()


def choose(scores: Tensor) -> Tensor:
    """Return whether each block of 4 of 64 keys is a candidate."""
    keys = torch.arange(64)
    best = scores.masked_fill(keys >= LENS[:, None], -torch.inf).unflatten(1, (-1, SIZE)).amax(2)
    num_blocks = -(-LENS // SIZE)
    filled = (num_blocks > 0).nonzero().flatten()
    best[filled, num_blocks[filled].long() - 1] = torch.inf
    order = best.sort(dim=1, descending=True, stable=True).indices
    order = order.masked_fill(best.gather(1, order) == -torch.inf, 16)[:, :NUM_BLOCKS]
    return torch.zeros(NUM_TOKENS, 17, dtype=torch.bool).scatter_(1, order, True)[:, :16]


@on_both
@pytest.mark.parametrize(("num_ranks", "interleave"), [(1, 4), (2, 4), (4, 4), (2, 8), (3, 8)])
def test_ranks_choose_as_one(num_ranks: int, interleave: int, device: str) -> None:
    """Tokens with fewer blocks than candidates have -1 after the last, and padding nothing else."""
    scores, later_scores = draw_scores(0), draw_scores(1)
    keys = torch.arange(64)
    owned = [keys[Owner(0, num_ranks, interleave).rank_of(keys) == rank] for rank in range(num_ranks)]
    width = -(-max(map(len, owned)) // interleave) * interleave
    sent: list[Tensor] = []

    def run(rank: int, gather: Callable[[Tensor], Tensor]) -> tuple[Candidates, Tensor]:
        owner = Owner(rank, num_ranks, interleave)
        blocks = torch.full((NUM_TOKENS, NUM_BLOCKS), 10**6, dtype=torch.int32, device=device)
        candidates, local = Candidates(blocks, SIZE, True), owner.local_seq_lens(LENS)
        shard, later = (torch.full((NUM_TOKENS, width), torch.nan) for _ in range(2))
        shard[:, : len(owned[rank])] = scores[:, owned[rank]]
        later[:, : len(owned[rank])] = later_scores[:, owned[rank]]
        shard, later, lens = shard.to(device), later.to(device), (LENS.to(device), local.to(device))
        candidates.choose(shard, lens, owner, gather)
        candidates.exclude_(later, owner)
        return candidates._replace(blocks=candidates.blocks.cpu()), later[:, : len(owned[rank])].cpu()

    def keep(best: Tensor) -> Tensor:
        sent.append(best)
        return best[:, None]

    for rank in range(num_ranks):
        run(rank, keep)
    gathered = torch.stack(sent, 1)
    expected = choose(scores)
    for rank in range(num_ranks):
        candidates, left = run(rank, lambda _: gathered)
        blocks = torch.zeros(NUM_TOKENS, 17, dtype=torch.bool)
        blocks.scatter_(1, torch.where(candidates.blocks < 0, 16, candidates.blocks).long(), True)
        assert torch.equal(blocks[:, :16], expected)
        assert (candidates.blocks[0] == -1).all()
        is_inside = expected.repeat_interleave(SIZE, 1)[:, owned[rank]]
        assert torch.equal(left, later_scores[:, owned[rank]].masked_fill(~is_inside, -torch.inf))
