"""Measure exchange and decode step of MLA layers over the ranks of the job, beside the planner's predictions for them
and for more.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import torch

from dcpmla.bench.geometries import GEOMETRIES
from dcpmla.bench.layer_stack import LayerStack
from dcpmla.bench.plots import check_outputs, plot_scaling
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.runner import BACKENDS, exchange_timings, measurement, memory_on_all
from dcpmla.bench.timing import Timing
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, join
from dcpmla.cli.plan import load_model_size
from dcpmla.cli.values import positive, positive_list
from dcpmla.config import divisors
from dcpmla.job.bootstrap import Ranks, agree
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.calibrate import load_machine
from dcpmla.planning.machine import Machine
from dcpmla.planning.measured import predict_row
from dcpmla.planning.weights import ModelSize, read_model

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    names = ", ".join(GEOMETRIES)
    add(
        "--model",
        default="deepseek-v3",
        metavar="DIR_OR_CONFIG",
        help=f"whose layers: a directory, a config.json, or {names}",
    )
    add("--num-layers", type=positive, default=4, metavar="L", help="attention layers of the decode step")
    add(
        "--batch",
        type=positive_list,
        default="1,8,32,128",
        metavar="B,...",
        help="tokens of an exchange, requests of a step",
    )
    add("--context", type=positive_list, default="8192", metavar="S,...", help="cached tokens of each request")
    add("--simulate", type=positive_list, default=[], metavar="N,...", help="add predictions for so many ranks")
    add("--machine", default="h200x8", metavar="NAME_OR_JSON", help="what predictions are for; as in plan")
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write the rows")
    add("--plot", type=Path, metavar="OUT.png", help="draw times over DCP sizes; needs the extra plot")
    add_commit_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Measure on the ranks of the job, predict, report. Every rank calls it; the first one reports."""
    with join(args) as job, torch.inference_mode():
        ranks = job.ranks
        job.watchdog.enter("reading the model", LOAD_TIMEOUT)
        with agree():
            if ranks.is_first:
                inputs = [Path(args.model), Path(args.model) / "config.json", *map(Path, args.machine.split(","))]
                check_outputs(args.json, args.plot, inputs)
            model = (
                read_model(GEOMETRIES[args.model]()) if args.model in GEOMETRIES else load_model_size(Path(args.model))
            )
            model = model.attention_stack()  # what is measured, and so what is predicted
            machine = load_machine(args.machine, model)
        if ranks.is_first:
            print(f"ranks: {ranks.origin}", flush=True)
        rows: list[Row] = []
        here = replace(machine, gpus_per_node=ranks.num_local_ranks)
        for row in _measure(args, job, model, here):
            rows.append(row)
            if ranks.is_first:
                print(_line(row), flush=True)
        job.watchdog.enter("predicting and writing the results", LOAD_TIMEOUT)
        for num_ranks in args.simulate:
            rows += _simulate(args, num_ranks, model, machine)
        if ranks.is_first:
            _report(args, ranks, rows)


def _measure(args: argparse.Namespace, job: Job, model: ModelSize, machine: Machine) -> Iterable[Row]:
    """For every W that divides ranks and heads: the exchange over W ranks, then steps with W ranks in all and with DCP
    W on all ranks.
    """
    ranks = job.ranks
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    place = {"num_ranks": ranks.num_ranks, "gpus_per_node": machine.gpus_per_node}
    common = {"kind": "measured", "dtype": str(dtype).removeprefix("torch."), **place}

    def finish(row: Row, timing: Timing) -> Row:
        row = {**common, "num_nodes": machine.num_nodes(row["dcp"], ranks.num_ranks), **row}
        predicted = predict_row(machine, model, row)
        return {
            **row,
            "in_graph": timing.in_graph,
            "median_us": _rounded(timing.median_us),
            "predicted_us": _rounded(predicted),
        }

    sizes = _group_sizes(ranks.num_ranks, model)
    for tp, dcp in dict.fromkeys([*((size, size) for size in sizes), *((sizes[-1], size) for size in sizes)]):
        mesh = init_mesh(tp, dcp)
        if tp == dcp > 1:
            for batch in args.batch:
                with measurement(args, job, f"exchange of dcp {dcp}, {batch} tokens"):
                    for row, timing in exchange_timings(model.attention, mesh.dcp_group, batch, ranks.device, dtype):
                        yield finish(row, timing)
        for row in _steps(args, model, tp, dcp):
            with measurement(args, job, f"decode step of tp {tp} dcp {dcp}, {row['batch']} x {row['context']:,}"):
                with memory_on_all():
                    stack = LayerStack(
                        model.attention, mesh, args.num_layers, row["batch"], row["context"], ranks.device, dtype
                    )
                for part, timing in stack.timings(("total", "attention")).items():
                    yield finish({"part": part, **row}, timing)
                del stack  # its cache, before the next one is made


def _simulate(args: argparse.Namespace, num_ranks: int, model: ModelSize, machine: Machine) -> Iterable[Row]:
    """The same rows for the widest TP group of that many ranks, predicted; the ranks left over are replicas of it."""
    sizes = _group_sizes(num_ranks, model)
    tp = sizes[-1]
    for dcp in sizes:
        common = {
            "kind": "predicted",
            "num_ranks": num_ranks,
            "num_replicas": num_ranks // tp,
            "num_nodes": machine.num_nodes(dcp, num_ranks),
        }
        widths = {**_widths(model), "num_heads": model.attention.num_heads // tp * dcp}
        exchanges = [
            {"operation": operation, "backend": backend, "tp": tp, "dcp": dcp, "num_tokens": batch, **widths}
            for batch in args.batch
            for backend in BACKENDS
            for operation in ("gather_heads", "combine")
            if dcp > 1
        ]
        steps = [{"part": part, **row} for row in _steps(args, model, tp, dcp) for part in ("total", "attention")]
        for row in [*exchanges, *steps]:
            yield {**common, **row, "predicted_us": _rounded(predict_row(machine, model, {**common, **row}))}


def _group_sizes(num_ranks: int, model: ModelSize) -> list[int]:
    """What divides both the ranks and the heads."""
    return divisors(gcd(num_ranks, model.attention.num_heads))


def _widths(model: ModelSize) -> Row:
    attention = model.attention
    return {"num_heads": attention.num_heads, "query_dim": attention.latent_dim, "latent_dim": attention.kv_lora_rank}


def _steps(args: argparse.Namespace, model: ModelSize, tp: int, dcp: int) -> list[Row]:
    common = {"tp": tp, "dcp": dcp, "num_layers": args.num_layers, "kv_cache_dtype": "bf16", **_widths(model)}
    return [{**common, "batch": batch, "context": context} for context in args.context for batch in args.batch]


def _report(args: argparse.Namespace, ranks: Ranks, rows: list[Row]) -> None:
    """Print what is predicted, write the files."""
    for row in rows:
        if row["kind"] == "predicted":
            print(_line(row))
    if args.json:
        write_results(args.json, rows, ranks.num_ranks, ranks.device, args.commit)
    if args.plot:
        plot_scaling(args.plot, rows, f"{args.model}: {ranks.num_ranks} ranks measured, predictions for {args.machine}")


def _line(row: Row) -> str:
    subject = (
        f"{row['operation']} {row.get('backend', '')}".strip()
        if "operation" in row
        else f"{row['num_layers']} layers, {row['part']}"
    )
    place = f"tp {row.get('tp', row['dcp'])} dcp {row['dcp']}" + (
        f" of {row['num_ranks']:,} ranks" if "num_ranks" in row else ""
    )
    load = f"{row['num_tokens']} tokens" if "operation" in row else f"{row['batch']} x {row['context']:,}"
    measured = f"measured {row['median_us']:>10,.1f} us   " if "median_us" in row else ""
    return f"{subject:<22} {place:<24} nodes {row['num_nodes']:<3} {load:<16} {measured}predicted {row['predicted_us']:>10,.1f} us"


def _rounded(microseconds: float | None) -> float | None:
    return None if microseconds is None else round(microseconds, 1)
