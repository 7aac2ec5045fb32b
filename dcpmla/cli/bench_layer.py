"""Measure one decode step of a stack of MLA layers under each DCP size, part by part, and from which context on DCP is faster than TP."""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dcpmla.cli.bench_layers import measurement, memory_on_all
from dcpmla.cli.crossover import crossovers
from dcpmla.cli.geometries import GEOMETRIES
from dcpmla.cli.kernel_plots import plot_layer
from dcpmla.cli.layer_stack import PARTS, LayerStack
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, start
from dcpmla.cli.plots import check_outputs
from dcpmla.cli.results import add_commit_argument, write_results
from dcpmla.cli.timing import TimeLimit
from dcpmla.cli.values import exchange_list, positive, positive_list, seconds
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig, MLAConfig
from dcpmla.parallel.bootstrap import agree
from dcpmla.parallel.mesh import init_mesh

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--geometry", choices=tuple(GEOMETRIES), default="deepseek-v3", help="whose layers")
    add("-tp", "--tensor-parallel-size", type=positive, default=1, metavar="N", help="ranks that cut the heads; all ranks of the job")
    add("-dcp", "--decode-context-parallel-size", type=positive_list, default="1", metavar="D,...", help="sizes to measure; 1 is plain TP")
    add("--dcp-comm-backend", type=exchange_list, default="ag_rs,a2a", metavar="NAME,...", help=f"of {', '.join(DCP_COMM_BACKENDS)}")
    add("--num-layers", type=positive, default=8, metavar="L", help="layers of the stack")
    add("--batch", type=positive_list, default="1,4,16,64,128", metavar="B,...", help="requests of a step, one new token each")
    add("--context", type=positive_list, default="8192,32768,131072,524288", metavar="S,...", help="cached tokens of each request")
    add("--time-limit", type=seconds, default=450, metavar="S", help="seconds after which no further step is measured")
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write a row for each part of each step")
    add("--plot", type=Path, metavar="OUT.png", help="draw the parts over contexts, and the speedup over TP; needs the extra plot")
    add_commit_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Measure on the ranks of the job, report. Every rank calls it; the first one reports."""
    with start(args) as job, torch.inference_mode():
        ranks, config = job.ranks, MLAConfig.from_hf(GEOMETRIES[args.geometry]())
        with agree():
            config.heads_per_rank(args.tensor_parallel_size)  # raises, with the sizes that divide
            for dcp in args.decode_context_parallel_size:
                DCPConfig(tensor_parallel_size=args.tensor_parallel_size, decode_context_parallel_size=dcp)
            if ranks.is_first:
                check_outputs(args.json, args.plot)
        if ranks.is_first:
            print(f"ranks: {ranks.origin}", flush=True)
        rows = []
        for step_rows in _measure(args, job, config):
            rows += step_rows
            if ranks.is_first:
                print(_line(step_rows), flush=True)
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if ranks.is_first:
            _report(args, job, rows)


def _measure(args: argparse.Namespace, job: Job, config: MLAConfig) -> Iterator[list[Row]]:
    """The rows of one step after the other, until time is over: for every load, all layouts of the cache."""
    device, tp = job.ranks.device, args.tensor_parallel_size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limit = TimeLimit(args.time_limit, device)
    meshes = {dcp: init_mesh(tp, dcp) for dcp in args.decode_context_parallel_size}
    layouts = [(dcp, backend) for dcp in meshes for backend in (args.dcp_comm_backend if dcp > 1 else ["none"])]
    loads = product(dict.fromkeys(args.batch), dict.fromkeys(args.context))
    for (batch, context), (dcp, backend) in product(loads, layouts):
        name = f"dcp {dcp} {backend}, {batch} x {context:,}"
        if limit.is_over():
            if job.ranks.is_first:
                print(f"time is over (--time-limit): {name} and what follows is left out", flush=True)
            return
        with measurement(args, job, name):
            with memory_on_all():
                exchange = backend if dcp > 1 else "auto"
                stack = LayerStack(config, meshes[dcp], args.num_layers, batch, context, device, dtype, exchange)
            try:
                with memory_on_all():
                    rows = _rows(args, stack, {"dcp": dcp, "dcp_comm_backend": backend, "batch": batch, "context": context})
                yield rows
            finally:
                del stack  # its cache, before the next one is made


def _rows(args: argparse.Namespace, stack: LayerStack, setting: Row) -> list[Row]:
    """A row for each part, the total first: with what its parts add up to, each timed alone."""
    config, timings = stack.config, stack.timings()
    common = {
        "geometry": args.geometry,
        "tp": args.tensor_parallel_size,
        **setting,
        "num_layers": args.num_layers,
        "dtype": str(stack.hidden.dtype).removeprefix("torch."),
        "kv_cache_dtype": "bf16",
        "num_heads": config.num_heads,
        "query_dim": config.latent_dim,
        "latent_dim": config.kv_lora_rank,
    }
    rows = [
        {"part": part, **common, "in_graph": timing.in_graph, "median_us": round(timing.median_us, 1)} for part, timing in timings.items()
    ]
    rows[0]["sum_of_parts_us"] = round(sum(timings[part].median_us for part in PARTS if part in timings), 1)
    return rows


def _report(args: argparse.Namespace, job: Job, rows: Sequence[Row]) -> None:
    found = crossovers(rows)
    for crossover in found:
        tokens = "at no load measured" if crossover["tokens"] is None else f"from {crossover['tokens']:,} cached tokens on"
        print(f"dcp {crossover['dcp']} {crossover['dcp_comm_backend']} is faster than tp {args.tensor_parallel_size}: {tokens}")
    if args.json:
        write_results(args.json, rows, job.ranks.num_ranks, job.ranks.device, args.commit, {"crossover": found})
    if args.plot and rows:
        plot_layer(args.plot, rows, f"{args.geometry}: a decode step of {args.num_layers} attention layers, tp {args.tensor_parallel_size}")


def _line(rows: Sequence[Row]) -> str:
    total = rows[0]
    load, exchange = f"{total['batch']} x {total['context']:,}", f"dcp {total['dcp']} {total['dcp_comm_backend']}"
    parts = "  ".join(f"{row['part']} {row['median_us']:>8,.1f}" for row in rows)
    return f"{exchange:<12} {load:>14}  us: {parts}  (parts together {total['sum_of_parts_us']:,.1f})"
