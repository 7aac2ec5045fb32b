"""Predict memory and decode steps of a model under each (tp, dcp, cache format), from its config alone, and recommend
one.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import transformers

from dcpmla.bench.plots import check_outputs, plot_plans
from dcpmla.cache.capacity import FORMATS, capacity_table
from dcpmla.cache.formats import format_name
from dcpmla.cache.index_keys import index_format_name
from dcpmla.cli.output import write_json
from dcpmla.cli.values import positive, positive_list
from dcpmla.config import INDEX_CACHE_DTYPES, DCPConfig, divisors
from dcpmla.hf_config import check_index_options
from dcpmla.integrations.transformers import load_config
from dcpmla.planning.calibrate import load_machine
from dcpmla.planning.machine import PRESETS, Machine, read_json
from dcpmla.planning.measured import Comparison, compare, read_rows, summarize
from dcpmla.planning.predict import Setting
from dcpmla.planning.recommend import Plan, cache_bytes, make_plan, recommend
from dcpmla.planning.weights import ModelSize, read_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        type=Path,
        metavar="DIR_OR_CONFIG",
        help="a model's directory or its config.json; no weights needed",
    )
    machines = f"a preset ({', '.join(PRESETS)}), a JSON file, or a list in which each changes what stands before it"
    add("--machine", default="h200x8", metavar="NAME_OR_JSON", help=machines)
    add(
        "-tp",
        "--tensor-parallel-size",
        type=positive_list,
        default="8",
        metavar="N,...",
        help="ranks that cut the heads",
    )
    dcp = "ranks that share one cache; default: all that divide tp"
    add("-dcp", "--decode-context-parallel-size", type=positive_list, metavar="D,...", help=dcp)
    add(
        "--num-gpus",
        type=positive,
        metavar="N",
        help="of the whole job: replicas of the TP group share its batch; default: one TP group",
    )
    add("--kv-cache-dtype", type=_formats, default="bf16", metavar="F,...", help=f"of {', '.join(FORMATS)}")
    add(
        "--index-cache-dtype",
        choices=INDEX_CACHE_DTYPES,
        default="auto",
        help="of sparse MLA's index cache; auto: bf16",
    )
    add("--batch", type=positive, default=32, metavar="B", help="requests that decode at once, on the whole job")
    add("--context", type=positive, default=131072, metavar="S", help="tokens of each of them")
    add("--measured", type=Path, metavar="BENCH.json", help="say where this benchmark's rows and the prediction differ")
    add("--json", type=Path, metavar="OUT.json", help="write the plan")
    add("--plot", type=Path, metavar="OUT.png", help="draw step times and capacities; needs the extra plot")


def run(args: argparse.Namespace) -> None:
    """Predict, print, write."""
    check_outputs(args.json, args.plot, _inputs(args))
    model = load_model_size(args.model)
    machine = load_machine(args.machine, model)
    rows = read_rows(read_json(args.measured, "--measured"), f"--measured {args.measured}") if args.measured else []
    settings = _settings(args, model)
    plans = [make_plan(machine, model, setting, args.batch, args.context) for setting in settings]
    best, reason = recommend(machine, plans, args.batch, args.context)
    comparisons = compare(machine, model, rows)
    if args.json:
        write_json(args.json, _as_json(args, machine, plans, best, reason, comparisons))
    if args.plot:
        plot_plans(args.plot, plans, f"{args.model.name} on {machine.name}: {args.batch:,} x {args.context:,} tokens")
    print(_report(args, machine, model, plans, best, reason))
    if args.measured:
        print(_measured_report(args.measured, len(rows), comparisons))


def load_model_size(path: Path) -> ModelSize:
    """A model's sizes from its directory or config file.

    Raises:
        ValueError: no such path, or no config of an MLA model.
    """
    if not os.path.exists(path):  # False, too, for a name that no file can have
        raise ValueError(
            f"model (--model) is {path}: no such file or directory; give a config.json or the directory that holds it"
        )
    transformers.utils.logging.set_verbosity_error()
    return read_model(load_config(path))


def _inputs(args: argparse.Namespace) -> list[Path]:
    """The files that the command reads."""
    measured = [args.measured] if args.measured else []
    return [args.model, args.model / "config.json", *map(Path, args.machine.split(",")), *measured]


def _formats(text: str) -> list[str]:
    unknown = [item for item in text.split(",") if item not in FORMATS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a cache format; choose from {', '.join(FORMATS)}")
    return text.split(",")


def _settings(args: argparse.Namespace, model: ModelSize) -> list[Setting]:
    """All combinations in which dcp divides tp; a dcp that divides no tp is a mistake."""
    tp_sizes, dcp_sizes = args.tensor_parallel_size, args.decode_context_parallel_size
    for tp in tp_sizes:
        model.attention.heads_per_rank(tp)  # raises, with the sizes that divide
    check_index_options(model.attention, DCPConfig(index_cache_dtype=args.index_cache_dtype))
    for dcp in dcp_sizes or []:
        if not any(tp % dcp == 0 for tp in tp_sizes):
            Setting(tp=tp_sizes[-1], dcp=dcp, kv_cache_dtype=args.kv_cache_dtype[0])  # raises likewise
    return [
        Setting(tp=tp, dcp=dcp, kv_cache_dtype=name, num_gpus=args.num_gpus, index_cache_dtype=args.index_cache_dtype)
        for tp, name in product(dict.fromkeys(tp_sizes), dict.fromkeys(args.kv_cache_dtype))
        for dcp in dict.fromkeys(dcp_sizes or divisors(tp))
        if tp % dcp == 0
    ]


def _as_json(
    args: argparse.Namespace,
    machine: Machine,
    plans: Sequence[Plan],
    best: Plan,
    reason: str,
    comparisons: Sequence[Comparison],
) -> dict[str, Any]:
    return {
        "model": str(args.model),
        "machine": asdict(machine),
        "batch": args.batch,
        "context": args.context,
        "num_gpus": args.num_gpus,
        "settings": [asdict(plan) for plan in plans],
        "recommended": {**asdict(best), "reason": reason},
        "measured": [
            {
                **comparison.row,
                "predicted_us": round(comparison.predicted_us, 2),
                "predicted_over_measured": round(comparison.ratio, 3),
            }
            for comparison in comparisons
        ],
    }


def _report(
    args: argparse.Namespace, machine: Machine, model: ModelSize, plans: Sequence[Plan], best: Plan, reason: str
) -> str:
    formats = ", ".join({f"{plan.kv_cache_dtype} {plan.kv_bytes_per_token:,}": None for plan in plans})
    lines = [
        f"{args.model} on {machine.name}, nodes of {machine.gpus_per_node} GPUs with {machine.memory_bytes / 2**30:.0f} GiB, "
        f"{machine.workspace_share:.0%} of it left to activations and workspaces",
        f"{args.batch:,} requests of {args.context:,} tokens; cache bytes of a token: {formats}",
    ]
    if args.num_gpus:
        lines.append(
            f"{args.num_gpus:,} GPUs in {best.num_nodes:,} nodes; each replica of the TP group takes its share of the requests"
        )
    lines += ["", *_table(plans), "", *_capacity(machine, model, plans), "", f"recommended: {best.setting}. {reason}"]
    return "\n".join([*lines, *(f"note: {note}" for note in _notes(args, machine, model, plans))])


def _notes(args: argparse.Namespace, machine: Machine, model: ModelSize, plans: Sequence[Plan]) -> list[str]:
    """What the numbers rest on that a reader may not expect."""
    notes = []
    if machine.has_best_attention:
        calibrated = f"--machine {args.machine},SCALING.json calibrates by it"
        notes.append(
            f"attention is the best published kernels'; ours is slower today: measure it with `bench scaling`, {calibrated}"
        )
    if any(machine.num_nodes(plan.tp, plan.num_gpus) > 1 for plan in plans):
        network = f"{machine.network_gb_per_s:g} GB/s a GPU, {machine.network_us:g} us a step"
        notes.append(f"collectives over several nodes are not measured: they assume a network of {network}")
    widened = dict.fromkeys(str(plan.tp) for plan in plans if plan.weights_widened)
    if widened:
        notes.append(
            f"tp {', '.join(widened)} cuts through the checkpoint's fp8 blocks, which cannot be loaded so: weighed as converted to bfloat16"
        )
    if args.context > model.max_position_embeddings:
        notes.append(f"the model's positions end at {model.max_position_embeddings:,}")
    return notes


def _table(plans: Sequence[Plan]) -> list[str]:
    """Aligned columns: what a rank holds, what fits, the step and its parts in milliseconds, from which context DCP
    wins.
    """
    rows = [_cells(plan) for plan in plans]
    if all(plan.num_replicas == 1 for plan in plans):
        rows = [{name: cell for name, cell in row.items() if name != "replicas"} for row in rows]
    return _align(rows)


def _align(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _capacity(machine: Machine, model: ModelSize, plans: Sequence[Plan]) -> list[str]:
    """What each format would hold, with the largest of the TP sizes."""
    tp = max(plan.tp for plan in plans)
    weight_bytes = next(plan.weight_bytes_per_rank for plan in plans if plan.tp == tp)
    gpu_bytes = cache_bytes(machine, weight_bytes)
    dcp_sizes = list(dict.fromkeys(plan.dcp for plan in plans if plan.tp == tp))
    rows = [
        {
            "cache": format_name(plan.dtype),
            **({"index cache": index_format_name(plan.index_dtype)} if plan.num_index_layers else {}),
            "dcp": str(plan.dcp_size),
            "bytes a token": f"{plan.bytes_per_token:,}",
            "tokens a GB": f"{plan.tokens_per_gb:,}",
            f"tokens on {tp} GPUs": f"{plan.tokens_total:,}",
        }
        for plan in capacity_table(
            model.attention, model.num_attention_layers, gpu_bytes, dcp_sizes, model.num_index_layers
        )
    ]
    return [
        f"what caches of {gpu_bytes / 1e9:.1f} GB on each GPU hold, with tp {tp}; a GB is one of each GPU",
        *_align(rows),
    ]


def _cells(plan: Plan) -> dict[str, str]:
    return {
        "tp": str(plan.tp),
        "dcp": str(plan.dcp),
        "exchange": plan.exchange,
        "cache": plan.kv_cache_dtype,
        "replicas": f"{plan.num_replicas:,}",
        "weights": f"{plan.weight_bytes_per_rank / 2**30:.1f} GiB",
        "KV tokens": f"{plan.kv_tokens_total:,}",
        "fits": "yes" if plan.fits else "no",
        "longest": f"{plan.longest_context:,}",
        "tokens/s": f"{plan.tokens_per_second:,.0f}",
        "step ms": f"{plan.step_us['total'] / 1e3:.2f}",
        **{part: f"{time / 1e3:.2f}" for part, time in plan.step_us.items() if part != "total"},
        "beats tp from": _crossover(plan),
    }


def _crossover(plan: Plan) -> str:
    if not plan.crossover:
        return "-"
    context = plan.crossover["context_at_batch"]
    return "never" if context is None else f"{context:,} tokens"


def _measured_report(path: Path, num_rows: int, comparisons: Sequence[Comparison]) -> str:
    skipped = num_rows - len(comparisons)
    lines = [f"\nagainst {path}, {num_rows} measured rows" + (f" ({skipped} have no prediction)" if skipped else "")]
    return "\n".join([*lines, *summarize(comparisons)])
