"""A machine type as the few numbers a prediction needs: memory, speeds, and costs of collectives."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from dcpmla.fields import TEXT, check_fields, number, rules_of, whole

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
# Bounds of a machine's numbers: their products and quotients stay finite.
_SMALLEST, _LARGEST = 1e-9, 1e18
_Time = Annotated[float, number(0, _LARGEST)]
_Rate = Annotated[float, number(_SMALLEST, _LARGEST)]
_Share = Annotated[float, number(_SMALLEST, 1)]


class _Checked:
    """A dataclass whose numbers keep to the rules of their fields."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        check_fields(rules_of(kind), vars(self), lambda name: f"machine (--machine): {name}")


@dataclass(frozen=True, kw_only=True)
class Collective(_Checked):
    """Inside a node, W ranks pay overhead_us + per_rank_us (W - 1) + (bytes of all W chunks) / gb_per_s.

    A chunk is the data from one rank to one other; a rank's own chunk counts, because NCCL copies it as well.
    """

    overhead_us: _Time
    per_rank_us: _Time
    gb_per_s: _Rate

    def latency_us(self, num_ranks: int) -> float:
        return self.overhead_us + self.per_rank_us * (num_ranks - 1)

    def transfer_us(self, num_bytes: float) -> float:
        return num_bytes / self.gb_per_s / 1e3


@dataclass(frozen=True, kw_only=True)
class Direct(_Checked):
    """The exchange `direct`, one kernel an operation: a fixed time, then (bytes of rows that the others store at one
    rank) / gb_per_s.
    """

    gather_us: _Time
    combine_us: _Time
    gb_per_s: _Rate

    def operation_us(self, operation: str, num_bytes: float) -> float:
        latency = self.gather_us if operation == "gather_heads" else self.combine_us
        return latency + num_bytes / self.gb_per_s / 1e3


@dataclass(frozen=True, kw_only=True)
class Machine(_Checked):
    """Nodes of GPUs joined by NVLink, nodes joined by a network.

    Attributes:
        source: Words on where the numbers are from.
        num_gpus: Number of GPUs, in one TP group if no size is asked for.
        memory_bytes: Memory of one GPU.
        workspace_share: Share of memory for activations, workspaces, communication buffers and the driver.
        hbm_gb_per_s: Rate of a kernel that only reads (weights, cache).
        copy_gb_per_s: Rate of a kernel that reads and writes, both counted.
        matmul_tflops: Rate of bf16 matrix products.
        kernel_us: Time of a kernel in a CUDA graph before it moves a byte.
        product_us: Same time of a matrix product; it includes filling and draining the pipeline.
        product_read_share, packed_read_share: Share of hbm_gb_per_s at which matrix products read weights, and the
            share for experts in 4 bits, which are dequantized on the way.
        layer_us: Time of an attention layer without matrix products, norms, attention and exchange: RoPE, cache
            write, joins, residual.
        attention_overhead_us, attention_tflops: Overhead and rate of a decode kernel over a latent cache, its combine
            included.
        attention_read_share: Share of hbm_gb_per_s at which such a kernel reads the cache.
        direct: Exchange of that name; None where it does not run or was not measured, and `a2a` is assumed.
        nvlink_gb_per_s: Published rate of one GPU's links, each way; its collectives stay below. Only transfers of
            prompts between servers use it.
        transfer_gb_per_s: Rate of transfers of prompts from one GPU over links that are faster.
        network_gb_per_s: Rate from one GPU to other nodes, each way.
        network_us: Time added by each step of a collective that crosses nodes.
        host_gb_per_s: Rate of copies between pinned host memory and one GPU, one way.
        disk_gb_per_s: Rate at which one rank reads its blocks from the disks of its host.
    """

    name: Annotated[str, TEXT]
    source: Annotated[str, TEXT]
    num_gpus: Annotated[int, whole(1)]
    gpus_per_node: Annotated[int, whole(1)]
    memory_bytes: Annotated[int, number(1, _LARGEST)]
    workspace_share: Annotated[float, number(0, 0.99)]
    hbm_gb_per_s: _Rate
    copy_gb_per_s: _Rate
    matmul_tflops: _Rate
    kernel_us: _Time
    product_us: _Time
    product_read_share: _Share
    packed_read_share: _Share
    layer_us: _Time
    attention_overhead_us: _Time
    attention_read_share: _Share
    attention_tflops: _Rate
    all_gather: Collective
    reduce_scatter: Collective
    all_to_all: Collective
    direct: Direct | None
    nvlink_gb_per_s: _Rate
    transfer_gb_per_s: _Rate
    network_gb_per_s: _Rate
    network_us: _Time
    host_gb_per_s: _Rate
    disk_gb_per_s: _Rate

    def num_nodes(self, group_size: int, num_ranks: int) -> int:
        """Return how many nodes a group of neighboring ranks touches at most, in a job of num_ranks that fills a node
        after the other.
        """
        if num_ranks <= self.gpus_per_node:
            return 1
        full = -(-group_size // self.gpus_per_node)
        aligned = self.gpus_per_node % group_size == 0 or group_size % self.gpus_per_node == 0
        return full if aligned else full + 1

    def collective_us(self, kind: str, chunk_bytes: float, num_ranks: int, num_nodes: int = 1) -> float:
        """Return the microseconds of one collective of COLLECTIVES inside a CUDA graph.

        Across nodes, NVLink and network work at the same time. An all_to_all has its own bytes for every peer, but
        waits for the network once. In all_gather and reduce_scatter every chunk enters a node once, its GPUs sharing
        the work: around a ring of the nodes, or over a tree, which waits log2(nodes) times only, but passes chunks on
        while it receives others, so that they share the adapters.

        Args:
            chunk_bytes: Bytes from one rank to one other.
            num_nodes: Nodes that the ranks span.
        """
        collective: Collective = getattr(self, kind)
        transfer = collective.transfer_us(num_ranks * chunk_bytes)
        if num_nodes == 1:
            return collective.latency_us(num_ranks) + transfer

        def across(num_steps: int, num_chunks: float) -> float:
            return num_steps * self.network_us + max(transfer, num_chunks * chunk_bytes / self.network_gb_per_s / 1e3)

        local_ranks = -(-num_ranks // num_nodes)
        if kind == "all_to_all":
            return collective.latency_us(num_ranks) + across(1, num_ranks - local_ranks)
        ring, tree = across(num_nodes - 1, num_nodes - 1), across(_log2(num_nodes), 2 * (num_nodes - 1))
        return collective.latency_us(local_ranks) + min(ring, tree)

    def cache_us(self, num_bytes: int, flops: int) -> float:
        """Return the slower of reading a cache and multiplying by its rows, as attention's kernels do."""
        read_gb_per_s = self.attention_read_share * self.hbm_gb_per_s
        return max(num_bytes / read_gb_per_s / 1e3, flops / self.attention_tflops / 1e6)

    def without_overheads(self) -> "Machine":
        """Return a machine that reads memory and multiplies at the same rates, and does all else in no time."""
        free = {"overhead_us": 0.0, "per_rank_us": 0.0, "gb_per_s": _LARGEST}
        changes: dict[str, Any] = {name: 0.0 for name in vars(self) if name.endswith("_us")}
        changes |= dict.fromkeys(("product_read_share", "packed_read_share", "attention_read_share"), 1.0)
        changes |= dict.fromkeys(("copy_gb_per_s", "network_gb_per_s", "host_gb_per_s", "disk_gb_per_s"), _LARGEST)
        changes |= {name: Collective(**free) for name in COLLECTIVES}
        return replace(self, **changes, direct=Direct(gather_us=0.0, combine_us=0.0, gb_per_s=_LARGEST))

    def all_reduce_us(self, num_bytes: float, num_ranks: int, num_nodes: int = 1) -> float:
        """Return the microseconds of an all-reduce: a reduce-scatter and an all-gather under one launch, as rings and
        trees do it.
        """
        if num_ranks == 1:
            return 0.0
        halves = (
            self.collective_us(kind, num_bytes / num_ranks, num_ranks, num_nodes)
            for kind in ("reduce_scatter", "all_gather")
        )
        return sum(halves) - self.all_gather.overhead_us


# Sources: [L] the measured ceilings of 8 x H200 in docs/planning.md; [N] NCCL 2.28.9 in CUDA graphs, 0.5 KiB to 16 MiB
# on 8 H200s, and the exchange on 2 and 4: three numbers for each collective; [D] `direct` in CUDA graphs on 2 and 4
# H200s, rows of 128 to 576 of 128 heads, 1 to 256 tokens: three numbers for both operations; [S] decode steps of whole
# models on one and two.
H200X8 = Machine(
    name="h200x8",
    source="measured on 1 to 8 H200s, but for what docs/planning.md names",
    num_gpus=8,
    gpus_per_node=8,
    memory_bytes=139 * 2**30,  # the driver shows this much of 141 GB
    workspace_share=0.1,
    hbm_gb_per_s=4460,  # [L] read-only pass over 2 GiB
    copy_gb_per_s=2700,  # [L] device-to-device copy, read + write
    matmul_tflops=700,  # [L] 693-794 for 8192^3
    kernel_us=1.5,  # [L] one tiny kernel as a graph node
    product_us=6.5,  # [S], as the two shares
    product_read_share=0.95,
    packed_read_share=0.53,
    layer_us=7.5,  # five such kernels
    attention_overhead_us=15,  # best of FlashMLA, FA3 and FlashInfer, short contexts, bf16 cache
    attention_read_share=1,
    attention_tflops=650,  # the same, long contexts: 570-608 with the overhead in it
    all_gather=Collective(overhead_us=7.5, per_rank_us=1.5, gb_per_s=270),  # [N]
    reduce_scatter=Collective(overhead_us=6.0, per_rank_us=1.2, gb_per_s=290),  # [N]
    all_to_all=Collective(overhead_us=7.5, per_rank_us=0.7, gb_per_s=270),  # [N]
    direct=Direct(gather_us=4.0, combine_us=5.4, gb_per_s=275),  # [D]
    nvlink_gb_per_s=450,  # published: 18 links of 25 GB/s
    transfer_gb_per_s=70,  # between two processes on one H200, slots of 128 MiB
    network_gb_per_s=45,  # assumed, not measured: a 400 Gbit/s adapter for each GPU at nine tenths of its 50 GB/s
    network_us=8,  # assumed, not measured: a small message over such a network
    host_gb_per_s=50,  # loads of blocks on one GPU, and on two at the same time
    disk_gb_per_s=5,  # assumed, not measured: a PCIe 4.0 disk for each rank
)


def change_machine(machine: Machine, values: dict[str, Any], name: str) -> Machine:
    """Return a machine with some numbers replaced; a collective and `direct` may be given in part, `direct` as None.

    On a machine without `direct`, a part of it changes the numbers of h200x8.

    Raises:
        ValueError: Fields that a machine does not have, or values that are not numbers.
    """
    _check_fields(values, Machine, name)
    changed = dict(values)
    kinds: dict[str, type[Collective | Direct]] = {**dict.fromkeys(COLLECTIVES, Collective), "direct": Direct}
    for group, kind in kinds.items():
        if group in values and (group, values[group]) != ("direct", None):
            _check_fields(values[group], kind, f"{name}, {group}")
            changed[group] = replace(getattr(machine, group) or getattr(H200X8, group), **values[group])
    source = f"{machine.source}; changed by {name}"
    return replace(machine, **{"name": name, "source": source, **changed})


def read_json(path: Path, option: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: No such file, or no JSON object in it; the message names the option.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{option} is {path}, which is no readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{option} is {path}; it must hold a JSON object")
    return content


def _check_fields(values: Any, kind: type[Machine | Collective | Direct], name: str) -> None:
    allowed = [field.name for field in fields(kind)]
    unknown = sorted(set(values) - set(allowed)) if isinstance(values, dict) else [repr(values)]
    if unknown:
        raise ValueError(
            f"machine (--machine): {name} has {', '.join(unknown)}; a machine's numbers are {', '.join(allowed)}"
        )


def _log2(number: int) -> int:
    """Return the logarithm, rounded up."""
    return (number - 1).bit_length()
