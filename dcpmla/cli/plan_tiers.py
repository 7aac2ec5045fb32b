"""Contexts in host memory and on disks: their number, and the time to load them instead of prefilling them again."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dcpmla.cli.output import Section, align
from dcpmla.cli.plan_prompts import PromptPlan
from dcpmla.fields import check_fields, option_label, rules_of
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.planning.recommend import Plan
from dcpmla.planning.tiers import Tier, load_costs, make_tiers, shortest_load
from dcpmla.planning.words import ms

_LENGTHS = (1 << 15, 1 << 17, 1 << 19)  # tokens of the contexts whose loads are printed, besides the plan's own


@dataclass(frozen=True)
class ContextLoad:
    """A context that returns to the GPUs.

    Attributes:
        num_tokens: Number of its tokens.
        bytes_per_rank: Bytes that each rank loads.
        load_us: Microseconds to load it, by tier.
        prefill_us: Microseconds to prefill it again, in steps without decodes.
    """

    num_tokens: int
    bytes_per_rank: int
    load_us: dict[str, float]
    prefill_us: float


def check_sizes(kv_offloading_size: float | None, kv_offloading_disk_size: float | None) -> None:
    """Raise ValueError for sizes of tiers that are not positive, or disks without host memory."""
    sizes = {"kv_offloading_size": kv_offloading_size, "kv_offloading_disk_size": kv_offloading_disk_size}
    check_fields(rules_of(EngineOptions), sizes, option_label)
    if kv_offloading_disk_size is not None and kv_offloading_size is None:
        disk = f"{option_label('kv_offloading_disk_size')} is {kv_offloading_disk_size:g}"
        host = option_label("kv_offloading_size")
        raise ValueError(f"{disk}; blocks reach disks through host memory, so {host} must be given, too")


def tier_section(
    plan: Plan, prompts: PromptPlan, context: int, host_gib: float, disk_gib: float | None = None
) -> Section:
    """Return the tiers of the cache under one plan, and the loads of contexts of several lengths and of the plan's.

    Args:
        plan: Setting, and what its GPUs hold.
        prompts: Steps with pieces of prompts under the same plan.
        context: Number of tokens of each request.
        host_gib, disk_gib: GiB of host memory and of disks, of all ranks of a TP group; None for no disks.
    """
    machine, model = prompts.costs.deployment.machine, prompts.costs.deployment.model
    tiers, costs_by_tier = make_tiers(machine, model, plan, context, host_gib, disk_gib), load_costs(prompts.costs)
    costs = {tier.name: costs_by_tier[tier.name] for tier in tiers[1:]}
    loads = [
        ContextLoad(
            num_tokens=num_tokens,
            bytes_per_rank=costs["host"].load_bytes(num_tokens),
            load_us={name: each.load_us(num_tokens) for name, each in costs.items()},
            prefill_us=prompts.first_token(num_tokens, 0).time_us,
        )
        for num_tokens in sorted({*_LENGTHS, context})
    ]
    loads_from = {name: shortest_load(each) for name, each in costs.items()}
    rates = f"{machine.host_gb_per_s:g} GB/s from host memory"
    if disk_gib is not None:
        rates += f" and {machine.disk_gb_per_s:g} GB/s from disks"
    lines = [
        f"tiers of the cache of {plan}",
        *align([_tier_cells(tier, context) for tier in tiers]),
        f"loads of a context into {plan.tp} GPUs, each at {rates}, and prefills of it",
        *align([_load_cells(load, tiers) for load in loads]),
        *(_threshold(name, num_tokens) for name, num_tokens in loads_from.items()),
    ]
    content = {"tiers": [*map(asdict, tiers)], "loads": [*map(asdict, loads)], "loads_from": loads_from}
    return Section(content, lines)


def _tier_cells(tier: Tier, context: int) -> dict[str, str]:
    """Return a line of the table of tiers."""
    return {
        "tier": tier.name,
        "GiB a rank": f"{tier.bytes_per_rank / 2**30:.1f}",
        "tokens": f"{tier.num_tokens:,}",
        f"requests of {context:,}": f"{tier.num_requests:,}",
    }


def _load_cells(load: ContextLoad, tiers: Sequence[Tier]) -> dict[str, str]:
    """Return a line of the table of loads."""
    fitting = [tier.name for tier in tiers if tier.num_tokens >= load.num_tokens]
    return {
        "tokens": f"{load.num_tokens:,}",
        "fits into": ", ".join(fitting) or "no tier",
        "MiB a rank": f"{load.bytes_per_rank / 2**20:,.1f}",
        **{f"{name} ms": ms(time_us) for name, time_us in load.load_us.items()},
        "prefill ms": ms(load.prefill_us),
        **{f"prefill / {name}": f"{load.prefill_us / time_us:,.1f}" for name, time_us in load.load_us.items()},
    }


def _threshold(name: str, num_tokens: int | None) -> str:
    source = {"host": "host memory", "disk": "disks"}[name]
    verdict = "never faster than a prefill" if num_tokens is None else f"faster from {num_tokens:,} tokens on"
    return f"loading from {source} is {verdict}"
