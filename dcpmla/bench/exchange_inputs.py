"""Random inputs of operations on the ranks of a group, and the exact results, in float64 from all ranks' inputs.

Every rank draws everyone's inputs by itself, so that nothing that is under test moves the answers. Calls rotate
through sets of inputs, one for each timed call; in one more set, the last, shards are empty (`Combine`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.bench.timing import largest
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.norm import rms_norm
from dcpmla.comm.reach import reach
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.merge import merge_partials
from dcpmla.ownership import Owner
from dcpmla.parallel.quantized import PlainRows, plain

_NUM_DRAWN = 131071  # numbers drawn before they repeat; a prime: fewer rows than that are all different


@dataclass(frozen=True)
class ExchangeCase:
    """The sizes of one call, its group, and how many calls are timed.

    Attributes:
        num_tokens: New tokens of the batch; for `gather_context`, cached tokens of all ranks together.
        num_heads: Heads of the whole group; `gather_context` and `AddNorm` use none.
        query_dim, latent_dim: Width of queries, cached rows and hidden states, width of partial rows.
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

    def draw(self, rank: int, index: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the normal numbers of a rank's set, the same wherever they are drawn."""
        generator, size = torch.Generator().manual_seed(index * self.size + rank), math.prod(shape)
        drawn = torch.randn(min(size, _NUM_DRAWN), generator=generator).to(self.device, dtype)
        return drawn.repeat(-(-size // _NUM_DRAWN))[:size].view(shape)

    def sets(self, *shape: int) -> Tensor:
        """Return this rank's rows for each call, and one set more."""
        sets = torch.empty(self.num_calls + 1, *shape, device=self.device, dtype=self.dtype)
        for index, rows in enumerate(sets):
            rows.copy_(self.draw(self.rank, index, self.dtype, *shape))
        return sets

    def of_ranks(self, index: int, *shape: int) -> list[Tensor]:
        """Return every rank's rows of a set, in rank order."""
        return [self.draw(rank, index, self.dtype, *shape) for rank in range(self.size)]


def exchange_of(group: dist.ProcessGroup, device: torch.device, **options: Any) -> Exchange:
    """Return the exchange of a group that is as large as its TP group, by fields of DCPConfig. Collective over the
    group.
    """
    size = dist.get_world_size(group)
    dcp = DCPConfig(tensor_parallel_size=size, decode_context_parallel_size=size, **options)
    return select_exchange(dcp, group, device).exchange


def with_direct(backends: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return backends, and `direct` where it runs on every group of the job: all ranks measure the same. Collective
    over the job.
    """
    is_out_of_reach = largest(bool(reach(group, device)), device)
    return [*backends, *([] if is_out_of_reach else ["direct"])]


def exchanges_of(
    asked: Sequence[str] | None, usual: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Exchange]:
    """Return the exchanges of a group by backend: those asked for, or the usual ones and `direct`. Collective."""
    backends = asked or with_direct(usual, group, device)
    return {backend: exchange_of(group, device, dcp_comm_backend=backend) for backend in backends}


class ExchangeInputs(Protocol):
    """Inputs of one operation of an exchange.

    Attributes:
        received_bytes: Bytes that a rank must get from the others in one call, whatever the backend.
    """

    received_bytes: int

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        """Run the operation over a set. Collective over the group."""

    def answer(self, index: int) -> tuple[Tensor, ...]:
        """Return the exact result on this rank, float64."""


class GatherHeads:
    """q [T, h, query_dim] a set."""

    def __init__(self, case: ExchangeCase) -> None:
        self.case, self.q = case, case.sets(case.num_tokens, case.num_heads // case.size, case.query_dim)
        self.received_bytes = (case.size - 1) * self.q[0].nbytes

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        return (exchange.gather_heads(self.q[index]),)

    def answer(self, index: int) -> tuple[Tensor, ...]:
        return (torch.cat(self.case.of_ranks(index, *self.q.shape[1:]), 1).double(),)


class Combine:
    """out [T, W h, latent_dim] and lse [T, W h] float32 a set."""

    def __init__(self, case: ExchangeCase) -> None:
        shape = case.num_calls + 1, case.num_tokens, case.num_heads
        self.case, self.out = case, torch.empty(*shape, case.latent_dim, device=case.device, dtype=case.dtype)
        self.lse = torch.empty(shape, device=case.device)
        for index, parts in enumerate(zip(self.out, self.lse, strict=True)):
            for row, drawn in zip(parts, self._shard(case.rank, index), strict=True):
                row.copy_(drawn)
        self.received_bytes = (case.size - 1) * (self.out[0].nbytes + self.lse[0].nbytes) // case.size

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        return exchange.combine(self.out[index], self.lse[index])

    def answer(self, index: int) -> tuple[Tensor, ...]:
        size, own = self.case.size, self.case.rank
        shards = [[part.chunk(size, 1)[own].double() for part in self._shard(rank, index)] for rank in range(size)]
        out, lse = (torch.stack(parts) for parts in zip(*shards, strict=True))
        return merge_partials(out, lse)

    def _shard(self, rank: int, index: int) -> tuple[Tensor, Tensor]:
        """Return a rank's set.

        In the last one every fourth token has nothing on the first rank, another on the last rank, a third on any.
        """
        case, shape = self.case, self.out.shape[1:]
        out, lse = case.draw(rank, index, case.dtype, *shape), 3 * case.draw(rank, index, torch.float32, *shape[:-1])
        if index == case.num_calls:
            for token, is_empty in enumerate((rank == 0, rank == case.size - 1, True)):
                if is_empty:
                    out[token::4], lse[token::4] = torch.nan, -torch.inf
        return out, lse


class GatherContext:
    """rows [N, query_dim] a set, of tokens dealt to the ranks in turn, the last ones padded; order [T], tokens [N]."""

    def __init__(self, case: ExchangeCase) -> None:
        num_rows = -(-case.num_tokens // case.size)
        positions = torch.arange(case.num_tokens, device=case.device)
        self.case, self.rows = case, case.sets(num_rows, case.query_dim)
        owner = Owner(case.rank, case.size)
        self.order = owner.rank_of(positions) * num_rows + owner.local_index(positions)
        tokens = owner.global_position(torch.arange(num_rows, device=case.device))
        self.tokens = torch.where(tokens < case.num_tokens, tokens, -1)
        self.received_bytes = (case.size - 1) * self.rows[0].nbytes

    def run(self, exchange: Exchange, index: int) -> tuple[Tensor, ...]:
        return (exchange.start_context(self.rows[index], self.order, self.tokens)(),)

    def answer(self, index: int) -> tuple[Tensor, ...]:
        rows = torch.stack(self.case.of_ranks(index, *self.rows.shape[1:]), 1)
        return (rows.flatten(0, 1)[: self.case.num_tokens].double(),)


OPERATIONS: dict[str, Callable[[ExchangeCase], ExchangeInputs]] = {
    "gather_heads": GatherHeads,
    "combine": Combine,
    "gather_context": GatherContext,
}


class AddNorm:
    """Partial rows [T, query_dim] of this rank a set; residuals of the same shape and a weight that all ranks share."""

    eps = 1e-6

    def __init__(self, case: ExchangeCase) -> None:
        shape = case.num_tokens, case.query_dim
        self.case, self.partials = case, case.sets(*shape)
        self.residuals = [case.draw(0, -1 - index, case.dtype, *shape) for index in range(len(self.partials))]
        self.weight = case.draw(0, 0, case.dtype, case.query_dim)

    def run(self, add_norm: Callable[..., tuple[PlainRows, Tensor]], index: int) -> tuple[Tensor, Tensor]:
        """Run `Reduce.add_norm` over a set, in which collectives leave their sum. Collective over the group."""
        normed, residual = add_norm(self.partials[index], self.residuals[index], self.weight, self.eps)
        return plain(normed), residual

    def answer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the exact result, float64."""
        residual = self.residuals[index].double()
        for rows in self.case.of_ranks(index, *self.partials.shape[1:]):
            residual += rows
        return rms_norm(residual, self.weight.double(), self.eps), residual


def find_errors(results: Sequence[Tensor], answers: Sequence[Tensor]) -> list[float]:
    """Return the error of rows, and the error of their LSE where the results have one."""
    (rows, *lse), (rows_answer, *lse_answer) = results, answers
    return [row_error(rows, rows_answer), *map(lse_error, lse, lse_answer)]


def row_error(rows: Tensor, answer: Tensor) -> float:
    """Return the largest difference of rows [..., D], relative to the row's largest number; inf for another shape, or
    where a row is not finite.
    """
    if rows.shape != answer.shape:
        return math.inf
    of_rows = (rows.double() - answer).abs().amax(-1) / answer.abs().amax(-1).clamp(min=1e-30)
    return float(of_rows.max().nan_to_num(math.inf, math.inf))


def lse_error(lse: Tensor, answer: Tensor) -> float:
    """Return the largest difference, -inf being equal to itself; inf for another shape, or where one alone is not
    finite.
    """
    if lse.shape != answer.shape:
        return math.inf
    difference = (lse.double() - answer.double()).where(lse != answer, 0.0)
    return float(difference.abs().max().nan_to_num(math.inf, math.inf))
