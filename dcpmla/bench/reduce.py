"""Measure the sum that ends half a decoder block, with residual and RMSNorm, per backend and tokens, and check it."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.bench.exchange_inputs import AddNorm, ExchangeCase, row_error
from dcpmla.bench.options import single
from dcpmla.bench.results import Row, finite
from dcpmla.bench.runner import Benchmark, Work
from dcpmla.bench.timing import calls_per_sample, largest
from dcpmla.cli.options import positive
from dcpmla.comm.calls import NormedSum
from dcpmla.comm.norm import add_norm
from dcpmla.comm.reduce import CollectiveReduce, select_reduce
from dcpmla.comm.terms import Terms
from dcpmla.job.join import Job
from dcpmla.parallel.mesh import init_mesh
from dcpmla.parallel.quantized import PlainRows

# NCCL rounds a sum of bfloat16 at every rank; the norm is rounded twice more.
_LARGEST_ERRORS = {"bfloat16": 0.02, "float32": 1e-5}


class Reduced(NamedTuple):
    """One backend, tokens of a step."""

    exchange: str
    tokens: int


class SymmMemReduce:
    """torch's own sums over symmetric memory, then the norm's kernel.

    Args:
        memory: Symmetric memory, for as many elements as the largest partial rows have.
        is_two_shot: Whether each rank sums a part of the elements, not all.
    """

    def __init__(self, memory: Tensor, group: ProcessGroup, is_two_shot: bool) -> None:
        self._memory, self._group_name, self._is_two_shot = memory, group.group_name, is_two_shot

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Compute `Reduce.add_norm`."""
        memory = self._memory[: partial.numel()].view_as(partial)
        if self._is_two_shot:
            memory.copy_(partial)
            summed = torch.ops.symm_mem.two_shot_all_reduce_(memory, "sum", self._group_name)
        else:
            summed = torch.ops.symm_mem.one_shot_all_reduce_copy(memory, partial, "sum", self._group_name)
        normed, new_residual, *_ = add_norm(NormedSum(Terms(summed), residual, weight, eps))
        return normed, new_residual


class ReduceBenchmark(Benchmark[Reduced, AddNorm]):
    """Every backend on the same rows."""

    options = {
        "tokens": "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192",
        "row_width": single(positive, 7168, "N", "the model's hidden size"),
    }
    series = ("exchange",)

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        num_ranks, device = job.ranks.num_ranks, self.device
        group = init_mesh(num_ranks, 1).tp_group
        selected = select_reduce(group, device)
        self.group = group
        self.backends: dict[str, Callable[..., tuple[PlainRows, Tensor]]] = {selected.name: selected.add_norm}
        if selected.name == "direct":
            memory = symmetric_memory.empty(max(args.tokens) * args.row_width, dtype=self.dtype, device=device)
            self._handle = symmetric_memory.rendezvous(memory, group.group_name)
            for name in ("one_shot", "two_shot"):
                reduce = SymmMemReduce(memory, group, is_two_shot=name == "two_shot")
                self.backends[f"symm_mem_{name}"] = reduce.add_norm
        self.backends["collective"] = CollectiveReduce(group).add_norm  # last: it adds to the rows

    def cases(self) -> Iterator[Reduced]:
        return (Reduced(name, tokens) for tokens in self.args.tokens for name in self.backends)

    def inputs(self, case: Reduced) -> AddNorm:
        sizes = calls_per_sample(self.device), case.tokens, 0, self.args.row_width, 0
        return self.kept.get(sizes, lambda: AddNorm(ExchangeCase(self.group, *sizes, self.device, self.dtype)))

    def measure(self, case: Reduced, inputs: AddNorm) -> list[Row]:
        backend, ranks, num_calls = self.backends[case.exchange], self.job.ranks, inputs.case.num_calls
        kept = inputs.partials[-1].clone()
        errors = map(row_error, inputs.run(backend, num_calls), inputs.answer(num_calls))
        error = {"error": finite(largest(max(errors), self.device))}
        inputs.partials[-1] = kept
        fields = {"operation": "add_norm", "row_width": self.args.row_width}
        fields |= {"tp": ranks.num_ranks, "gpus_per_node": ranks.num_local_ranks}
        work = Work(num_calls, lambda *_: error, fields=fields)
        return [self.kernel_row(case._asdict(), "", partial(inputs.run, backend), work)]

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        return {"error": _LARGEST_ERRORS[row["dtype"]]}
