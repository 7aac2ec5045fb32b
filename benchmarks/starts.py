"""Measure the start of an engine with an empty folder of compiled kernels, then with the folder that this left, and
whether its first requests are as fast as the next ones.

Usage: `python benchmarks/starts.py -tp 2 -dcp 2 --json OUT.json`

The model has published layer sizes, few layers and random weights, so no start has anything to read.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from benchmarks.load import summarize  # noqa: E402
from benchmarks.offloading import (  # noqa: E402
    add_engine_arguments,
    block_sizes,
    engine_fields,
    model_config,
    new_llm,
    print_row,
    random_prompts,
    write_rows,
)
from dcpmla.bench.results import Row  # noqa: E402
from dcpmla.cli.options import positive  # noqa: E402
from dcpmla.llm import LLM  # noqa: E402
from dcpmla.parallel.collectives import gather_values  # noqa: E402
from dcpmla.runtime.sampling import SamplingParams  # noqa: E402

STARTS = ("first", "later")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--prompts", type=positive, default=8, metavar="N", help="prompts of the load")
    add("--prompt-len", type=positive, default=32768, metavar="N", help="tokens of each prompt")
    add("--output-len", type=positive, default=128, metavar="N", help="new tokens of each prompt")
    add("--repeats", type=positive, default=3, metavar="N", help="loads, one after the other")
    add("--nth-start", dest="start", choices=STARTS, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if args.start is None:
        start_twice(args.tensor_parallel_size)
    else:
        measure(args)


def start_twice(num_ranks: int) -> None:
    """Run this script on ranks of two jobs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), __file__]
    with tempfile.TemporaryDirectory() as folder:
        for start in STARTS:
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            subprocess.run([*command, *sys.argv[1:], "--nth-start", start], env=environment, check=True)


def measure(args: argparse.Namespace) -> None:
    """Start an engine, and serve the loads."""
    config = model_config(args, args.prompt_len + args.output_len)
    block = block_sizes(args, config)
    num_blocks = args.prompts * (1 - -(args.prompt_len + args.output_len) // block.block_tokens) + 2
    rows: list[Row] = []
    if args.start != STARTS[0] and args.json is not None:
        rows += json.loads(args.json.read_text())["rows"]
    compiled, imported = count_compilations(), time.time()
    with new_llm(args, config, num_blocks * block.bytes_per_block) as llm:
        fields = {
            "start": args.start,
            "import_seconds": round(imported - psutil.Process().create_time(), 2),
            "start_seconds": round(time.time() - imported, 2),
            "num_compiled": len(compiled),
        }
        for row in serve(args, llm):
            rows.append({**engine_fields(args, llm), **fields, **row})
            print_row(llm, rows[-1], *fields, *row)
        write_rows(args, llm, rows)


def count_compilations() -> list[str]:
    """Return the list to which the names of kernels come that Triton compiles, unless its folder has them."""
    names: list[str] = []
    try:
        from triton import knobs  # triton exists on Linux only
    except ImportError:
        return names

    def on_compiled(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            names.append(str(src.name))

    knobs.compilation.listener = on_compiled
    return names


def serve(args: argparse.Namespace, llm: LLM) -> Iterator[Row]:
    """Serve one prompt a few times, then all prompts, each time other ones; yield a row of each."""
    for num_prompts, length in ((1, min(300, args.prompt_len)), (args.prompts, args.prompt_len)):
        for repeat in range(args.repeats):
            prompts = random_prompts(num_prompts, length, llm.engine.model.vocab_size, num_prompts, repeat)
            params = SamplingParams(max_new_tokens=args.output_len, ignore_eos=True)
            began = time.perf_counter()
            requests = llm.generate(prompts, params)
            seconds = time.perf_counter() - began
            waits = [wait for each in requests if (wait := each.metrics()["time_to_first_token"]) is not None]
            counts = gather_values(len(llm.engine.compilations), llm.engine.mesh.tp_group, "counting compilations")
            yield {
                "num_requests": num_prompts,
                "input_len": length,
                "output_len": args.output_len,
                "repeat": repeat,
                "output_tokens_per_second": round(num_prompts * args.output_len / seconds, 1),
                "time_to_first_token_mean": summarize(waits)["mean"],
                "compilations": max(counts),
            }


if __name__ == "__main__":
    main()
