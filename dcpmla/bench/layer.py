"""Measure one decode step of a stack of MLA layers under each DCP size, part by part, and from which context on DCP is
faster than TP.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dcpmla.attention.layer import PROJECT_FIRST_TOKENS
from dcpmla.bench.cache_formats import add_cache_arguments, config_name, query_dtypes
from dcpmla.bench.crossover import Layout, added_us_per_layer, crossovers, layout_of
from dcpmla.bench.geometries import GEOMETRIES
from dcpmla.bench.kernel_plots import plot_layer
from dcpmla.bench.layer_stack import PARTS, LayerStack
from dcpmla.bench.plots import check_outputs
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.runner import measurement, memory_on_all
from dcpmla.bench.timing import TimeLimit, largest
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, start
from dcpmla.cli.values import exchange_list, positive, positive_list, seconds
from dcpmla.comm.reach import reach
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig, MLAConfig
from dcpmla.job.bootstrap import agree
from dcpmla.parallel.mesh import DCPMesh, init_mesh

Row = dict[str, Any]
_VARIANTS: dict[str, dict[str, Any]] = {  # fields of DCPConfig, by the names of `bench exchange`
    "": {},
    "pbm": {"dcp_project_before_merge": True},
    "q_replicate": {"dcp_q_replicate": True},
    "fp8": {"dcp_exchange_dtype": "fp8"},
}
_NAMES = ", ".join(filter(None, _VARIANTS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--geometry", choices=tuple(GEOMETRIES), default="deepseek-v3", help="whose layers")
    add(
        "-tp",
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="ranks that cut the heads; all ranks of the job",
    )
    add(
        "-dcp",
        "--decode-context-parallel-size",
        type=positive_list,
        default="1",
        metavar="D,...",
        help="sizes to measure; 1 is plain TP",
    )
    backends = f"of {', '.join(DCP_COMM_BACKENDS)}; default: a2a, and direct where ranks have NVLink"
    add("--dcp-comm-backend", type=exchange_list, metavar="NAME,...", help=backends)
    variants = f"of {_NAMES} (direct alone); an empty name is the plain step, as in ,pbm; default: that alone"
    add("--variants", type=_variant_list, default="", metavar="NAME,...", help=variants)
    add_cache_arguments(parser)
    add("--num-layers", type=positive, default=8, metavar="L", help="layers of the stack")
    add(
        "--batch",
        type=positive_list,
        default="1,4,16,64,128",
        metavar="B,...",
        help="requests of a step, one new token each",
    )
    add(
        "--context",
        type=positive_list,
        default="8192,32768,131072,524288",
        metavar="S,...",
        help="cached tokens of each request",
    )
    add("--time-limit", type=seconds, default=450, metavar="S", help="seconds after which no further step is measured")
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write a row for each part of each step")
    add(
        "--plot",
        type=Path,
        metavar="OUT.png",
        help="draw the parts over contexts, and the speedup over TP; needs the extra plot",
    )
    add_commit_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Measure on the ranks of the job, report. Every rank calls it; the first one reports."""
    with start(args) as job, torch.inference_mode():
        ranks, config = job.ranks, MLAConfig.from_hf(GEOMETRIES[args.geometry]())
        with agree():
            config.heads_per_rank(args.tensor_parallel_size)  # raises, with the sizes that divide
            for dcp in args.decode_context_parallel_size:
                DCPConfig(tensor_parallel_size=args.tensor_parallel_size, decode_context_parallel_size=dcp)
            if "fp8" in args.variants and "direct" not in (args.dcp_comm_backend or ["direct"]):
                given = ",".join(args.dcp_comm_backend)
                raise ValueError(
                    f"--variants has 'fp8', but --dcp-comm-backend is {given}; direct alone carries rows in fp8, add it"
                )
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
    meshes = {dcp: init_mesh(tp, dcp) for dcp in sorted(set(args.decode_context_parallel_size))}
    layouts = _layouts(args, meshes, device)
    for batch, context in product(dict.fromkeys(args.batch), dict.fromkeys(args.context)):
        plain: dict[
            tuple[str, str], list[Row]
        ] = {}  # what the others are set against, by the dtypes of cache and queries
        for layout in layouts:
            name = f"{layout}, {batch} x {context:,}"
            if limit.is_over():
                if job.ranks.is_first:
                    print(f"time is over (--time-limit): {name} and what follows is left out", flush=True)
                return
            with measurement(args, job, name):
                if layout.variant == "pbm" and batch < PROJECT_FIRST_TOKENS:
                    raise ValueError(
                        f"a step of fewer than {PROJECT_FIRST_TOKENS} tokens does not project before it merges"
                    )
                with memory_on_all():
                    stack = LayerStack(
                        config, meshes[layout.dcp], args.num_layers, batch, context, device, dtype, **_options(layout)
                    )
                try:
                    with memory_on_all():
                        rows = _rows(args, stack, {**layout._asdict(), "batch": batch, "context": context})
                    if layout.dcp == 1:
                        plain[layout.dtypes] = rows
                    elif layout.dtypes in plain:
                        rows[0]["added_us_per_layer"] = round(added_us_per_layer(rows, plain[layout.dtypes]), 1)
                    yield rows
                finally:
                    del stack  # its cache, before the next one is made


def _layouts(args: argparse.Namespace, meshes: Mapping[int, DCPMesh], device: torch.device) -> list[Layout]:
    """What is measured of each load. Collective over the job."""
    layouts: list[Layout] = []
    dtypes = [(name, dtype) for name in args.kv_cache_dtype for dtype in query_dtypes(name, args.decode_query_dtype)]
    for dcp, mesh in meshes.items():
        if dcp == 1:
            layouts += [Layout(1, "none", "", *pair) for pair in dtypes]
            continue
        is_apart = largest(
            bool(reach(mesh.dcp_group, device)), device
        )  # some group's ranks: all ranks measure the same
        backends = args.dcp_comm_backend or ["a2a", *([] if is_apart else ["direct"])]
        exchanges = [pair for pair in product(backends, args.variants) if pair[1] != "fp8" or pair[0] == "direct"]
        layouts += [Layout(dcp, *exchange, *pair) for pair, exchange in product(dtypes, exchanges)]
    return layouts


def _options(layout: Layout) -> dict[str, Any]:
    """Fields of DCPConfig."""
    exchange = {"dcp_comm_backend": layout.dcp_comm_backend, **_VARIANTS[layout.variant]} if layout.dcp > 1 else {}
    return {
        **exchange,
        "kv_cache_dtype": config_name(layout.kv_cache_dtype),
        "decode_query_dtype": layout.decode_query_dtype,
    }


def _rows(args: argparse.Namespace, stack: LayerStack, setting: Row) -> list[Row]:
    """A row for each part, the total first: with what its parts add up to, each timed alone."""
    config, timings = stack.config, stack.timings()
    common = {
        "geometry": args.geometry,
        "tp": args.tensor_parallel_size,
        **setting,
        "num_layers": args.num_layers,
        "dtype": str(stack.hidden.dtype).removeprefix("torch."),
        "num_heads": config.num_heads,
        "query_dim": config.latent_dim,
        "latent_dim": config.kv_lora_rank,
    }
    rows = [
        {"part": part, **common, "in_graph": timing.in_graph, "median_us": round(timing.median_us, 1)}
        for part, timing in timings.items()
    ]
    rows[0]["sum_of_parts_us"] = round(sum(timings[part].median_us for part in PARTS if part in timings), 1)
    return rows


def _report(args: argparse.Namespace, job: Job, rows: Sequence[Row]) -> None:
    found = crossovers(rows)
    for crossover in found:
        tokens = (
            "at no load measured" if crossover["tokens"] is None else f"from {crossover['tokens']:,} cached tokens on"
        )
        print(f"{layout_of(crossover)} is faster than tp {args.tensor_parallel_size}: {tokens}")
    if args.json:
        write_results(args.json, rows, job.ranks.num_ranks, job.ranks.device, args.commit, {"crossover": found})
    if args.plot and rows:
        plot_layer(
            args.plot,
            rows,
            f"{args.geometry}: a decode step of {args.num_layers} attention layers, tp {args.tensor_parallel_size}",
        )


def _line(rows: Sequence[Row]) -> str:
    total = rows[0]
    name, load = str(layout_of(total)), f"{total['batch']} x {total['context']:,}"
    parts = "  ".join(f"{row['part']} {row['median_us']:>8,.1f}" for row in rows)
    added = f"  adds {total['added_us_per_layer']:,.1f} a layer" if "added_us_per_layer" in total else ""
    return f"{name:<36} {load:>14}  us: {parts}  (parts together {total['sum_of_parts_us']:,.1f}){added}"


def _variant_list(text: str) -> list[str]:
    """Different names of variants, separated by commas; an empty one is the plain step."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a variant; choose from {_NAMES}, or an empty name")
    return names
