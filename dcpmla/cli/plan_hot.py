"""Contexts whose latents are in host memory: what GPUs and hosts hold, and steps over the rate of misses."""

from dataclasses import asdict

from dcpmla.cli.output import Section, align
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.hot import MISS_RATES, HotStep, gathered_gb_per_s, hot_memory, hot_step, needed_hit_rate
from dcpmla.planning.recommend import Plan
from dcpmla.planning.words import ms


def hot_section(plan: Plan, deployment: Deployment, batch: int, context: int, host_gib: float) -> Section:
    """Return what a DCP group holds under one plan, and the times of its decode steps.

    Args:
        batch: Requests of the whole job.
        context: Tokens of each.
        host_gib: GiB of host memory of all ranks of a TP group.
    """
    share = plan.share(batch)
    memory = hot_memory(deployment, plan.kv_tokens_total, host_gib)
    steps = [hot_step(deployment, share, context, rate) for rate in MISS_RATES]
    needed = needed_hit_rate(deployment, share, context)
    num_tokens = min(memory.gpu_tokens, memory.host_tokens)
    smaller = "the GPUs" if memory.gpu_tokens < memory.host_tokens else "host memory"
    lines = [
        f"latents in host memory, {plan.kv_hot_tokens:,} hot tokens a layer, of {plan}",
        f"a token takes {memory.gpu_bytes_per_token:,} bytes of a GPU, {memory.host_bytes_per_token:,} of host memory",
        f"hot and scratch rows take {memory.hot_bytes_per_rank / 2**30:.2f} GiB of each GPU",
        f"GPUs have room for {memory.gpu_tokens:,} tokens, host memory for {memory.host_tokens:,}: "
        f"{num_tokens // context:,} requests of {context:,}, limited by {smaller}",
        f"decode steps of {share:,} requests, rows fetched at {gathered_gb_per_s(deployment.machine):g} GB/s a GPU",
        *align([_cells(step, share * plan.tokens_a_step) for step in steps]),
        f"fetches take no longer than the rest of a step from a hit rate of {needed:.1%} on",
    ]
    content = {"memory": asdict(memory), "steps": [*map(asdict, steps)], "needed_hit_rate": needed}
    return Section(content, lines)


def _cells(step: HotStep, num_tokens: float) -> dict[str, str]:
    """Return a line of the table of steps, which make num_tokens new tokens each."""
    return {
        "misses": f"{step.miss_rate:.0%}",
        "MB a rank": f"{step.bytes_per_rank / 1e6:,.1f}",
        "fetches ms": ms(step.fetch_us),
        "step ms": ms(step.step_us),
        "us a token": f"{step.step_us / num_tokens:,.1f}",
    }
