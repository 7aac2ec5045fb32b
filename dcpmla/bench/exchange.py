"""Measure the exchange of a DCP group: each operation, per backend, variant, tokens, heads and ranks, and check what it
gives.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from dcpmla.bench.exchange_inputs import OPERATIONS, ExchangeCase, ExchangeInputs, exchange_of, find_errors
from dcpmla.bench.exchange_peers import VllmDirect, load_vllm_direct
from dcpmla.bench.kernel_plots import plot_exchange
from dcpmla.bench.plots import check_outputs
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.runner import measurement, memory_on_all, num_calls, num_samples
from dcpmla.bench.timing import TimeLimit, largest, time_with_result
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, join
from dcpmla.cli.values import exchange_list, positive, positive_list, seconds
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.reach import reach
from dcpmla.config import DCP_COMM_BACKENDS
from dcpmla.job.bootstrap import Ranks, agree
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.machine import H200X8

_ROPE_DIM = 64  # of queries and cached rows, beside the row width: DeepSeek V2 and V3, Kimi-K2
# "pbm", project before merge: rows as wide as a head's values. "fp8": rows quantized in transit.
_VARIANTS: dict[str, tuple[str, ...]] = {
    "gather_heads": ("", "fp8"),
    "combine": ("", "pbm", "fp8"),
    "gather_context": ("",),
}
# Of `find_errors`: gathers only move; a merged row is rounded once (half of 2^-7 in bfloat16), its float32 sums a few
# times.
_LARGEST_ERRORS = {"bfloat16": 0.005, "float32": 1e-5}
_LARGEST_FP8_ERROR = 2**-4  # half a step of e4m3
Row = dict[str, Any]
MakePeer = Callable[[ProcessGroup, torch.device], VllmDirect]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    backends = ", ".join(DCP_COMM_BACKENDS)
    add(
        "--backends",
        type=exchange_list,
        metavar="NAME,...",
        help=f"of {backends}; default: ag_rs, a2a, and direct where ranks have NVLink",
    )
    add(
        "--tokens",
        type=positive_list,
        default="1,2,4,8,16,32,64,128,256,1024,4096",
        metavar="T,...",
        help="of a batch, or of a context",
    )
    add("--heads", type=positive_list, default="64,128", metavar="H,...", help="of the whole group")
    add(
        "--row-width",
        type=positive,
        default=512,
        metavar="D",
        help=f"of partial rows; queries and cached rows have {_ROPE_DIM} more",
    )
    add(
        "--value-width",
        type=positive,
        default=128,
        metavar="V",
        help="of partial rows that are projected before they are merged",
    )
    add(
        "--peers",
        type=Path,
        metavar="DIR",
        help=f"also measure {VllmDirect.name}, from DIR/direct/peer_direct.py and vllm_direct.so.xz",
    )
    add(
        "--world-sizes",
        type=positive_list,
        metavar="W,...",
        help="ranks of a group; groups of neighbours run at once; default: all ranks",
    )
    add(
        "--time-limit",
        type=seconds,
        default=450,
        metavar="S",
        help="seconds after which no further operation is measured",
    )
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write a row for each operation")
    add("--plot", type=Path, metavar="OUT.png", help="draw times over tokens; needs the extra plot")
    add_commit_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Measure on the ranks of the job, report. Every rank calls it; the first one reports."""
    with join(args) as job, torch.inference_mode():
        ranks = job.ranks
        with agree():
            sizes = world_sizes(args, ranks.num_ranks)
            if ranks.is_first:
                check_outputs(args.json, args.plot)
            make_peer = load_vllm_direct(args.peers) if args.peers else None
        if ranks.is_first:
            print(f"ranks: {ranks.origin}", flush=True)
        rows = []
        for row in _measure(args, job, sizes, make_peer):
            rows.append(row)
            if ranks.is_first:
                print(_line(row), flush=True)
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if ranks.is_first:
            _report(args, ranks, rows)


def world_sizes(args: argparse.Namespace, num_ranks: int) -> list[int]:
    """The sizes to measure.

    Raises:
        ValueError: a size of 1, or one that does not divide the ranks or the heads.
    """
    if num_ranks == 1:
        raise ValueError(
            "bench exchange measures 2 ranks or more, but 1 was started; start torchrun with --nproc-per-node 2 or more"
        )
    sizes = list(dict.fromkeys(args.world_sizes or [num_ranks]))
    for size in sizes:
        if size == 1 or num_ranks % size:
            raise ValueError(
                f"--world-sizes has {size}; it must be 2 or more, and divide the {num_ranks} ranks that were started"
            )
        for heads in args.heads:
            if heads % size:
                raise ValueError(f"--heads has {heads}; a group of {size} ranks must divide it")
    return sizes


def _measure(args: argparse.Namespace, job: Job, sizes: Sequence[int], make_peer: MakePeer | None) -> Iterator[Row]:
    """The row of one operation after the other, until time is over."""
    device = job.ranks.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limit = TimeLimit(args.time_limit, device)
    operations = [*product(("gather_heads", "combine"), dict.fromkeys(args.heads)), ("gather_context", 0)]
    for size in sizes:
        group, link = init_mesh(size, size).dcp_group, _link_gb_per_s(job.ranks, size)
        is_out_of_reach = largest(
            float(bool(reach(group, device))), device
        )  # of some group of the job: all measure the same
        default = ("ag_rs", "a2a") if is_out_of_reach else ("ag_rs", "a2a", "direct")
        exchanges = _find_exchanges(args.backends or default, group, device)
        if make_peer is not None:  # whose one operation is asked of it below
            exchanges[VllmDirect.name, ""] = cast(Exchange, make_peer(group, device))
        widths = dict.fromkeys((args.row_width, args.value_width))
        for tokens, (operation, heads), width in product(dict.fromkeys(args.tokens), operations, widths):
            case = ExchangeCase(
                group, num_calls(device), tokens, heads, args.row_width + _ROPE_DIM, width, device, dtype
            )
            inputs: ExchangeInputs | None = None  # the same for all that take them
            for (backend, variant), exchange in exchanges.items():
                if variant not in _VARIANTS[operation] or (backend == VllmDirect.name and operation != "combine"):
                    continue
                if width != (args.value_width if variant == "pbm" else args.row_width):
                    continue
                name = f"{operation} {_join(backend, variant)} of {size} ranks, {tokens:,} tokens" + (
                    f", {heads} heads" if heads else ""
                )
                if limit.is_over():
                    if job.ranks.is_first:
                        print(f"time is over (--time-limit): {name} and what follows is left out", flush=True)
                    return
                with measurement(args, job, name):
                    with memory_on_all():
                        inputs = OPERATIONS[operation](case) if inputs is None else inputs
                    setting = {
                        "op": operation,
                        "backend": backend,
                        "variant": variant,
                        "tokens": tokens,
                        "heads": heads or None,
                    }
                    with memory_on_all():
                        row = {**setting, "row_width": width, **measured(case, inputs, exchange, link)}
                    yield row


def _find_exchanges(
    backends: Sequence[str], group: ProcessGroup, device: torch.device
) -> dict[tuple[str, str], Exchange]:
    """By backend and variant."""
    found = {}
    for backend in backends:
        found[backend, ""] = found[backend, "pbm"] = exchange_of(group, device, dcp_comm_backend=backend)
        if backend == "direct":
            found[backend, "fp8"] = exchange_of(group, device, dcp_comm_backend=backend, dcp_exchange_dtype="fp8")
    return found


def measured(case: ExchangeCase, inputs: ExchangeInputs, exchange: Exchange, link_gb_per_s: float | None) -> Row:
    """What a row says of an operation: its time, its error in the last timed call and where shards are empty.

    Collective over the job.
    """
    device, calls = case.device, case.num_calls
    timing, last = time_with_result(partial(inputs.run, exchange), device, calls, num_samples(device))
    errors = [
        *find_errors(last, inputs.answer(calls - 1))
    ]  # first: what was gathered may lie where the next call gathers
    errors += find_errors(inputs.run(exchange, calls), inputs.answer(calls))
    error = largest(max(errors), device)
    return {
        "world_size": case.size,
        "dtype": str(case.dtype).removeprefix("torch."),
        "in_graph": timing.in_graph,
        "median_us": round(timing.median_us, 2),
        "wire_us": None if link_gb_per_s is None else round(inputs.received_bytes / link_gb_per_s / 1e3, 3),
        "gb_per_s": round(inputs.received_bytes / timing.median_us / 1e3, 3),
        "max_error": error if math.isfinite(error) else None,  # JSON has no NaN
    }


def _link_gb_per_s(ranks: Ranks, size: int) -> float | None:
    """Of the links between H200s of one node; None where a group has others."""
    num_nodes = replace(H200X8, gpus_per_node=ranks.num_local_ranks).num_nodes(size, ranks.num_ranks)
    is_h200 = ranks.device.type == "cuda" and "H200" in torch.cuda.get_device_name(ranks.device).split()
    return H200X8.nvlink_gb_per_s if is_h200 and num_nodes == 1 else None


def is_right(row: Row) -> bool:
    """Whether a backend gave what it should."""
    exact_or_rounded = _LARGEST_ERRORS[row["dtype"]] if row["op"] == "combine" else 0.0
    allowed = _LARGEST_FP8_ERROR if row["variant"] == "fp8" else exact_or_rounded
    return row["max_error"] is not None and row["max_error"] <= allowed


def _report(args: argparse.Namespace, ranks: Ranks, rows: Sequence[Row]) -> None:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == backend]
        print(f"{backend}: {sum(not is_right(row) for row in mine)} of {len(mine)} results wrong")
    if args.json:
        write_results(args.json, rows, ranks.num_ranks, ranks.device, args.commit)
    if args.plot and rows:
        plot_exchange(
            args.plot,
            rows,
            f"exchange of rows of {args.row_width} and {args.row_width + _ROPE_DIM}, {rows[0]['dtype']}",
        )


def _line(row: Row) -> str:
    load = f"{row['world_size']} ranks, {row['tokens']:,} tokens" + (f", {row['heads']} heads" if row["heads"] else "")
    wire = "" if row["wire_us"] is None else f"  wire {row['wire_us']:>8,.1f} us"
    error = "not finite" if row["max_error"] is None else f"{row['max_error']:.1g}"
    time = f"{row['median_us']:>10,.1f} us {row['gb_per_s']:>7,.1f} GB/s{wire}"
    name = _join(row["backend"], row["variant"])
    return f"{row['op']:<14} {name:<11} {load:<34} {time}  error {error}{'' if is_right(row) else '  WRONG'}"


def _join(backend: str, variant: str) -> str:
    return f"{backend} {variant}".rstrip()
