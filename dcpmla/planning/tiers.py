"""Contents of the tiers of the cache (GPUs, host memory, disks), and the length from which loads beat prefills."""

from dataclasses import dataclass

from dcpmla.cache.plan import CachePlan
from dcpmla.cache.tier import count_slots
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.load import TierCosts
from dcpmla.planning.machine import Machine
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.recommend import Plan, cache_bytes
from dcpmla.planning.search import smallest
from dcpmla.planning.weights import ModelSize

_LAUNCH_US = 10.0  # assumed, not measured: launches of a load in one layer, whatever it moves


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One tier of the cache of a TP group. Its ranks have equal parts; ranks of one DCP group hold different tokens.

    Attributes:
        name: One of "GPU", "host" and "disk".
        bytes_per_rank: Bytes of the tier on each rank.
        num_tokens: Number of tokens of context that fit, in whole blocks.
        num_requests: Number of requests of the plan's context that fit, each with a state if the cache has states.
    """

    name: str
    bytes_per_rank: int
    num_tokens: int
    num_requests: int


def make_tiers(
    machine: Machine, model: ModelSize, plan: Plan, context: int, host_gib: float, disk_gib: float | None = None
) -> list[Tier]:
    """Return the tiers of a plan, the fastest first.

    Args:
        context: Number of tokens of a request.
        host_gib, disk_gib: GiB of host memory and of disks of all ranks together; None for no disks.
    """
    block = Deployment(machine, model, plan).block()
    room = cache_bytes(machine, plan.weight_bytes_per_rank)
    num_requests = plan.max_num_seqs // plan.num_replicas
    gpu = Tier(name="GPU", bytes_per_rank=room, num_tokens=plan.kv_tokens_total, num_requests=num_requests)
    sizes = {"host": host_gib} if disk_gib is None else {"host": host_gib, "disk": disk_gib}
    return [gpu, *(_slower_tier(name, int(gib * 2**30) // plan.tp, block, context) for name, gib in sizes.items())]


def _slower_tier(name: str, bytes_per_rank: int, block: CachePlan, context: int) -> Tier:
    sizes = block.bytes_per_block, block.bytes_per_state, block.block_tokens
    num_blocks, num_states = count_slots(bytes_per_rank, *sizes)
    num_requests = num_blocks // -(-context // block.block_tokens)
    return Tier(
        name=name,
        bytes_per_rank=bytes_per_rank,
        num_tokens=num_blocks * block.block_tokens,
        num_requests=min(num_requests, num_states) if block.bytes_per_state else num_requests,
    )


def load_costs(pieces: PrefillCosts) -> dict[str, TierCosts]:
    """Return the time of loads from host memory and from disks, against pieces of prompts. Blocks on disks are read
    into host memory first; the copy to the GPU is assumed to begin afterwards.
    """
    machine, block = pieces.deployment.machine, pieces.deployment.block()
    host, disk = machine.host_gb_per_s, machine.disk_gb_per_s
    rates = {"host": host, "disk": host * disk / (host + disk)}
    latency_us = pieces.deployment.model.attention.num_layers * _LAUNCH_US
    return {name: TierCosts(block, latency_us, rate, pieces.piece_us) for name, rate in rates.items()}


def shortest_load(costs: TierCosts) -> int | None:
    """Return the smallest number of tokens from a sequence's start that takes less time to load than to prefill; None
    if there is none up to 16 Mi.
    """
    return smallest(lambda num_tokens: costs.should_load(num_tokens, 0))
