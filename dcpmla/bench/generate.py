"""Time decode steps of a whole model, with and without CUDA graphs in the same run: time per token and tokens/s per
batch.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.bench.load import add_load, make_load
from dcpmla.bench.plots import check_outputs, new_figure, save_figure
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.cache.formats import format_name
from dcpmla.cache.latent import num_blocks
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_engine_arguments, build_engine, dcp_config, start
from dcpmla.cli.values import positive, positive_list, seed
from dcpmla.integrations.loading import ModelFiles, check_layout, open_model
from dcpmla.job.bootstrap import agree
from dcpmla.runtime.engine import Engine

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add_engine_arguments(parser)
    add = parser.add_argument
    add(
        "--batch",
        type=positive_list,
        default="1,2,4,8,16,32,64,128",
        metavar="A,B",
        help="requests that decode together",
    )
    add("--input-len", type=positive, default=512, metavar="N", help="tokens of a prompt")
    add("--output-len", type=positive, default=64, metavar="N", help="new tokens of a request")
    add("--seed", type=seed, default=0, help="of the prompts' tokens")
    add("--json", type=Path, metavar="OUT.json", help="write a row for each batch and mode")
    add("--plot", type=Path, metavar="OUT.png", help="draw time per token and tokens/s; needs the extra plot")
    add_commit_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Load the model once, time each batch in each mode, report.

    Every rank calls it; the first one reports and writes.
    """
    dcp = dcp_config(args, args.decode_context_parallel_size)
    with start(args) as job:
        job.watchdog.enter("reading the model's files", LOAD_TIMEOUT)
        with agree():
            files = open_model(args.model, args.max_model_len)
            check_layout(files, dcp)
            _check_sizes(args, files)
            if job.ranks.is_first:
                check_outputs(args.json, args.plot, [Path(args.model) / "config.json"])
        # A block more for each request: the scheduler keeps one free for each that runs.
        seq_len = args.input_len + args.output_len - 1 + dcp.virtual_block_size
        engine, _ = build_engine(args, job, dcp, files, [seq_len] * max(args.batch))
        with closing(engine):
            _check_room(args, num_blocks(seq_len, dcp), engine)
            rows = _measure(args, engine, job)
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if job.ranks.is_first:
            _report(args, job, rows)


def _check_sizes(args: argparse.Namespace, files: ModelFiles) -> None:
    if args.output_len < 2:
        raise ValueError(
            f"--output-len is {args.output_len}; it must be at least 2: the first token comes with the prompt"
        )
    if args.input_len + args.output_len > files.max_model_len:
        raise ValueError(
            f"--input-len is {args.input_len} and --output-len {args.output_len}, together {args.input_len + args.output_len} tokens; "
            f"with --max-model-len {files.max_model_len} at most that many are served"
        )
    limit = min(args.max_num_seqs, args.max_num_batched_tokens)
    if max(args.batch) > limit:
        raise ValueError(
            f"--batch has {max(args.batch)}; raise --max-num-seqs and --max-num-batched-tokens, which allow {limit}"
        )


def _check_room(args: argparse.Namespace, blocks_of_request: int, engine: Engine) -> None:
    """Requests that wait for blocks would make a smaller batch of it."""
    needed = max(args.batch) * blocks_of_request
    if needed > engine.cache.sizes.num_blocks:
        raise ValueError(
            f"cache: {max(args.batch)} requests need {needed:,} blocks, but there is room for {engine.cache.sizes.num_blocks:,}; "
            f"lower --batch, --input-len or --output-len, or raise --kv-cache-memory-bytes"
        )


def _measure(args: argparse.Namespace, engine: Engine, job: Job) -> list[Row]:
    graph, rows = engine.graph, []
    modes = {"graph": graph, "eager": None} if graph else {"eager": None}
    try:
        for batch in dict.fromkeys(args.batch):
            for mode, graph_of_mode in modes.items():
                engine.graph = graph_of_mode
                seconds = _slowest(_decode_seconds(args, engine, job, batch), engine)
                row = _parameters(args, engine) | {"mode": mode, "batch": batch, "median_us": round(seconds * 1e6, 1)}
                rows.append(row | {"tokens_per_second": round(batch / seconds, 1)})
    finally:
        engine.graph = graph  # closed with the engine
    return rows


def _decode_seconds(args: argparse.Namespace, engine: Engine, job: Job, batch: int) -> list[float]:
    """Seconds of each decode step of the whole batch, its tokens on the host."""
    job.watchdog.enter("queueing requests")
    load = make_load(batch, math.inf, [args.input_len], [args.output_len], engine.model.vocab_size, args.seed)
    add_load(engine, load)
    seconds = []
    while engine.has_requests:
        num_before, started = engine.stats.num_decode_tokens, time.perf_counter()
        engine.step()
        if engine.stats.num_decode_tokens - num_before == batch:
            seconds.append(time.perf_counter() - started)
    if not seconds:
        raise ValueError(
            f"--output-len is {args.output_len}: with a batch of {batch} the first requests end before the last prompts are computed; "
            f"raise it, or --max-num-batched-tokens"
        )
    return seconds


def _slowest(seconds: Sequence[float], engine: Engine) -> float:
    """The median, of the slowest rank."""
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=engine.model.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=engine.mesh.tp_group)
    return float(slowest)


def _parameters(args: argparse.Namespace, engine: Engine) -> Row:
    names = [
        "decode_query_dtype",
        "index_cache_dtype",
        "index_hadamard",
        "dcp_q_replicate",
        "dcp_project_before_merge",
        "enable_expert_parallel",
    ]
    names += ["block_size", "input_len", "output_len", "seed"]
    return {
        "model": Path(args.model).name,  # where it lies is nobody's business
        "tp": engine.mesh.tp_size,
        "dcp": engine.mesh.dcp_size,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "kv_cache_dtype": format_name(engine.cache.sizes.dtype),
        **{name: getattr(args, name) for name in names},
    }


def _report(args: argparse.Namespace, job: Job, rows: Sequence[Row]) -> None:
    """Print a line for each batch, write the files."""
    eager = {row["batch"]: row for row in rows if row["mode"] == "eager"}
    graph = {row["batch"]: row for row in rows if row["mode"] == "graph"}
    print(f"{'batch':>6}  {'eager, ms':>10}  {'graph, ms':>10}  {'ratio':>6}  {'tok/s':>10}")
    for batch, row in eager.items():
        best = graph.get(batch, row)
        ratio = f"{row['median_us'] / best['median_us']:.2f}" if graph else "-"
        in_graph = f"{best['median_us'] / 1e3:.3f}" if graph else "-"
        print(
            f"{batch:>6}  {row['median_us'] / 1e3:>10.3f}  {in_graph:>10}  {ratio:>6}  {best['tokens_per_second']:>10,.0f}"
        )
    if args.json:
        write_results(args.json, rows, job.ranks.num_ranks, job.ranks.device, args.commit)
    if args.plot:
        _plot(args.plot, rows)


def _plot(path: Path, rows: Sequence[Row]) -> None:
    """Time per token and tokens/s over batches, a line for each mode."""
    row = rows[0]
    title = f"{row['model']}, tp {row['tp']}, dcp {row['dcp']}, {row['dtype']}: decode after {row['input_len']} tokens"
    figure, (times, rates) = new_figure(title, num_axes=2)
    for mode in dict.fromkeys(row["mode"] for row in rows):
        points = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["batch"])
        batches = [row["batch"] for row in points]
        times.plot(batches, [row["median_us"] / 1e3 for row in points], "o-", label=mode)
        rates.plot(batches, [row["tokens_per_second"] for row in points], "o-", label=mode)
    for axes, label in ((times, "time per token, ms"), (rates, "tokens/s")):
        axes.set_xlabel("batch")
        axes.set_ylabel(label)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.legend()
    save_figure(path, figure)
