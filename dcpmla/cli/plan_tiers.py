"""Contexts in host memory and on disks: their number, and the time to load them instead of prefilling them again."""

from dataclasses import asdict, dataclass
from typing import Any

from dcpmla.cli.output import align
from dcpmla.cli.plan_prompts import PromptPlan
from dcpmla.fields import check_fields, option_label, rules_of
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.planning.recommend import Plan
from dcpmla.planning.tiers import load_costs, make_tiers, shortest_load
from dcpmla.planning.words import ms

_LENGTHS = (1 << 15, 1 << 17, 1 << 19)  # tokens of the contexts whose loads are printed, besides the plan's own
_SIZES = ("kv_offloading_size", "kv_offloading_disk_size")


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
    sizes = dict(zip(_SIZES, (kv_offloading_size, kv_offloading_disk_size), strict=True))
    check_fields(rules_of(EngineOptions), sizes, option_label)
    if kv_offloading_disk_size is not None and kv_offloading_size is None:
        disk = f"{option_label('kv_offloading_disk_size')} is {kv_offloading_disk_size:g}"
        host = option_label("kv_offloading_size")
        raise ValueError(f"{disk}; blocks reach disks through host memory, so {host} must be given, too")


class TierPlan:
    """The tiers of the cache under one plan.

    Args:
        plan: Setting, and what its GPUs hold.
        prompts: Steps with pieces of prompts under the same plan.
        context: Number of tokens of each request.
        host_gib, disk_gib: GiB of host memory and of disks, of all ranks of a TP group; None for no disks.
    """

    def __init__(
        self, plan: Plan, prompts: PromptPlan, context: int, host_gib: float, disk_gib: float | None = None
    ) -> None:
        self._plan, self._prompts, self._context = plan, prompts, context
        deployment = prompts.costs.deployment
        self.tiers = make_tiers(deployment.machine, deployment.model, plan, context, host_gib, disk_gib)
        costs = load_costs(prompts.costs)
        self._costs = {tier.name: costs[tier.name] for tier in self.tiers[1:]}
        self._has_states = plan.bytes_per_state > 0

    def loads(self) -> list[ContextLoad]:
        """Return the loads of contexts of several lengths, and of the plan's."""
        return [self._load(num_tokens) for num_tokens in sorted({*_LENGTHS, self._context})]

    def loads_from(self) -> dict[str, int | None]:
        """Return for each tier the shortest context that takes less time to load than to prefill (`shortest_load`)."""
        return {name: shortest_load(costs) for name, costs in self._costs.items()}

    def as_json(self) -> dict[str, Any]:
        """Return all predictions."""
        return {
            "tiers": [asdict(tier) for tier in self.tiers],
            "loads": [asdict(load) for load in self.loads()],
            "loads_from": self.loads_from(),
        }

    def report(self) -> list[str]:
        """Return the lines to print."""
        plan, machine = self._plan, self._prompts.costs.deployment.machine
        rows = [
            {
                "tier": tier.name,
                "GiB a rank": f"{tier.bytes_per_rank / 2**30:.1f}",
                "tokens": f"{tier.num_tokens:,}",
                f"requests of {self._context:,}": f"{tier.num_requests:,}",
            }
            for tier in self.tiers
        ]
        rates = f"{machine.host_gb_per_s:g} GB/s from host memory"
        if "disk" in self._costs:
            rates += f" and {machine.disk_gb_per_s:g} GB/s from disks"
        return [
            f"tiers of the cache of {plan}",
            *align(rows),
            f"loads of a context into {plan.tp} GPUs, each at {rates}, and prefills of it",
            *align([self._cells(load) for load in self.loads()]),
            *(self._threshold(name, num_tokens) for name, num_tokens in self.loads_from().items()),
        ]

    def _load(self, num_tokens: int) -> ContextLoad:
        num_bytes = next(iter(self._costs.values())).load_bytes(num_tokens, self._has_states)
        load_us = {name: costs.load_us(num_tokens, self._has_states) for name, costs in self._costs.items()}
        return ContextLoad(num_tokens, num_bytes, load_us, self._prompts.first_token(num_tokens, 0).time_us)

    def _cells(self, load: ContextLoad) -> dict[str, str]:
        """Return a line of the table of loads."""
        fitting = [tier.name for tier in self.tiers if tier.num_tokens >= load.num_tokens]
        cells = {
            "tokens": f"{load.num_tokens:,}",
            "fits into": ", ".join(fitting) or "no tier",
            "MiB a rank": f"{load.bytes_per_rank / 2**20:,.1f}",
        }
        for name, time_us in load.load_us.items():
            cells[f"{name} ms"] = ms(time_us)
        cells["prefill ms"] = ms(load.prefill_us)
        for name, time_us in load.load_us.items():
            cells[f"prefill / {name}"] = f"{load.prefill_us / time_us:,.1f}"
        return cells

    def _threshold(self, name: str, num_tokens: int | None) -> str:
        source = {"host": "host memory", "disk": "disks"}[name]
        verdict = "never faster than a prefill" if num_tokens is None else f"faster from {num_tokens:,} tokens on"
        return f"loading from {source} is {verdict}"
