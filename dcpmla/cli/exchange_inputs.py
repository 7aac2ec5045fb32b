"""Random inputs of the exchange's operations on the ranks of a group, and what each must give, in float64 from all ranks' inputs.

Calls rotate through sets of inputs, one for each timed call; one set more stands behind them, in which the last rank
has an empty shard (`Combine`).
Ranks must be seeded differently: else rows of a wrong rank would not show.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.comm.exchange import Exchange, tokens_of_rows
from dcpmla.merge import merge_partials
from dcpmla.ownership import local_index, owner_rank


@dataclass(frozen=True)
class ExchangeCase:
    """What one call exchanges, over which group, and how many calls are timed.

    Attributes:
        num_tokens: new ones of the batch; of `gather_context`, cached ones of all ranks together.
        num_heads: of the whole group; `gather_context` asks for none.
        query_dim, latent_dim: width of queries and cached rows, width of partial rows.
    """

    group: dist.ProcessGroup
    num_calls: int
    num_tokens: int
    num_heads: int
    query_dim: int
    latent_dim: int
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def rows(self, *shape: int) -> Tensor:
        """A set of random rows for each call, and one more."""
        return torch.randn(self.num_calls + 1, *shape, device=self.device, dtype=self.dtype)

    def of_ranks(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order. Collective over the group."""
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return everyone


class ExchangeInputs(Protocol):
    """Inputs of one operation.

    Attributes:
        received_bytes: what a rank must get from the others in one call, whatever the backend.
    """

    received_bytes: int

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        """The operation over a set. Collective over the group."""

    def answer(self, index: int) -> tuple[Tensor, ...]:
        """What it must give on this rank, float64. Collective over the group."""


class GatherHeads:
    """q [T, h, query_dim] a set."""

    def __init__(self, case: ExchangeCase) -> None:
        self.case, self.q = case, case.rows(case.num_tokens, case.num_heads // case.size, case.query_dim)
        self.received_bytes = (case.size - 1) * self.q[0].nbytes

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        return (exchange.gather_heads(self.q[index]),)

    def answer(self, index: int) -> tuple[Tensor, ...]:
        return (torch.cat(self.case.of_ranks(self.q[index]), 1).double(),)


class Combine:
    """out [T, W h, latent_dim] and lse [T, W h] float32 a set."""

    def __init__(self, case: ExchangeCase) -> None:
        self.case, self.out = case, case.rows(case.num_tokens, case.num_heads, case.latent_dim)
        self.lse = torch.randn(self.out.shape[:-1], device=case.device)
        if case.rank == case.size - 1:
            self.out[-1], self.lse[-1] = torch.nan, -torch.inf
        self.received_bytes = (case.size - 1) * (self.out[0].nbytes + self.lse[0].nbytes) // case.size

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        return exchange.combine(self.out[index], self.lse[index])

    def answer(self, index: int) -> tuple[Tensor, ...]:
        return merge_partials(*(self._of_own_heads(mine[index]) for mine in (self.out, self.lse)))

    def _of_own_heads(self, mine: Tensor) -> Tensor:
        """[T, W h, ...] of each rank -> [W, T, h, ...]."""
        return torch.stack([rows.chunk(self.case.size, 1)[self.case.rank] for rows in self.case.of_ranks(mine)]).double()


class GatherContext:
    """rows [N, query_dim] a set, of tokens laid on the ranks in turn, the last ones padded; order [T] and tokens [N]."""

    def __init__(self, case: ExchangeCase) -> None:
        num_rows = -(-case.num_tokens // case.size)
        positions = torch.arange(case.num_tokens, device=case.device)
        self.case, self.rows = case, case.rows(num_rows, case.query_dim)
        self.order = owner_rank(positions, case.size) * num_rows + local_index(positions, case.size)
        self.tokens = tokens_of_rows(self.order, num_rows, case.rank)
        self.received_bytes = (case.size - 1) * self.rows[0].nbytes

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        return (exchange.start_context(self.rows[index], self.order, self.tokens)(),)

    def answer(self, index: int) -> tuple[Tensor, ...]:
        return (torch.stack(self.case.of_ranks(self.rows[index]), 1).flatten(0, 1)[: self.case.num_tokens].double(),)


def largest_error(results: Sequence[Tensor], answers: Sequence[Tensor]) -> float:
    """The largest |result - answer| / max(1, |answer|); inf where a shape differs or anything is not finite."""
    pairs = list(zip(results, answers, strict=True))
    if any(result.shape != answer.shape for result, answer in pairs):
        return math.inf
    return max(float(((result - answer).abs() / answer.abs().clamp(min=1)).max().nan_to_num(math.inf)) for result, answer in pairs)
