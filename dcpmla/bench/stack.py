"""A stack of attention layers with random weights: a step without MLPs, timed as a whole and part by part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.mla.decode import decode_call, mla_decode
from dcpmla.attention.mla.layer import PROJECT_FIRST_TOKENS
from dcpmla.attention.placement import Placement
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.attention.stack import Stack as AttentionStack
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench.cache_formats import KV_SCALE, fill_randomly
from dcpmla.bench.timing import Operation, Timing, calls_over, num_rotated, time_operation
from dcpmla.cache.formats import to_fp8
from dcpmla.cache.layers import Cache
from dcpmla.comm.exchange import LocalExchange
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.parallel.quantized import unpack

CANDIDATES = "candidates"  # exchange of the selection, also timed alone
_ORDER = ("total", "projections", "selection", CANDIDATES, "gather", "attention", "combine", "output")
PARTS = tuple(name for name in _ORDER if name not in ("total", CANDIDATES))
_WEIGHT_STD = 0.02
MOST_STEPS = 32  # over different blocks: nodes of a graph that small caches may cost
_SAMPLE_SECONDS = 0.2  # limit for the samples of one part


@dataclass(frozen=True)
class StackSizes:
    """Number of layers and their step.

    Attributes:
        mesh: Mesh of this job; the cache is sharded over its DCP group.
        num_layers: Number of layers, each with its own weights and cache, random.
        query_lens, seq_lens: New tokens of each request, and its tokens with those before them.
        routes: Options of `StepBuilder.build` on the routes of attention.
    """

    mesh: DCPMesh
    num_layers: int
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    device: torch.device
    dtype: torch.dtype
    routes: Mapping[str, int] = field(default_factory=dict)

    def dcp_config(self, **options: Any) -> DCPConfig:
        """Return the layout on the mesh, with other fields of DCPConfig as options."""
        options.setdefault("kv_cache_scale", KV_SCALE if options.get("kv_cache_dtype") == "fp8" else None)
        mesh = self.mesh
        return DCPConfig(tensor_parallel_size=mesh.tp_size, decode_context_parallel_size=mesh.dcp_size, **options)


class Stack:
    """Layers of dense MLA, residual around each, over caches that hold the requests of a step. A subclass has layers of
    another kind.

    Consecutive calls take other rows of the caches, so many that the L2 holds none when its turn comes again.

    Args:
        attention: A model's layers, all alike; the first one is repeated.
        sizes: Step of the layers.
        dcp: Layout and formats of the caches, exchange of decode.
    Attributes:
        config: Geometry of the layers.
        reads: Rows and keys that a request's token reads in each layer.
        parts: Parts of a step, from PARTS: no exchange where the cache is not sharded, no gather where queries are
            replicated, no selection in layers that do not select.
        layers: Layers, each with its own weights, random.
        cache: Caches of all layers.
        metadata: Metadata of each step; steps take other rows.
        hidden: Inputs of the steps [num_steps, tokens, hidden].
        projects_first: Whether a step projects before it merges, which needs PROJECT_FIRST_TOKENS.
        q, rows, lse: Queries, merged rows and their LSE, of this rank's heads.
        group_q, group_rows, group_lse: The same of the group's heads, before the merge; group_out: Rows to project.
    Raises:
        ValueError: Heads do not divide, options that the layers do not have, or a cache that does not fit.
    """

    def __init__(self, attention: AttentionStack, sizes: StackSizes, dcp: DCPConfig) -> None:
        attention = AttentionStack(attention.config, attention.layers[:1] * sizes.num_layers)
        mesh, device, dtype = sizes.mesh, sizes.device, sizes.dtype
        batch, num_tokens = len(sizes.query_lens), sum(sizes.query_lens)
        self.config, self.dcp, self.device, self.dtype = attention.config, dcp, device, dtype
        self.reads = reads = attention.layers[0].reads(max(sizes.seq_lens))
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
        one = attention.plan_cache(dcp, sizes.seq_lens, dtype, batch)
        row_bytes = attention.layers[0].row_bytes(dcp.kv_cache_dtype)  # of rows in bfloat16, if they are plain
        if dcp.kv_cache_dtype == "auto":
            row_bytes = row_bytes * dtype.itemsize // 2
        self.attended_bytes = sizes.num_layers * batch * -(-reads.num_rows // mesh.dcp_size) * row_bytes
        # Selections take different rows of the same blocks, so that many need no more memory than few.
        num_steps = num_rotated(self.attended_bytes, device, MOST_STEPS)
        num_sets = min(num_steps, num_rotated(one.bytes_per_rank, device))
        plan = attention.plan_cache(dcp, [max(sizes.seq_lens)] * batch * num_sets, dtype, batch * num_steps)
        self.cache: Cache = plan.allocate(device)
        for cache in self.cache:
            self.fill(cache)
        blocks = torch.randperm(plan.num_blocks).view(num_sets, batch, -1).tolist()
        states = torch.arange(batch * num_steps).view(num_steps, batch).tolist()
        workspace, steps = decode_workspace(device), attention.step_builder(plan, dcp, mesh.dcp_rank, device)
        self.metadata: list[StepMetadata] = []
        for index, of_step in enumerate(states):
            requests = StepRequests(sizes.query_lens, sizes.seq_lens, blocks[index % num_sets], of_step)
            step = steps.build(requests, workspace=workspace, **sizes.routes)
            self.metadata.append(attention.prepare(step, self._draw_angles, dtype))
        heads = [self.config.num_heads // mesh.tp_size * size for size in (1, mesh.dcp_size)]
        self.projects_first = dcp.dcp_project_before_merge and num_tokens >= PROJECT_FIRST_TOKENS
        row_dim = self.config.v_head_dim if self.projects_first else reads.out_dim
        self.hidden = self.randn(num_steps, num_tokens, self.config.hidden_size)
        self.q, self.group_q = (self.randn(num_tokens, number, reads.query_dim) for number in heads)
        self.rows, self.group_rows = (self.randn(num_tokens, number, row_dim) for number in heads)
        self.group_out = self.randn(num_tokens, heads[1], reads.out_dim)
        self.lse, self.group_lse = (torch.randn(num_tokens, number, device=device) for number in heads)
        if (q_scale := getattr(self.layers[0], "q_scale", None)) is not None:
            self.q, self.group_q = to_fp8(self.q, q_scale), to_fp8(self.group_q, q_scale)

    def fill(self, cache: Any) -> None:
        """Fill a layer's cache with random rows."""
        fill_randomly(cache.latents, self.config.kv_lora_rank, self.dtype)

    @property
    def rope_dim(self) -> int:
        """Return the number of columns with positions."""
        rope_dim: int = self.config.qk_rope_head_dim
        return rope_dim

    def _draw_angles(self, positions: Tensor, _: str) -> Tensor:
        return torch.randn(len(positions), self.rope_dim, device=self.device)

    def randn(self, *shape: int) -> Tensor:
        """Return random numbers in the model's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def operations(self) -> dict[str, Operation]:
        """Return the whole step ("total"), the parts and, where layers select, CANDIDATES, the selection's exchange.

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
        """Return the hidden states [tokens, hidden] after all layers."""
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

    def attend(self, index: int) -> None:
        """Attend with the group's heads to this rank's rows."""
        hidden, metadata = self.inputs(index)
        decode, sizes = metadata.decode, (self.config.softmax_scale, self.config.kv_lora_rank)
        assert decode is not None
        for layer, cache in zip(self.layers, self.cache, strict=True):
            options = {"kv_scale": layer.kv_scale, "q_scale": layer.q_scale, "dtype": hidden.dtype}
            mla_decode(decode_call(self.group_q, cache.latents, decode, *sizes, **options))

    def finish(self, index: int) -> None:
        """Run all after the merge: W_UV, before or after the merge, o_proj and its all-reduce."""
        for layer in self.layers:
            if self.projects_first:
                project_values(ValueProjection(self.group_out, *unpack(layer.w_uv(slice(None)))))
                layer.o_proj(self.rows.flatten(1))
            else:
                layer.o_proj(project_values(ValueProjection(self.rows, *unpack(layer.w_uv(layer.kv_heads.own)))))

    def inputs(self, index: int) -> tuple[Tensor, StepMetadata]:
        """Return the hidden states [tokens, hidden] and the metadata of a call."""
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
