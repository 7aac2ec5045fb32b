"""A stack of attention layers with random weights: a decode step without MLPs, timed as a whole and part by part."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dcpmla.attention.costs import LayerReads
from dcpmla.attention.placement import Placement
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.bench.timing import Timing, calls_over, time_operation
from dcpmla.cache.layers import Cache
from dcpmla.comm.exchange import LocalExchange
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.parallel.mesh import DCPMesh

PARTS = ("projections", "selection", "gather", "attention", "combine", "output")
CANDIDATES = "candidates"  # exchange of the selection, also timed alone
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


class Stack:
    """Attention layers, residual around each, over caches that hold `batch` requests of `context` tokens.

    Consecutive calls take other rows of the caches, so many that the L2 holds none when its turn comes again. A
    subclass makes layers, caches and steps.

    Args:
        sizes: Number of layers and their load.
        dcp: Layout and formats of the caches, exchange of decode.
        reads: Rows and keys that a request's token reads in each layer.
        make: Function that makes a layer; its weights are then drawn at random.
    Attributes:
        parts: Parts of a step, from PARTS: no exchange where the cache is not sharded, no gather where queries are
            replicated, no selection in layers that do not select.
        layers: Layers, each with its own weights, random.
        cache: Caches of all layers.
        metadata: Metadata of each step; steps take other rows.
        hidden: Inputs of the steps [num_steps, batch, hidden].
        q, rows, lse: Queries, merged rows and their LSE, of this rank's heads.
        group_q, group_rows, group_lse: The same of the group's heads, before the merge.
    """

    cache: Cache
    metadata: list[StepMetadata]

    def __init__(
        self, sizes: StackSizes, dcp: DCPConfig, reads: LayerReads, make: Callable[[Placement], nn.Module]
    ) -> None:
        mesh = sizes.mesh
        self.dcp, self.reads, self.device, self.dtype = dcp, reads, sizes.device, sizes.dtype
        missing = ("gather", "combine") if mesh.dcp_size == 1 else ("gather",) if dcp.dcp_q_replicate else ()
        if not reads.num_keys:
            missing = (*missing, "selection")
        self.parts = tuple(part for part in PARTS if part not in missing)
        self.exchange = select_exchange(dcp, mesh.dcp_group, self.device).exchange
        placement = Placement(dcp, mesh, self.exchange, self.dtype, self.device)
        self.layers: list[Any] = [make(placement) for _ in range(sizes.num_layers)]
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.normal_(std=_WEIGHT_STD)

    def draw_inputs(self, sizes: StackSizes, hidden_size: int, num_heads: int, query_dim: int, row_dim: int) -> None:
        """Draw the inputs of the steps and of their parts, for so many heads of this rank and widths of their rows."""
        batch, heads = sizes.batch, (num_heads, num_heads * sizes.mesh.dcp_size)
        self.hidden = self.randn(len(self.metadata), batch, hidden_size)
        self.q, self.group_q = (self.randn(batch, number, query_dim) for number in heads)
        self.rows, self.group_rows = (self.randn(batch, number, row_dim) for number in heads)
        self.lse, self.group_lse = (torch.randn(batch, number, device=self.device) for number in heads)

    def randn(self, *shape: int) -> Tensor:
        """Return random numbers in the model's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def timings(self) -> dict[str, Timing]:
        """Time the whole stack ("total") and the parts that a step has. Collective over the job.

        Parts: "projections", all before the exchange of queries, or before attention where queries are replicated, but
        for "selection", from its queries to the rows selected, all ranks' candidates among it; "gather"; "attention"
        over this rank's rows; "combine" of latents, or of values if the stack projects first; "output", all after it,
        with W_UV wherever it is applied (of all the group's heads if the stack projects first). CANDIDATES is what the
        selection exchanges.

        Where attention sends rows to their owners itself (`dcp_mla_decode` through a mailbox), the step runs
        attention and combine as one operation: the parts are then the plain kernel and a whole combine, which take
        longer one after the other.
        """
        runs: dict[str, Callable[[int], object]] = {
            "total": self.step,
            "projections": self.project,
            "selection": self.select,
            CANDIDATES: self.gather_candidates,
            "gather": self.gather,
            "attention": self.attend,
            "combine": self.combine,
            "output": self.finish,
        }
        timed = {"total", *self.parts}
        if {"selection", "combine"} <= timed:
            timed.add(CANDIDATES)
        calls = calls_over(len(self.metadata), self.device)
        timings = {
            part: time_operation(run, self.device, calls, _SAMPLE_SECONDS)
            for part, run in runs.items()
            if part in timed
        }
        self.exchange.check()
        return timings

    def bytes_read(self) -> dict[str, int]:
        """Return the bytes that a call reads on one rank, by part: this rank's share of the rows that are attended to
        and of the keys that are scored; in total with all weights.
        """
        cache, reads, dcp_size = self.cache[0], self.reads, self.dcp.decode_context_parallel_size
        of_rows = len(self.layers) * self.hidden.shape[1] * cache[0].shape[-1] * cache[0].element_size()
        parts = {"attention": -(-reads.num_rows // dcp_size) * of_rows}
        if reads.num_keys:
            parts["selection"] = -(-reads.num_keys // dcp_size) * self.key_bytes()
        weights = [parameter for layer in self.layers for parameter in layer.parameters()]
        return {"total": sum(parts.values()) + sum(weight.nbytes for weight in weights), **parts}

    def key_bytes(self) -> int:
        """Return the bytes of an index key of each request in all layers."""
        raise NotImplementedError

    def step(self, index: int = 0) -> Tensor:
        """Return the hidden states [batch, hidden] after all layers."""
        hidden, metadata = self._inputs(index)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            hidden = hidden + layer(hidden, cache, metadata)
        return hidden

    def project(self, index: int = 0) -> None:
        """Run all of a layer's step until it turns to its exchange, for queries or for a mailbox."""
        hidden, metadata = self._inputs(index)
        self._project(hidden, metadata)

    def _project(self, hidden: Tensor, metadata: StepMetadata) -> None:
        for layer, cache in zip(self.layers, self.cache, strict=True):
            exchange, layer.exchange = layer.exchange, _Stop()
            try:
                layer(hidden, cache, metadata)
            except _Stopped:
                continue
            finally:
                layer.exchange = exchange
            raise RuntimeError("a layer attends without its exchange: the end of its projections is unknown")

    def select(self, index: int = 0) -> None:
        """Select rows by the indexer."""
        raise NotImplementedError

    def gather_candidates(self, _: int = 0) -> None:
        """Gather the ranks' candidates of a selection."""
        raise NotImplementedError

    def gather(self, _: int = 0) -> None:
        """Gather the queries of the group's heads."""
        for _layer in self.layers:
            self.exchange.gather_heads(self.q)

    def attend(self, index: int = 0) -> None:
        """Attend with the group's heads to this rank's rows."""
        raise NotImplementedError

    def combine(self, _: int = 0) -> None:
        """Send rows and LSE to the heads' owners and merge them."""
        for _layer in self.layers:
            self.exchange.combine(self.group_rows, self.group_lse)

    def finish(self, _: int = 0) -> None:
        """Run all after the merge."""
        raise NotImplementedError

    def _inputs(self, index: int) -> tuple[Tensor, StepMetadata]:
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
