"""Serve a synthetic load under one or more DCP sizes with the same cache bytes on each rank: how many requests fit, and
how fast.
"""

import argparse
import gc
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from dcpmla.bench.load import Load, add_load, make_load, request_rate
from dcpmla.bench.plots import check_outputs
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.served import Served, plot_served, table
from dcpmla.cache.formats import format_name
from dcpmla.cache.latent import num_blocks
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_engine_arguments, build_engine, dcp_config, start
from dcpmla.cli.values import positive, positive_list, seed
from dcpmla.config import DCPConfig
from dcpmla.integrations.loading import ModelFiles, check_layout, open_model
from dcpmla.job.bootstrap import agree
from dcpmla.llm import run_with_bar
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.stats import Stats

_NUM_WARM_UPS = 8  # requests
_WARM_UP_OUTPUT_LEN = 16  # most new tokens of one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add_engine_arguments(parser, positive_list)
    add = parser.add_argument
    add(
        "--request-rate",
        type=request_rate,
        default="inf",
        metavar="R",
        help="requests a second, Poisson; inf: all at once",
    )
    add("--num-requests", type=positive, default=200, metavar="N")
    add(
        "--input-lens",
        type=positive_list,
        default="512,2048",
        metavar="A,B",
        help="tokens of a prompt are one of these",
    )
    add(
        "--output-lens",
        type=positive_list,
        default="64,256",
        metavar="A,B",
        help="new tokens of a request are one of these",
    )
    add("--seed", type=seed, default=0, help="of arrivals, lengths and tokens")
    add("--json", type=Path, metavar="OUT.json", help="write a row for each DCP size")
    add("--plot", type=Path, metavar="OUT.png", help="draw latencies and running requests; needs the extra plot")
    add_commit_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Serve the same load under each DCP size, report. Every rank calls it; the first one reports and writes."""
    dcps = [dcp_config(args, size) for size in dict.fromkeys(args.decode_context_parallel_size)]
    with start(args) as job:
        job.watchdog.enter("making the load", LOAD_TIMEOUT)
        with agree():
            files = open_model(args.model, args.max_model_len)
            check_layout(files, dcps[0])  # they differ in their DCP size alone
            _check_lens(args, files)
            if job.ranks.is_first:
                check_outputs(args.json, args.plot, [Path(args.model) / "config.json"])
        load = make_load(
            args.num_requests, args.request_rate, args.input_lens, args.output_lens, files.config.vocab_size, args.seed
        )
        results = []
        for dcp in dcps:
            results.append(_measure(args, job, dcp, dcps, files, load))
            gc.collect()  # a model refers to itself: its memory is wanted by the next one
            torch.cuda.empty_cache()
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if job.ranks.is_first:
            _report(args, job, results)


def _check_lens(args: argparse.Namespace, files: ModelFiles) -> None:
    longest_input, longest_output = max(args.input_lens), max(args.output_lens)
    if longest_input + longest_output > files.max_model_len:
        raise ValueError(
            f"--input-lens has {longest_input} and --output-lens {longest_output}, together {longest_input + longest_output} tokens; "
            f"with --max-model-len {files.max_model_len} at most that many are served"
        )


def _measure(
    args: argparse.Namespace, job: Job, dcp: DCPConfig, dcps: Sequence[DCPConfig], files: ModelFiles, load: Load
) -> Served:
    """Load the model, warm up, serve the load.

    The cache bytes that the first size gets are those of the sizes after it.
    """
    engine, selection = build_engine(args, job, dcp, files, None)
    with closing(engine):
        _check_room(engine, dcps, load)
        args.kv_cache_memory_bytes = engine.cache.sizes.bytes_per_rank
        _serve(engine, "warm-up", _warm_up(args, files), job)
        engine.stats = Stats()
        served = _serve(engine, "load", load, job)
    return replace(
        served, row={**_parameters(args, dcp, engine), "dcp_comm_backend": selection.exchange.name, **served.row}
    )


def _parameters(args: argparse.Namespace, dcp: DCPConfig, engine: Engine) -> dict[str, object]:
    names = [
        "block_size",
        "cp_kv_cache_interleave_size",
        "dcp_q_replicate",
        "dcp_project_before_merge",
        "decode_query_dtype",
    ]
    names += [
        "index_cache_dtype",
        "index_hadamard",
        "enable_expert_parallel",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enforce_eager",
    ]
    names += ["num_requests", "input_lens", "output_lens", "seed"]
    return {
        "model": Path(args.model).name,  # where it lies is nobody's business
        "tp": dcp.tensor_parallel_size,
        "dcp": dcp.decode_context_parallel_size,
        **{name: getattr(args, name) for name in names},
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",  # JSON has no infinity
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "kv_cache_dtype": format_name(engine.cache.sizes.dtype),
    }


def _check_room(engine: Engine, dcps: Sequence[DCPConfig], load: Load) -> None:
    """No size is served in vain: the longest request must fit under all of them."""
    longest, sizes = max(load.seq_lens), engine.cache.sizes
    for dcp in dcps:
        if num_blocks(longest, dcp) > sizes.num_blocks:
            room = sizes.num_blocks * dcp.virtual_block_size
            raise ValueError(
                f"cache: the longest request has {longest:,} tokens, but {sizes.bytes_per_rank:,} bytes a rank hold {room:,} with -dcp "
                f"{dcp.decode_context_parallel_size}; raise --kv-cache-memory-bytes, or shorten --input-lens or --output-lens"
            )


def _warm_up(args: argparse.Namespace, files: ModelFiles) -> Load:
    """A few requests at once, so that compilations, connections and first allocations do not count.

    Other tokens than the load's.
    """
    output_lens = [min(_WARM_UP_OUTPUT_LEN, length) for length in args.output_lens]
    return make_load(_NUM_WARM_UPS, math.inf, args.input_lens, output_lens, files.config.vocab_size, args.seed + 1)


def _serve(engine: Engine, name: str, load: Load, job: Job) -> Served:
    job.watchdog.enter("queueing the load")
    requests = add_load(engine, load)
    steps = run_with_bar(engine, f"dcp {engine.mesh.dcp_size}, {name}", len(requests), job.ranks.is_first)
    running = [(engine.now, len(engine.scheduler.running)) for _ in steps]
    return Served.of(engine, requests, running)


def _report(args: argparse.Namespace, job: Job, results: Sequence[Served]) -> None:
    """Print a table with a column for each DCP size, write the files."""
    rows = [result.row for result in results]
    print("\n".join(table(rows)))
    if args.json:
        write_results(args.json, rows, job.ranks.num_ranks, job.ranks.device, args.commit)
    if args.plot:
        plot_served(args.plot, results)
