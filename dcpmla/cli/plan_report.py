"""Tables and the figure of `plan`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from dcpmla.bench.plots import draw_bars, new_figure, save_figure
from dcpmla.cache.formats import format_name
from dcpmla.cache.index_keys import index_format_name
from dcpmla.cli.output import align
from dcpmla.planning.capacity import capacity_table
from dcpmla.planning.machine import Machine
from dcpmla.planning.measured import Row, measured_us
from dcpmla.planning.recommend import Plan, cache_bytes
from dcpmla.planning.weights import ModelSize
from dcpmla.planning.words import ms

# Fields that are printed with a measured row.
_SIZES = ("tp", "dcp", "heads", "tokens", "num_layers", "batch", "context", "input_len", "kv_cache_dtype")


def report(
    args: argparse.Namespace, machine: Machine, model: ModelSize, plans: Sequence[Plan], best: Plan | None, reason: str
) -> list[str]:
    """Return the lines to print."""
    parts, has_replicas = _parts(plans), any(plan.num_replicas > 1 for plan in plans)
    formats = ", ".join({f"{plan.kv_cache_dtype} {plan.kv_bytes_per_token:,}": None for plan in plans})
    gpus = f"nodes of {machine.gpus_per_node} GPUs with {machine.memory_bytes / 2**30:.0f} GiB"
    left = f"{machine.workspace_share:.0%} of it left to activations and workspaces"
    lines = [
        f"{args.model} on {machine.name}, {gpus}, {left}",
        f"numbers of the machine: {machine.source}",
        f"{args.batch:,} requests of {args.context:,} tokens; cache bytes of a token: {formats}",
    ]
    if args.num_gpus:
        shares = "each replica of the TP group takes its share of the requests"
        lines.append(f"{args.num_gpus:,} GPUs in {plans[0].num_nodes:,} nodes; {shares}")
    verdict = "none" if best is None else str(best)
    table = align([_cells(plan, parts, has_replicas) for plan in plans])
    lines += ["", *table, "", *_capacity(machine, model, plans), "", f"recommended: {verdict}. {reason}"]
    return [*lines, *(f"note: {note}" for note in _notes(args, machine, model, plans))]


def _notes(args: argparse.Namespace, machine: Machine, model: ModelSize, plans: Sequence[Plan]) -> list[str]:
    """Return assumptions of the numbers that a reader may not expect."""
    notes = []
    if any(machine.num_nodes(plan.tp, plan.num_ranks) > 1 for plan in plans):
        network = f"{machine.network_gb_per_s:g} GB/s a GPU, {machine.network_us:g} us a step"
        notes.append(f"collectives over several nodes are not measured: they assume a network of {network}")
    widened = ", ".join(dict.fromkeys(str(plan.tp) for plan in plans if plan.weights_widened))
    if widened:
        notes.append(f"tp {widened} cuts through blocks of quantized weights: ranks hold those dequantized")
    if args.context > model.max_position_embeddings:
        notes.append(f"the model's positions end at {model.max_position_embeddings:,}")
    return notes


def _parts(plans: Sequence[Plan]) -> list[str]:
    """Return the names of a step's parts, none if no plan fits."""
    return next(([part for part in plan.step_us if part != "total"] for plan in plans if plan.fits), [])


def _cells(plan: Plan, parts: Sequence[str], has_replicas: bool) -> dict[str, str]:
    """Return a line of the table: contents of a rank, capacity, the step and its parts in milliseconds, and the context
    at which DCP starts to win. Plans that do not fit have no times.
    """
    crossover = "-"
    if plan.crossover:
        context = plan.crossover["context_at_batch"]
        crossover = "never" if context is None else f"{context:,} tokens"
    return {
        "tp": str(plan.tp),
        "dcp": str(plan.dcp),
        "exchange": plan.exchange,
        "cache": plan.kv_cache_dtype,
        **({"replicas": f"{plan.num_replicas:,}"} if has_replicas else {}),
        "weights": f"{plan.weight_bytes_per_rank / 2**30:.1f} GiB",
        "KV tokens": f"{plan.kv_tokens_total:,}",
        "fits": "yes" if plan.fits else "no",
        "longest": f"{plan.longest_context:,}",
        "tokens/s": "-" if plan.tokens_per_second is None else f"{plan.tokens_per_second:,.0f}",
        "step ms": ms(plan.step_us.get("total")),
        **{part: ms(plan.step_us.get(part)) for part in parts},
        "beats tp from": crossover,
    }


def _capacity(machine: Machine, model: ModelSize, plans: Sequence[Plan]) -> list[str]:
    """Return a table of each format's capacity under the largest TP size."""
    tp = max(plan.tp for plan in plans)
    widest = next(plan for plan in plans if plan.tp == tp)
    gpu_bytes = cache_bytes(machine, widest.weight_bytes_per_rank)
    dcp_sizes = list(dict.fromkeys(plan.dcp for plan in plans if plan.tp == tp))
    rows = [
        {
            "cache": format_name(plan.dtype),
            **({"index cache": index_format_name(plan.index_dtype)} if model.attention.num_index_layers else {}),
            "dcp": str(plan.dcp_size),
            "bytes a token": f"{plan.bytes_per_token:,}",
            **({"bytes a request": f"{plan.bytes_per_state:,}"} if plan.num_states else {}),
            "tokens a GB": f"{plan.tokens_per_gb:,}",
            f"tokens on {tp} GPUs": f"{plan.tokens_total:,}",
        }
        for plan in capacity_table(
            model.attention, gpu_bytes, tp, dcp_sizes, widest.num_states, widest.num_speculative_tokens
        )
    ]
    caches = f"what caches of {gpu_bytes / 1e9:.1f} GB on each GPU hold, with tp {tp}; a GB is one of each GPU"
    states = f", besides the states of {widest.num_states:,} requests" if widest.num_states else ""
    return [caches + states, *align(rows)]


def measured_report(path: Path, predicted: Sequence[tuple[Row, float | None]]) -> list[str]:
    """Return a line on each row that has a prediction, and one on them all."""
    lines, ratios = ["", f"{path}: measured and predicted us, predicted / measured"], []
    for row, time in predicted:
        if time is not None:
            ratios.append(time / measured_us(row))
            names = (row.get(key) for key in ("operation", "part", "mode", "exchange", "variant"))
            sizes = ", ".join(f"{key} {row[key]}" for key in _SIZES if row.get(key) is not None)
            times = f"{measured_us(row):>10,.1f} {time:>10,.1f} {ratios[-1]:>6.2f}"
            lines.append(f"{' '.join(filter(None, names)):<26} {times}  {sizes}")
    skipped = len(predicted) - len(ratios)
    span = f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}" if ratios else "nothing"
    return [*lines, f"predicted / measured is {span} ({len(ratios)} rows; {skipped} have no prediction)"]


def plot(path: Path, plans: Sequence[Plan], title: str) -> None:
    """Draw step times of plans that fit, stacked by part, and the tokens that fit, a bar for each plan."""
    figure, (steps, tokens) = new_figure(title, num_axes=2, height=1.8 + 0.4 * len(plans))
    parts = _parts(plans) or ["total"]
    times = {str(plan): {part: plan.step_us.get(part, 0) / 1e3 for part in parts} for plan in plans}
    draw_bars(steps, times, "decode step, ms", "{:,.2f}")
    totals = {str(plan): plan.kv_tokens_total / 1e6 for plan in plans}
    draw_bars(tokens, totals, "tokens that fit, millions", "{:,.2f}")
    save_figure(path, figure)
