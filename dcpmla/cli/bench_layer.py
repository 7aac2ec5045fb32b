"""Measure one decode step of a stack of MLA layers under each DCP size, part by part, and from which context on DCP is faster than TP."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dcpmla.attention.layer import PROJECT_FIRST_TOKENS
from dcpmla.cli.bench_layers import measurement, memory_on_all
from dcpmla.cli.crossover import Layout, added_us_per_layer, crossovers, layout_name, layout_of
from dcpmla.cli.geometries import GEOMETRIES
from dcpmla.cli.kernel_plots import plot_layer
from dcpmla.cli.layer_stack import PARTS, LayerStack
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, start
from dcpmla.cli.plots import check_outputs
from dcpmla.cli.results import add_commit_argument, write_results
from dcpmla.cli.timing import TimeLimit, largest
from dcpmla.cli.values import exchange_list, positive, positive_list, seconds
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig, MLAConfig
from dcpmla.parallel.bootstrap import agree
from dcpmla.parallel.links import reach
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
    add("-tp", "--tensor-parallel-size", type=positive, default=1, metavar="N", help="ranks that cut the heads; all ranks of the job")
    add("-dcp", "--decode-context-parallel-size", type=positive_list, default="1", metavar="D,...", help="sizes to measure; 1 is plain TP")
    backends = f"of {', '.join(DCP_COMM_BACKENDS)}; default: a2a, and direct where ranks have NVLink"
    add("--dcp-comm-backend", type=exchange_list, metavar="NAME,...", help=backends)
    variants = f"of {_NAMES} (direct alone); an empty name is the plain step, as in ,pbm; default: that alone"
    add("--variants", type=_variant_list, default="", metavar="NAME,...", help=variants)
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
            if "fp8" in args.variants and "direct" not in (args.dcp_comm_backend or ["direct"]):
                given = ",".join(args.dcp_comm_backend)
                raise ValueError(f"--variants has 'fp8', but --dcp-comm-backend is {given}; direct alone carries rows in fp8, add it")
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
        plain: list[Row] = []  # what the others are set against
        for dcp, backend, variant in layouts:
            name = f"{layout_name((dcp, backend, variant))}, {batch} x {context:,}"
            if limit.is_over():
                if job.ranks.is_first:
                    print(f"time is over (--time-limit): {name} and what follows is left out", flush=True)
                return
            with measurement(args, job, name):
                if variant == "pbm" and batch < PROJECT_FIRST_TOKENS:
                    raise ValueError(f"a step of fewer than {PROJECT_FIRST_TOKENS} tokens does not project before it merges")
                options = {"dcp_comm_backend": backend, **_VARIANTS[variant]} if dcp > 1 else {}
                with memory_on_all():
                    stack = LayerStack(config, meshes[dcp], args.num_layers, batch, context, device, dtype, **options)
                try:
                    setting = {"dcp": dcp, "dcp_comm_backend": backend, "variant": variant, "batch": batch, "context": context}
                    with memory_on_all():
                        rows = _rows(args, stack, setting)
                    if dcp == 1:
                        plain = rows
                    elif plain:
                        rows[0]["added_us_per_layer"] = round(added_us_per_layer(rows, plain), 1)
                    yield rows
                finally:
                    del stack  # its cache, before the next one is made


def _layouts(args: argparse.Namespace, meshes: Mapping[int, DCPMesh], device: torch.device) -> list[Layout]:
    """What is measured of each load. Collective over the job."""
    layouts: list[Layout] = []
    for dcp, mesh in meshes.items():
        if dcp == 1:
            layouts.append((1, "none", ""))
            continue
        is_apart = largest(bool(reach(mesh.dcp_group, device)), device)  # some group's ranks: all ranks measure the same
        backends = args.dcp_comm_backend or ["a2a", *([] if is_apart else ["direct"])]
        pairs = product(backends, args.variants)
        layouts += [(dcp, backend, variant) for backend, variant in pairs if variant != "fp8" or backend == "direct"]
    return layouts


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
        print(f"{layout_name(layout_of(crossover))} is faster than tp {args.tensor_parallel_size}: {tokens}")
    if args.json:
        write_results(args.json, rows, job.ranks.num_ranks, job.ranks.device, args.commit, {"crossover": found})
    if args.plot and rows:
        plot_layer(args.plot, rows, f"{args.geometry}: a decode step of {args.num_layers} attention layers, tp {args.tensor_parallel_size}")


def _line(rows: Sequence[Row]) -> str:
    total = rows[0]
    name, load = layout_name(layout_of(total)), f"{total['batch']} x {total['context']:,}"
    parts = "  ".join(f"{row['part']} {row['median_us']:>8,.1f}" for row in rows)
    added = f"  adds {total['added_us_per_layer']:,.1f} a layer" if "added_us_per_layer" in total else ""
    return f"{name:<24} {load:>14}  us: {parts}  (parts together {total['sum_of_parts_us']:,.1f}){added}"


def _variant_list(text: str) -> list[str]:
    """Different names of variants, separated by commas; an empty one is the plain step."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a variant; choose from {_NAMES}, or an empty name")
    return names
