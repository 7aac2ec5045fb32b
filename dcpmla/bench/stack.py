"""A stack of attention layers with random weights: a decode step without MLPs, timed as a whole and part by part."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.placement import Placement
from dcpmla.attention.stack import Stack as AttentionStack
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench.timing import Operation, Timing, calls_over, num_rotated, time_operation
from dcpmla.cache.layers import Cache
from dcpmla.comm.exchange import LocalExchange
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.parallel.mesh import DCPMesh

CANDIDATES = "candidates"  # exchange of the selection, also timed alone
_ORDER = ("total", "projections", "selection", CANDIDATES, "gather", "attention", "combine", "output")
PARTS = tuple(name for name in _ORDER if name not in ("total", CANDIDATES))
_WEIGHT_STD = 0.02
MOST_STEPS = 32  # over different blocks: nodes of a graph that small caches may cost
_SAMPLE_SECONDS = 0.2  # limit for the samples of one part


class StackMaker(NamedTuple):
    """A maker of stacks of one kind of a model's layers.

    Attributes:
        has_indexer: Whether the layers have an indexer, whose cache may have a format of its own.
        new: Function that takes a stack's sizes and fields of DCPConfig.
    """

    has_indexer: bool
    new: Callable[..., "Stack"]


@dataclass(frozen=True)
class StackSizes:
    """Number of layers and their load.

    Attributes:
        mesh: Mesh of this job; the cache is sharded over its DCP group.
        num_layers: Number of layers, each with its own weights and cache, random.
        context: Number of cached tokens of each of `batch` requests.
    """

    mesh: DCPMesh
    num_layers: int
    batch: int
    context: int
    device: torch.device
    dtype: torch.dtype

    def dcp_config(self, **options: Any) -> DCPConfig:
        """Return the layout on the mesh, with other fields of DCPConfig as options."""
        mesh = self.mesh
        return DCPConfig(tensor_parallel_size=mesh.tp_size, decode_context_parallel_size=mesh.dcp_size, **options)


class Stack(ABC):
    """Attention layers, residual around each, over caches that hold `batch` requests of `context` tokens.

    Consecutive calls take other rows of the caches, so many that the L2 holds none when its turn comes again. A
    subclass fills the caches, and runs the parts that differ from layer to layer.

    Args:
        attention: Layers, all alike.
        sizes: Load of the layers.
        dcp: Layout and formats of the caches, exchange of decode.
        row_dim: Width of the rows that are merged; None where attention's rows are.
    Attributes:
        config: Geometry of the layers.
        reads: Rows and keys that a request's token reads in each layer.
        parts: Parts of a step, from PARTS: no exchange where the cache is not sharded, no gather where queries are
            replicated, no selection in layers that do not select.
        layers: Layers, each with its own weights, random.
        cache: Caches of all layers.
        metadata: Metadata of each step; steps take other rows.
        hidden: Inputs of the steps [num_steps, batch, hidden].
        q, rows, lse: Queries, merged rows and their LSE, of this rank's heads.
        group_q, group_rows, group_lse: The same of the group's heads, before the merge.
    Raises:
        ValueError: Heads do not divide, options that the layers do not have, or a cache that does not fit.
    """

    def __init__(
        self, attention: AttentionStack, sizes: StackSizes, dcp: DCPConfig, row_dim: int | None = None
    ) -> None:
        mesh, batch, context, device, dtype = sizes.mesh, sizes.batch, sizes.context, sizes.device, sizes.dtype
        self.config, self.dcp, self.device, self.dtype = attention.config, dcp, device, dtype
        self.reads = reads = attention.layers[0].reads(context)
        missing = ("gather", "combine") if mesh.dcp_size == 1 else ("gather",) if dcp.dcp_q_replicate else ()
        if not reads.num_keys:
            missing = (*missing, "selection")
        self.parts = tuple(part for part in PARTS if part not in missing)
        self.exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
        placement = Placement(dcp, mesh, self.exchange, dtype, device)
        self.layers: list[Any] = [layer.new_layer(placement) for layer in attention.layers]
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.normal_(std=_WEIGHT_STD)
        one = attention.plan_cache(dcp, [context] * batch, dtype, batch)
        self.attended_bytes = sizes.num_layers * batch * -(-reads.num_rows // mesh.dcp_size) * self.row_bytes(one)
        # Selections take different rows of the same blocks, so that many need no more memory than few.
        num_steps = num_rotated(self.attended_bytes, device, MOST_STEPS)
        num_sets = min(num_steps, num_rotated(one.bytes_per_rank, device))
        plan = attention.plan_cache(dcp, [context] * batch * num_sets, dtype, batch * num_steps)
        self.cache: Cache = plan.allocate(device)
        for cache in self.cache:
            self.fill(cache)
        blocks = torch.randperm(plan.num_blocks).view(num_sets, batch, -1).tolist()
        states = torch.arange(batch * num_steps).view(num_steps, batch).tolist()
        workspace, steps = decode_workspace(device), attention.step_builder(plan, dcp, mesh.dcp_rank, device)
        self.metadata: list[StepMetadata] = []
        for index, of_step in enumerate(states):
            requests = StepRequests([1] * batch, [context] * batch, blocks[index % num_sets], of_step)
            step = steps.build(requests, workspace=workspace)
            self.metadata.append(attention.prepare(step, self._draw_angles, dtype))
        heads = [self.config.num_heads // mesh.tp_size * size for size in (1, mesh.dcp_size)]
        row_dim = row_dim or reads.out_dim
        self.hidden = self.randn(num_steps, batch, self.config.hidden_size)
        self.q, self.group_q = (self.randn(batch, number, reads.query_dim) for number in heads)
        self.rows, self.group_rows = (self.randn(batch, number, row_dim) for number in heads)
        self.lse, self.group_lse = (torch.randn(batch, number, device=device) for number in heads)

    @abstractmethod
    def row_bytes(self, plan: Any) -> int:
        """Return the bytes of a cached row of a plan."""

    @abstractmethod
    def fill(self, cache: Any) -> None:
        """Fill a layer's cache with random rows."""

    @property
    @abstractmethod
    def rope_dim(self) -> int:
        """Return the number of columns with positions."""

    def _draw_angles(self, positions: Tensor, _: str) -> Tensor:
        return torch.randn(len(positions), self.rope_dim, device=self.device)

    def randn(self, *shape: int) -> Tensor:
        """Return random numbers in the model's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def operations(self) -> dict[str, Operation]:
        """Return the whole step ("total"), the parts and CANDIDATES, which is what a selection exchanges.

        Parts: "projections", all before the exchange of queries, or before attention where queries are replicated, but
        for "selection", from its queries to the rows selected, all ranks' candidates among it; "gather"; "attention"
        over this rank's rows; "combine" of latents, or of values if the stack projects first; "output", all after it,
        with W_UV wherever it is applied (of all the group's heads if the stack projects first).

        Where attention sends rows to their owners itself (`dcp_mla_decode` through a mailbox), the step runs
        attention and combine as one operation: the parts are then the plain kernel and a whole combine, which take
        longer one after the other.
        """
        return {
            "total": self.step,
            "projections": self.project,
            "gather": self.in_each_layer(lambda: self.exchange.gather_heads(self.q)),
            "attention": self.attend,
            "combine": self.in_each_layer(lambda: self.exchange.combine(self.group_rows, self.group_lse)),
            "output": self.finish,
        }

    def in_each_layer(self, run: Callable[[], object]) -> Operation:
        """Return the operation that runs a function once for each layer."""

        def operation(_: int) -> None:
            for _layer in self.layers:
                run()

        return operation

    def timings(self) -> dict[str, Timing]:
        """Time the whole stack and the parts that a step has, by their names in order. Collective over the job."""
        timed, operations = {"total", *self.parts}, self.operations()
        if {"selection", "combine"} <= timed:
            timed.add(CANDIDATES)
        calls = calls_over(len(self.metadata), self.device)
        timings = {
            part: time_operation(operations[part], self.device, calls, _SAMPLE_SECONDS)
            for part in _ORDER
            if part in timed
        }
        self.exchange.check()
        return timings

    def bytes_read(self) -> dict[str, int]:
        """Return the bytes that a call reads on one rank, by part: this rank's share of the rows that are attended to;
        in total with all weights.
        """
        weights = [parameter for layer in self.layers for parameter in layer.parameters()]
        total = self.attended_bytes + sum(weight.nbytes for weight in weights)
        return {"total": total, "attention": self.attended_bytes}

    def step(self, index: int = 0) -> Tensor:
        """Return the hidden states [batch, hidden] after all layers."""
        hidden, metadata = self.inputs(index)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            hidden = hidden + layer(hidden, cache, metadata)
        return hidden

    def project(self, index: int) -> None:
        """Run all of a layer's step until it turns to its exchange, for queries or for a mailbox."""
        self.project_with(*self.inputs(index))

    def project_with(self, hidden: Tensor, metadata: StepMetadata) -> None:
        """Run `project` on given inputs."""
        for layer, cache in zip(self.layers, self.cache, strict=True):
            exchange, layer.exchange = layer.exchange, _Stop()
            try:
                layer(hidden, cache, metadata)
            except _Stopped:
                continue
            finally:
                layer.exchange = exchange
            raise RuntimeError("a layer attends without its exchange: the end of its projections is unknown")

    @abstractmethod
    def attend(self, index: int) -> None:
        """Attend with the group's heads to this rank's rows."""

    @abstractmethod
    def finish(self, index: int) -> None:
        """Run all after the merge."""

    def inputs(self, index: int) -> tuple[Tensor, StepMetadata]:
        """Return the hidden states [batch, hidden] and the metadata of a call."""
        index %= len(self.metadata)
        return self.hidden[index], self.metadata[index]


class _Stopped(Exception):
    pass


class _Stop(LocalExchange):
    """An exchange that ends a layer's step."""

    name = "stop"

    def gather_heads(self, q: Tensor) -> Tensor:
        raise _Stopped

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> None:
        raise _Stopped  # the first call where queries are replicated
