"""Measure what the limit of prompts' pieces beside decodes (`--max-prefill-ms`) does to tokens a second, times to first
tokens, and times between tokens.

Usage: `torchrun --nproc-per-node 4 benchmarks/prefill_limits.py -tp 4 -dcp 4 --layers 5 8x32768+128 --json OUT.json`

A load is NxLENGTHS+NEW[@RATE]: N prompts of random tokens, each of one of the LENGTHS at random, NEW tokens for each,
and RATE arrivals a second as a Poisson process; without a rate all arrive at once. One engine serves each load under
each limit, after a round that does not count.
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from benchmarks.load import Load, rates, summarize, summarize_all  # noqa: E402
from benchmarks.offloading import (  # noqa: E402
    add_engine_arguments,
    block_sizes,
    engine_fields,
    model_config,
    new_llm,
    print_row,
    write_rows,
)
from dcpmla.bench.results import Row  # noqa: E402
from dcpmla.llm import LLM  # noqa: E402
from dcpmla.planning.prefill import PrefillCosts  # noqa: E402
from dcpmla.runtime.request import Request  # noqa: E402
from dcpmla.runtime.sampling import SamplingParams  # noqa: E402

_POSITIVE = r"[1-9]\d*"
_LOAD = re.compile(rf"({_POSITIVE})x({_POSITIVE}(?:,{_POSITIVE})*)\+({_POSITIVE})(?:@(\d+(?:\.\d+)?))?")
_LIMITS = "10,15,20,30,45,60,90,default,none"


def load_sizes(text: str) -> Row:
    """Return the fields of a row on a load, for argparse."""
    match = _LOAD.fullmatch(text)
    if match is None or (match[4] and not float(match[4])):
        example = "NxLENGTHS+NEW[@RATE], for example 8x32768+128 or 80x512,8192+64@4"
        raise argparse.ArgumentTypeError(f"{text!r} is no load; write {example}")
    lens = [int(length) for length in match[2].split(",")]
    sizes = {"load": text, "num_requests": int(match[1]), "input_lens": lens, "output_len": int(match[3])}
    return {**sizes, "request_rate": float(match[4]) if match[4] else "inf"}


def limits(text: str) -> list[str]:
    """Return limits, for argparse: milliseconds above 0, "default" or "none"."""
    for item in text.split(","):
        is_number = re.fullmatch(r"\d+(\.\d+)?", item) is not None
        if item not in ("default", "none") and not (is_number and float(item) > 0):
            raise argparse.ArgumentTypeError(f"{item!r} is no limit; write milliseconds above 0, default or none")
    return text.split(",")


def make_load(sizes: Row, vocab_size: int, seed: int) -> Load:
    """Return a load, the same on all ranks for the same seed."""
    random, num_requests = np.random.default_rng(seed), sizes["num_requests"]
    times = random.exponential(1 / float(sizes["request_rate"]), num_requests).cumsum().tolist()
    lens = random.choice(sizes["input_lens"], num_requests).tolist()
    prompts = [random.integers(vocab_size, size=length).tolist() for length in lens]
    return Load(times, prompts, [sizes["output_len"]] * num_requests)


def serve(llm: LLM, load: Load) -> Row:
    """Return the results of serving a load, times by this rank's clock."""
    engine, latest, gaps = llm.engine, dict[Request, float](), list[float]()
    engine.reset()
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=num_new, ignore_eos=True), arrival_time=time)
        for time, prompt, num_new in zip(load.arrival_times, load.prompts, load.output_lens, strict=True)
    ]
    engine.restart_clock()
    while engine.has_requests:
        for request in engine.step().changed:
            if request in latest:
                gaps.append(engine.now - latest[request])
            latest[request] = engine.now
    waits = [(request.first_token_time or 0.0) - request.arrival_time for request in requests]
    num_input, num_output = sum(map(len, load.prompts)), sum(load.output_lens)
    return {
        "num_preemptions": sum(request.num_preemptions for request in requests),
        **rates(len(requests), num_input, num_output, max(latest.values())),
        **summarize_all([{"time_to_first_token": wait} for wait in waits]),
        "time_to_first_token_max": round(max(waits), 6),
        **{f"inter_token_{name}": value for name, value in summarize(gaps).items()},
        "inter_token_max": round(max(gaps, default=0.0), 6),
    }


def set_limit(costs: PrefillCosts, default_us: float, limit: str) -> None:
    """Set the limit of an engine, as `--max-prefill-ms` does at its start."""
    costs.is_strict = limit != "default"
    costs.max_prefill_us = default_us if limit == "default" else 1e3 * float("inf" if limit == "none" else limit)


def measure(args: argparse.Namespace, llm: LLM) -> None:
    """Print and write a row for each load under each limit."""
    costs, rows = llm.engine.scheduler.costs, list[Row]()
    assert isinstance(costs, PrefillCosts)
    default_us, vocab_size = costs.max_prefill_us, llm.engine.model.vocab_size
    for sizes in args.loads:
        serve(llm, make_load(sizes, vocab_size, args.seed + 1))
        load = make_load(sizes, vocab_size, args.seed)
        for limit in args.max_prefill_ms:
            set_limit(costs, default_us, limit)
            fields = {**engine_fields(args, llm, has_tiers=False), **sizes, "seed": args.seed}
            rows.append({**fields, "max_prefill_ms": limit, **serve(llm, load)})
            names = "output_tokens_per_second", "time_to_first_token_mean", "time_to_first_token_max"
            print_row(llm, rows[-1], "load", "max_prefill_ms", *names, "inter_token_p99", "inter_token_max")
            write_rows(args, llm, rows)  # a run that is cut off keeps the rows before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    add = parser.add_argument
    add("loads", type=load_sizes, nargs="+", metavar="LOAD", help="NxLENGTHS+NEW[@RATE]")
    add("--max-prefill-ms", type=limits, default=_LIMITS, metavar="MS,...", help=f"limits; default: {_LIMITS}")
    add("--seed", type=int, default=0, help="of arrivals, lengths and tokens")
    args = parser.parse_args()
    longest = max(max(sizes["input_lens"]) + sizes["output_len"] for sizes in args.loads)
    config = model_config(args, longest)
    block = block_sizes(args, config)
    num_running = max(min(sizes["num_requests"], args.max_num_seqs) for sizes in args.loads)
    # The scheduler keeps a block for each running request, besides their own.
    num_blocks = num_running * (1 + -(-longest // block.block_tokens))
    with new_llm(args, config, num_blocks * block.bytes_per_block, has_tiers=False) as llm:
        measure(args, llm)


if __name__ == "__main__":
    main()
