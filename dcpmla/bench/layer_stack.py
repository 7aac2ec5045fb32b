"""A stack of MLA layers with random weights: a decode step without MLPs, timed as a whole and part by part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.decode import mla_decode
from dcpmla.attention.layer import PROJECT_FIRST_TOKENS, MLAAttention
from dcpmla.attention.projections import project_values
from dcpmla.attention.rope import query_factor
from dcpmla.attention.step import StepMetadata
from dcpmla.bench.cache_formats import KV_SCALE, fill_randomly
from dcpmla.bench.timing import Timing, time_operation
from dcpmla.cache.formats import to_fp8
from dcpmla.cache.latent import LatentCache, num_blocks
from dcpmla.comm.exchange import LocalExchange
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.parallel.mesh import DCPMesh

PARTS = ("projections", "gather", "attention", "combine", "output")
_WEIGHT_STD = 0.02
_ROTATED_BYTES = {"cuda": 256 << 20, "cpu": 0}  # of all layers' caches: several times the L2 of an H200, 60 MB
_MOST_STEPS = 32  # over different blocks: nodes of a graph that small caches may cost
_FEWEST_CALLS = {"cuda": 4, "cpu": 1}  # of a sample
_SAMPLE_SECONDS = 0.2  # that the samples of one part may take


class LayerStack:
    """MLA layers, residual around each, over caches that hold `batch` requests of `context` tokens.

    Consecutive calls take other blocks of the caches, so many that none of them is found in the L2.

    Args:
        mesh: of this job; the cache is sharded over its DCP group.
        num_layers: layers, each with its own weights and cache, random.
        options: fields of DCPConfig, for the cache's format, what decode exchanges and how.
    Attributes:
        parts: those of PARTS that a step has: no exchange where the cache is not sharded, no gather where queries
            are replicated.
        projects_first: whether a step projects before it merges; only those of enough tokens do.
        metadata: of each of the steps over other blocks.
    Raises:
        ValueError: heads that do not divide, or a cache that does not fit.
    """

    def __init__(
        self,
        config: MLAConfig,
        mesh: DCPMesh,
        num_layers: int,
        batch: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        self.config, self.device = config, device
        kv_scale = KV_SCALE if options.get("kv_cache_dtype") == "fp8" else None
        options = {"kv_cache_scale": kv_scale, **options}
        dcp = DCPConfig(tensor_parallel_size=mesh.tp_size, decode_context_parallel_size=mesh.dcp_size, **options)
        missing = ("gather", "combine") if mesh.dcp_size == 1 else ("gather",) if dcp.dcp_q_replicate else ()
        self.parts = tuple(part for part in PARTS if part not in missing)
        self.projects_first = dcp.dcp_project_before_merge and batch >= PROJECT_FIRST_TOKENS
        self.exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
        self.layers = [MLAAttention(config, dcp, mesh, self.exchange, dtype, device) for _ in range(num_layers)]
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.normal_(std=_WEIGHT_STD)
        step_bytes = LatentCache.plan(config, dcp, num_layers, [context] * batch, dtype).bytes_per_rank
        num_steps = min(_MOST_STEPS, max(1, -(-_ROTATED_BYTES[device.type] // step_bytes)))
        self.cache = LatentCache(
            LatentCache.plan(config, dcp, num_layers, [context] * batch * num_steps, dtype), device
        )
        for rows in self.cache.layers:
            fill_randomly(rows, config.kv_lora_rank, dtype)
        ids = torch.randperm(self.cache.sizes.num_blocks).view(num_steps, batch, num_blocks(context, dcp))
        workspace = decode_workspace(device)
        self.metadata = [
            StepMetadata.build([1] * batch, [context] * batch, table, dcp, mesh.dcp_rank, device, workspace=workspace)
            for table in ids.tolist()
        ]
        heads, group_heads = config.num_heads // mesh.tp_size, config.num_heads // mesh.tp_size * mesh.dcp_size
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden = torch.randn(batch, config.hidden_size, **new)
        q, group_q = (torch.randn(batch, num_heads, config.latent_dim, **new) for num_heads in (heads, group_heads))
        q_scale = self.layers[0].q_scale
        self.q, self.group_q = (q, group_q) if q_scale is None else (to_fp8(q, q_scale), to_fp8(group_q, q_scale))
        self.group_out = torch.randn(batch, group_heads, config.kv_lora_rank, **new)
        row_dim = config.v_head_dim if self.projects_first else config.kv_lora_rank
        self.group_rows = torch.randn(batch, group_heads, row_dim, **new)
        self.group_lse = torch.randn(batch, group_heads, device=device)
        self.rows = torch.randn(batch, heads, row_dim, **new)
        cos_sin = torch.randn(batch, config.qk_rope_head_dim, device=device)
        factor = query_factor(self.metadata[0].positions, config.llama_4_scaling, dtype)  # the same in all steps
        self.metadata = [step.with_positions(cos_sin, factor) for step in self.metadata]

    def timings(self) -> dict[str, Timing]:
        """Time the whole stack ("total") and the parts that a step has. Collective over the job.

        Parts: "projections", all before the exchange of queries, or before attention where queries are replicated;
        "gather"; "attention" over this rank's tokens; "combine" of latents, or of values if the stack projects first;
        "output", W_UV wherever it is applied (of all the group's heads if the stack projects first), o_proj and its
        all-reduce.

        Where attention sends rows to their owners itself (`dcp_mla_decode` through a mailbox), the step runs
        attention and combine as one operation: the parts are then the plain kernel and a whole combine, which take
        longer one after the other.
        """
        runs: dict[str, Callable[[int], object]] = {
            "total": self.step,
            "projections": self.project,
            "gather": self.gather,
            "attention": self.attend,
            "combine": self.combine,
            "output": self.finish,
        }
        calls = max(_FEWEST_CALLS[self.device.type], len(self.metadata))
        timings = {
            part: time_operation(run, self.device, calls, _SAMPLE_SECONDS)
            for part, run in runs.items()
            if part in ("total", *self.parts)
        }
        self.exchange.check()
        return timings

    def step(self, index: int = 0) -> Tensor:
        """Return the hidden states [batch, hidden] after all layers."""
        hidden, metadata = self.hidden, self._metadata(index)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            hidden = hidden + layer(hidden, cache, metadata)
        return hidden

    def project(self, index: int = 0) -> None:
        """Run all of a layer's step until it turns to its exchange, for queries or for a mailbox."""
        metadata = self._metadata(index)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            layer.exchange = _Stop()
            try:
                layer(self.hidden, cache, metadata)
            except _Stopped:
                continue
            finally:
                layer.exchange = self.exchange
            raise RuntimeError("a layer attends without its exchange: nothing tells where its projections end")

    def gather(self, _: int = 0) -> None:
        """Gather the queries of the group's heads."""
        for _layer in self.layers:
            self.exchange.gather_heads(self.q)

    def attend(self, index: int = 0) -> None:
        """Attend with the group's heads to this rank's tokens."""
        decode = self._metadata(index).decode
        assert decode is not None
        for layer, rows in zip(self.layers, self.cache.layers, strict=True):
            mla_decode(
                self.group_q,
                rows,
                decode.block_table,
                decode.local_seq_lens,
                self.config.scale,
                self.config.kv_lora_rank,
                query_start_loc=decode.query_start_loc,
                max_query_len=decode.max_query_len,
                workspace=decode.workspace,
                kv_scale=layer.kv_scale,
                q_scale=layer.q_scale,
                dtype=self.hidden.dtype,
            )

    def combine(self, _: int = 0) -> None:
        """Send rows and LSE to the heads' owners and merge them."""
        for _layer in self.layers:
            self.exchange.combine(self.group_rows, self.group_lse)

    def finish(self, _: int = 0) -> None:
        """Run W_UV, before or after the merge, o_proj and its all-reduce."""
        for layer in self.layers:
            if self.projects_first:
                project_values(self.group_out, layer.w_uv_group)
                layer.o_proj(self.rows.flatten(1))
            else:
                layer.o_proj(project_values(self.rows, layer.w_uv))

    def _metadata(self, index: int) -> StepMetadata:
        return self.metadata[index % len(self.metadata)]


class _Stopped(Exception):
    pass


class _Stop(LocalExchange):
    """An exchange that ends a layer's step."""

    name = "stop"

    def gather_heads(self, q: Tensor) -> Tensor:
        raise _Stopped

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> None:
        raise _Stopped  # the first call where queries are replicated
