"""The (tp, dcp, cache format) to take for a load: what fits, how fast it steps, from where DCP pays, and why."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dcpmla.cache.plan import CachePlan
from dcpmla.fields import check_fields, option_label, whole
from dcpmla.planning.capacity import largest_cache
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import Machine
from dcpmla.planning.search import smallest
from dcpmla.planning.setting import Setting
from dcpmla.planning.words import ms

_LOAD = dict.fromkeys(("batch", "context"), whole(1, 1 << 40))
_CLOSE = 0.02  # steps within this share of each other count as equal


@dataclass(frozen=True, kw_only=True)
class Plan(Setting):
    """One setting under one load.

    Attributes:
        weights_widened: True if the cut runs through blocks of quantized weights, which ranks then hold dequantized.
        kv_bytes_per_token: Growth of the cache per token of context: all layers, one copy, index caches included.
        bytes_per_state, num_states: Size of a request's state on each rank, whatever its context, and the number of
            states; 0 in a model without.
        kv_tokens_per_rank, kv_tokens_total: Tokens that fit besides the weights, on one rank and on a DCP group; whole
            blocks.
        num_nodes: Nodes of the job, of which num_replicas TP groups share the requests.
        dcp_num_nodes: Nodes that a DCP group spans.
        exchange: Backend assumed for its exchange, "none" without DCP (`auto_backend`).
        fits: True if batch x context tokens and the weights fit.
        longest_context: Longest context that `batch` requests can have at once, by memory alone.
        max_num_seqs: Requests of `context` tokens that fit at once, on the whole job.
        step_us: Time of one decode step, "total" and its parts; empty for a load that does not fit.
        tokens_per_second: Throughput of the job, None for a load that does not fit.
        crossover: Smallest context at this batch, and smallest batch at this context, from which the step is
            shorter than plain TP's (None: never up to 16 Mi); empty for plain TP itself, and for a load that does not
            fit.
    """

    weight_bytes_per_rank: int
    weights_widened: bool
    kv_bytes_per_token: int
    bytes_per_state: int
    num_states: int
    kv_tokens_per_rank: int
    kv_tokens_total: int
    num_nodes: int
    dcp_num_nodes: int
    exchange: str
    fits: bool
    longest_context: int
    max_num_seqs: int
    step_us: dict[str, float]
    tokens_per_second: float | None
    crossover: dict[str, int | None]

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and the number of replicas."""
        return {**asdict(self), "num_replicas": self.num_replicas}


def make_plan(deployment: Deployment, batch: int, context: int, reserved_bytes: int = 0) -> Plan:
    """Predict memory and step of a model in one setting.

    Args:
        batch: Requests of the whole job, spread evenly over its replicas; the fullest one counts.
        context: Tokens of each.
        reserved_bytes: Memory of a GPU that neither weights nor the cache have.
    Raises:
        ValueError: Heads, experts or a cache format that the model cannot have, or a load out of range.
    """
    check_fields(_LOAD, {"batch": batch, "context": context}, option_label)
    machine, model, setting = deployment.machine, deployment.model, deployment.setting
    layout = setting.tp, setting.enable_expert_parallel
    weight_bytes = model.weight_bytes(*layout)["total"]
    room, share = cache_bytes(machine, weight_bytes + reserved_bytes), setting.share(batch)

    def cache_of(num_seqs: int) -> CachePlan:
        """Return the largest cache for requests that run at once."""
        return largest_cache(deployment.block(num_seqs), room)

    cache = cache_of(share)
    request_blocks = -(-context // cache.block_tokens)
    max_num_seqs = setting.num_replicas * bisect_right(
        range(1, cache_of(1).num_blocks // request_blocks + 1),
        False,
        key=lambda num_seqs: cache_of(num_seqs).num_blocks < num_seqs * request_blocks,
    )
    fits = max_num_seqs >= batch
    step = deployment.step_us(share, context) if fits else {}
    return Plan(
        **(asdict(setting) | {"num_gpus": setting.num_ranks}),
        weight_bytes_per_rank=weight_bytes,
        weights_widened=model.cuts_blocks(*layout),
        kv_bytes_per_token=cache.bytes_per_token,
        bytes_per_state=cache.bytes_per_state,
        num_states=cache.num_states,
        kv_tokens_per_rank=cache.tokens_per_rank,
        kv_tokens_total=cache.tokens_total,
        num_nodes=machine.num_nodes(setting.num_ranks, setting.num_ranks),
        dcp_num_nodes=deployment.exchange.num_nodes,
        exchange=deployment.exchange.backend,
        fits=fits,
        longest_context=cache.num_blocks // share * cache.block_tokens,
        max_num_seqs=max_num_seqs,
        step_us={part: round(time, 2) for part, time in step.items()},
        tokens_per_second=round(batch * setting.tokens_a_step / step["total"] * 1e6, 1) if fits else None,
        crossover=_crossover(deployment, batch, context) if fits and setting.dcp > 1 else {},
    )


def cache_bytes(machine: Machine, weight_bytes: int) -> int:
    """Return the bytes that weights and workspaces leave of a GPU's memory to the cache."""
    return max(0, int(machine.memory_bytes * (1 - machine.workspace_share)) - weight_bytes)


def recommend(machine: Machine, plans: Sequence[Plan], batch: int, context: int) -> tuple[Plan | None, str]:
    """Choose a plan, and give the reason in sentences.

    Returns:
        Of the plans that fit, the one with the shortest step; among steps within 2 % the smaller DCP group, which
        moves less. None if no plan fits.
    """
    fitting = [plan for plan in plans if plan.fits]
    load = f"{batch:,} x {context:,} tokens"
    if not fitting:
        widest = max(plans, key=lambda plan: plan.kv_tokens_total * plan.num_replicas)
        if widest.kv_tokens_total == 0:
            least = min(plan.weight_bytes_per_rank for plan in plans)
            weights = f"even the weights ({least / 2**30:.1f} GiB a rank)"
            return None, f"No setting holds {weights}; use more ranks (-tp) or larger GPUs."
        return None, (
            f"No setting holds {load}; {widest} holds most: {widest.kv_tokens_total * widest.num_replicas:,} tokens, "
            f"{widest.max_num_seqs:,} such requests, or {batch:,} requests of {widest.longest_context:,}."
        )
    shortest = min(plan.step_us["total"] for plan in fitting)
    best = min(
        (plan for plan in fitting if plan.step_us["total"] <= shortest * (1 + _CLOSE)),
        key=lambda p: (p.dcp, p.step_us["total"]),
    )
    rank = "the shortest step"
    if best.step_us["total"] > shortest:
        rank = f"a step within {_CLOSE:.0%} of the shortest at the smallest DCP"
    reason = f"{len(fitting)} of {len(plans)} settings hold {load}; of these {best} has {rank}, {_step(best)}"
    return best, f"{reason}{_against_plain(best, plans)}.{_crossing(machine, best, fitting)}"


def _against_plain(best: Plan, plans: Sequence[Plan]) -> str:
    """Compare the plan with plain TP of the same tp and format, or with the best DCP if it is plain TP itself."""
    same = [
        plan
        for plan in plans
        if (plan.tp, plan.kv_cache_dtype) == (best.tp, best.kv_cache_dtype) and plan.dcp != best.dcp
    ]
    if best.dcp == 1:
        sharded = min((plan for plan in same if plan.fits), key=lambda plan: plan.step_us["total"], default=None)
        cause = "its exchange costs what its attention saves"
        return "" if sharded is None else f" (dcp {sharded.dcp}: {_step(sharded)}, {cause})"
    plain = next((plan for plan in same if plan.dcp == 1), None)
    if plain is None:
        return ""
    return f" (plain TP: {_step(plain)})" if plain.fits else f" (plain TP holds {plain.kv_tokens_total:,} tokens only)"


def _crossing(machine: Machine, best: Plan, fitting: Sequence[Plan]) -> str:
    """Judge whether DCP groups should stay inside a node, with the cost of leaving it; "" if all plans that hold the
    load agree.
    """
    if best.dcp == 1:
        return ""
    peers = [plan for plan in fitting if (plan.num_gpus, plan.kv_cache_dtype) == (best.num_gpus, best.kv_cache_dtype)]
    across = [plan for plan in peers if (plan.dcp_num_nodes == 1) != (best.dcp_num_nodes == 1)]
    other = min(across, key=lambda plan: plan.step_us["total"], default=None)
    if best.dcp_num_nodes == 1:
        if other is None:
            return ""
        verdict = f"Keep DCP inside a node of {machine.gpus_per_node} GPUs"
        return f" {verdict}: {_exchange(best)}; {_exchange(other)} over {other.dcp_num_nodes} nodes."
    if other is None:
        return f" Only DCP across nodes holds the load: {_exchange(best)} over {best.dcp_num_nodes} nodes."
    inside = f"inside a node {_exchange(other)}" if other.dcp > 1 else f"tp {other.tp} without DCP takes {_step(other)}"
    return f" DCP across nodes is worth it here: {_exchange(best)} over {best.dcp_num_nodes} nodes; {inside}."


def _crossover(sharded: Deployment, batch: int, context: int) -> dict[str, int | None]:
    plain = replace(sharded, setting=replace(sharded.setting, dcp=1))

    def is_faster(batch: int, context: int) -> bool:
        share = sharded.setting.share(batch)
        return sharded.step_us(share, context)["total"] < plain.step_us(share, context)["total"]

    return {
        "context_at_batch": smallest(lambda size: is_faster(batch, size)),
        "batch_at_context": smallest(lambda size: is_faster(size, context)),
    }


def _exchange(plan: Plan) -> str:
    exchange_us = plan.step_us["gather"] + plan.step_us["combine"]
    return f"tp {plan.tp}, dcp {plan.dcp} pays {ms(exchange_us)} ms of {_step(plan)} for its exchange"


def _step(plan: Plan) -> str:
    return f"{ms(plan.step_us['total'])} ms"
