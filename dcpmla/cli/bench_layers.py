"""What `bench scaling` measures: the exchange of a DCP group, and a decode step of a stack of MLA layers with random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.decode import mla_decode
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.metadata import StepMetadata
from dcpmla.cache.latent import LatentCache, num_blocks
from dcpmla.cli.timing import CALLS_PER_SAMPLE, Operation, Timing, time_operation
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.parallel.bootstrap import agree
from dcpmla.parallel.faults import is_out_of_memory
from dcpmla.parallel.mesh import DCPMesh

BACKENDS = ("a2a", "ag_rs")
_WEIGHT_STD = 0.02


@contextmanager
def memory_on_all() -> Iterator[None]:
    """Around allocations: where some rank has no room for them, every rank raises a ValueError. Collective."""
    with agree():
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(str(error).partition("\n")[0] or "out of memory") from error


def exchange_timings(
    config: MLAConfig, group: dist.ProcessGroup, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[dict[str, Any], Timing]]:
    """`gather_heads` and `combine` of all heads over a group, by backend, and the all-reduce of a layer's output. Collective over the job.

    Returns:
        (what it is, its time) of each: keys operation, backend (none for all_reduce), dcp, num_tokens and the sizes of a row.
    Raises:
        ValueError: so many tokens do not fit.
    """
    size, calls = dist.get_world_size(group), _calls(device)
    new = partial(torch.randn, device=device, dtype=dtype)
    with memory_on_all():
        q = new(calls, num_tokens, config.num_heads // size, config.latent_dim)
        out = new(calls, num_tokens, config.num_heads, config.kv_lora_rank)
        lse = torch.randn(calls, num_tokens, config.num_heads, device=device)
        hidden = torch.zeros(calls, num_tokens, config.hidden_size, device=device, dtype=dtype)  # summed again and again
    operations: dict[tuple[str, ...], Operation] = {("all_reduce",): lambda index: dist.all_reduce(hidden[index], group=group)}
    for backend in BACKENDS:
        exchange = select_exchange(backend, group).exchange
        operations["gather_heads", backend] = partial(_gather, exchange, q)
        operations["combine", backend] = partial(_combine, exchange, out, lse)
    sizes = {
        "num_heads": config.num_heads,
        "query_dim": config.latent_dim,
        "latent_dim": config.kv_lora_rank,
        "hidden_size": config.hidden_size,
    }
    return [
        (
            {**dict(zip(("operation", "backend"), name, strict=False)), "dcp": size, "num_tokens": num_tokens, **sizes},
            time_operation(operation, device, calls, _num_samples(device)),
        )
        for name, operation in operations.items()
    ]


def _gather(exchange: Exchange, q: Tensor, index: int) -> None:
    exchange.gather_heads(q[index])


def _combine(exchange: Exchange, out: Tensor, lse: Tensor, index: int) -> None:
    exchange.combine(out[index], lse[index])


class LayerStack:
    """MLA layers, residual around each, over a cache that holds `batch` requests of `context` tokens: everything of a decode step but MLPs.

    Args:
        mesh: of this job; the cache is sharded over its DCP group.
        num_layers: layers, each with its own weights and cache, random.
    Raises:
        ValueError: heads that do not divide, or a cache that does not fit.
    """

    def __init__(
        self, config: MLAConfig, mesh: DCPMesh, num_layers: int, batch: int, context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.device = config, device
        dcp = DCPConfig(tensor_parallel_size=mesh.tp_size, decode_context_parallel_size=mesh.dcp_size)
        exchange = select_exchange(dcp.dcp_comm_backend, mesh.dcp_group).exchange
        self.layers = [MLAAttention(config, dcp, mesh, exchange, dtype, device) for _ in range(num_layers)]
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.normal_(std=_WEIGHT_STD)
        self.cache = LatentCache(LatentCache.plan(config, dcp, num_layers, [context] * batch, dtype), device)
        for rows in self.cache.layers:
            rows.normal_()
        blocks = num_blocks(context, dcp)
        tables = [list(range(request * blocks, (request + 1) * blocks)) for request in range(batch)]
        self.metadata = StepMetadata.build([1] * batch, [context] * batch, tables, dcp, mesh.dcp_rank, device)
        self.hidden = torch.randn(batch, config.hidden_size, device=device, dtype=dtype)
        self.queries = torch.randn(batch, config.num_heads // mesh.tp_size * mesh.dcp_size, config.latent_dim, device=device, dtype=dtype)
        self.cos_sin = torch.randn(batch, config.qk_rope_head_dim, device=device)

    def timings(self) -> dict[str, Timing]:
        """Of the whole stack: "total", and "attention", the decode kernel alone over this rank's tokens. Collective over the job."""
        calls = 1 if self.device.type == "cpu" else 4
        parts: dict[str, Operation] = {"total": self.step, "attention": self.attend}
        return {part: time_operation(run, self.device, calls, _num_samples(self.device)) for part, run in parts.items()}

    def step(self, _: int = 0) -> Tensor:
        """[batch, hidden] after all layers."""
        hidden = self.hidden
        for index, layer in enumerate(self.layers):
            hidden = hidden + layer(hidden, self.cache[index], self.metadata, self.cos_sin)
        return hidden

    def attend(self, _: int = 0) -> None:
        decode = self.metadata.decode
        assert decode is not None
        for rows in self.cache.layers:
            mla_decode(
                self.queries,
                rows,
                decode.block_table,
                decode.local_seq_lens,
                self.config.scale,
                self.config.kv_lora_rank,
                workspace=decode.workspace,
            )


def _calls(device: torch.device) -> int:
    return 1 if device.type == "cpu" else CALLS_PER_SAMPLE


def _num_samples(device: torch.device) -> int:
    return 7 if device.type == "cpu" else 30
