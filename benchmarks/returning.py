"""Measure a conversation that returns to an engine after others have evicted it: its time to the first token if its
blocks are loaded from host memory or disks, if they are still on the GPU, and if they are prefilled again; and the
time between tokens of requests that decode meanwhile.

Usage: `torchrun --nproc-per-node 2 benchmarks/returning.py -tp 2 -dcp 2 --kv-offloading-size 32 --json OUT.json`

The model has published layer sizes, few layers and random weights. Host memory should have room for five times the
GPUs' cache, which is as large as the longest conversation and the decodes; else the conversation leaves it, too. Rows
also have the time scaled to all layers by the planner's model: a row's `scaled_*` is not measured.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

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
    published_model,
    random_prompts,
    write_rows,
)
from dcpmla.bench.results import Row  # noqa: E402
from dcpmla.bench.timing import TimeLimit  # noqa: E402
from dcpmla.cli.options import positive, positive_list  # noqa: E402
from dcpmla.cli.plan_prompts import PromptPlan  # noqa: E402
from dcpmla.integrations.model_size import read_model  # noqa: E402
from dcpmla.llm import LLM  # noqa: E402
from dcpmla.planning.deployment import Deployment  # noqa: E402
from dcpmla.planning.machine import H200X8  # noqa: E402
from dcpmla.planning.setting import Setting  # noqa: E402
from dcpmla.planning.tiers import load_costs  # noqa: E402
from dcpmla.planning.weights import ModelSize  # noqa: E402
from dcpmla.runtime.request import Request  # noqa: E402
from dcpmla.runtime.sampling import SamplingParams  # noqa: E402

NUM_NEW = 4  # tokens of an answer
NUM_ALONE = 50  # steps of decodes that are timed alone
EVICTING_LEN = 8192  # tokens of a prompt that evicts others


@dataclass
class Served:
    """A turn that was served.

    Attributes:
        request: Request of the turn.
        gaps: Seconds between tokens of the decodes, until the turn's first token.
    """

    request: Request
    gaps: list[float] = field(default_factory=list)


class Conversation:
    """A conversation in an engine. Each turn has new tokens after the same context.

    Args:
        llm: Engine.
        length: Number of tokens of the context.
        turn_len: Number of new tokens of a turn.
    """

    def __init__(self, llm: LLM, length: int, turn_len: int) -> None:
        self._llm, self._engine, self._turn_len = llm, llm.engine, turn_len
        self._streams = count(1)  # random tokens of turns and of other requests
        (self._context,) = random_prompts(1, length, self._engine.model.vocab_size, length)

    def serve(self, salt: str = "", decodes: Sequence[Request] = ()) -> Served:
        """Serve a turn. With a salt that is new, no block of the context is found.

        Args:
            decodes: Requests that decode meanwhile.
        """
        engine, (new,) = self._engine, self._random(1, self._turn_len)
        params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
        served = Served(engine.add(engine.prompt(self._context + new, salt), params))
        last = time.perf_counter()
        while served.request.finish_reason is None:
            changed = engine.step().changed
            if any(request in decodes for request in changed):
                now = time.perf_counter()
                served.gaps.append(now - last)
                last = now
            if served.request.first_token_time is not None and decodes:
                break
        engine.abort(served.request)
        if not decodes:
            self._drain()
        return served

    def start_decodes(self, num_requests: int, context: int, num_new: int) -> tuple[list[Request], list[float]]:
        """Prefill requests and decode some steps; return the requests, and the seconds between their tokens."""
        engine, params = self._engine, SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        requests = [engine.add(prompt, params) for prompt in self._random(num_requests, context)]
        while any(len(request.token_ids) < 4 for request in requests):
            engine.step()
        gaps, last = list[float](), time.perf_counter()
        for _ in range(min(NUM_ALONE, num_new // 4)):
            engine.step()
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        return requests, gaps

    def end(self, requests: Sequence[Request]) -> None:
        """End requests that decode."""
        for request in requests:
            self._engine.abort(request)
        self._drain()

    def evict(self) -> None:
        """Fill the GPUs' cache with other requests."""
        sizes, params = self._engine.cache.sizes, SamplingParams(max_new_tokens=1, ignore_eos=True)
        length = max(sizes.block_tokens, min(EVICTING_LEN, sizes.tokens_total // 4))
        length = length // sizes.block_tokens * sizes.block_tokens + 1  # the last token is in no full block
        for prompt in self._random(sizes.tokens_total // (length - 1) + 1, length):
            self._engine.add(prompt, params)
        self._drain()

    def _random(self, num_prompts: int, length: int) -> list[list[int]]:
        stream = len(self._context), next(self._streams)
        return random_prompts(num_prompts, length, self._engine.model.vocab_size, *stream)

    def _drain(self) -> None:
        """Step until no request is left."""
        while self._engine.has_requests:
            self._engine.step()


class Scale:
    """The planner's times of a turn in the measured model and in the whole one, whose ratio scales a measured time."""

    def __init__(self, args: argparse.Namespace, measured: ModelSize, whole: ModelSize) -> None:
        self._args, self._models = args, (measured, whole)

    def __call__(self, seconds: float, source: str, context: int, num_new: int) -> float:
        """Return a measured time to the first token as it is expected with all layers.

        Args:
            source: Source of the context's blocks: "prefill", "gpu" or "host".
        """
        measured_us, whole_us = (self._time_us(model, source, context, num_new) for model in self._models)
        return seconds * whole_us / measured_us

    def _time_us(self, model: ModelSize, source: str, context: int, num_new: int) -> float:
        args = self._args
        sizes = {"tp": args.tensor_parallel_size, "dcp": args.decode_context_parallel_size}
        deployment = Deployment(H200X8, model, Setting(**sizes, kv_cache_dtype="bf16"))
        prompts = PromptPlan(deployment, 1, context, args.max_num_batched_tokens)
        if source == "prefill":
            return prompts.first_token(context + num_new, 0).time_us
        step_us = prompts.step(num_new, context, 0).step_us["total"]
        if source == "gpu":
            return step_us
        return step_us + load_costs(prompts.costs)["host"].load_us(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--context", type=positive_list, default=[32768, 131072, 524288], metavar="S,...", help="conversation's tokens")
    add("--turn-len", type=positive, default=64, metavar="N", help="new tokens of a turn")
    add("--decodes", type=positive, default=16, metavar="N", help="requests that decode meanwhile")
    add("--decode-context", type=positive, default=8192, metavar="S", help="cached tokens of each decode")
    add("--decode-len", type=positive, default=4096, metavar="N", help="new tokens of each decode")
    add("--repeats", type=positive, default=2, metavar="N", help="loads of each conversation; the fastest counts")
    add("--time-limit", type=float, metavar="SECONDS", help="time after which no measurement starts")
    args = parser.parse_args()
    config = model_config(args, max(args.context) + args.turn_len + NUM_NEW + args.decode_context + args.decode_len)
    block = block_sizes(args, config)
    longest = -(-(max(args.context) + args.turn_len + NUM_NEW) // block.block_tokens)
    decoded = args.decodes * (1 - -(args.decode_context + args.decode_len) // block.block_tokens)
    num_blocks = longest + decoded + 2
    rows = list[Row]()
    with new_llm(args, config, num_blocks * block.bytes_per_block) as llm:
        scale = Scale(args, read_model(config), published_model(args))
        limit = TimeLimit(args.time_limit, llm.engine.model.device)
        for row in measure(args, llm, scale, limit):
            rows.append({**engine_fields(args, llm), **row})
            print_row(llm, row, *row)
            write_rows(args, llm, rows)  # a run that is cut off keeps the rows before


def measure(args: argparse.Namespace, llm: LLM, scale: Scale, limit: TimeLimit) -> Iterator[Row]:
    """Yield the rows of all conversations, the shortest first."""
    has_tiers = args.kv_offloading_size is not None
    warm_up = Conversation(llm, min(*args.context, 2 * args.max_num_batched_tokens) - 1, args.turn_len)
    for _ in range(2):
        warm_up.serve("warm-up")
        warm_up.evict()
    for length in sorted(args.context):
        if limit.is_over():
            return
        talk = Conversation(llm, length, args.turn_len)
        sources = {"prefill": 1, "gpu": args.repeats, "host": args.repeats if has_tiers else 0}
        for source, num_repeats in sources.items():
            served = list[Served]()
            for _ in range(num_repeats):
                if source == "host":
                    talk.evict()
                served.append(talk.serve())
            if served:
                fastest = min(served, key=lambda turn: time_to_first_token(turn.request))
                yield turn_row(args, fastest, source, length, scale)
        if limit.is_over():
            return
        for source in ("host", "prefill")[not has_tiers :]:
            if source == "host":
                talk.evict()
            decodes, alone = talk.start_decodes(args.decodes, args.decode_context, args.decode_len)
            turn = talk.serve("" if source == "host" else f"prefilled beside decodes, {length}", decodes)
            yield {**turn_row(args, turn, source, length), "decodes": args.decodes, **gap_fields(turn.gaps)}
            yield {"source": "none", "context": args.decode_context, "decodes": args.decodes, **gap_fields(alone)}
            talk.end(decodes)


def turn_row(args: argparse.Namespace, turn: Served, source: str, length: int, scale: Scale | None = None) -> Row:
    """Return the fields of a row on a turn."""
    seconds = time_to_first_token(turn.request)
    row: dict[str, Any] = {
        "source": source,
        "context": length,
        "turn_len": args.turn_len,
        "decodes": 0,
        "num_cached_tokens": turn.request.num_cached_tokens,
        "time_to_first_token_mean": seconds,
    }
    if scale is not None:
        row["scaled_time_to_first_token"] = round(scale(seconds, source, length, args.turn_len), 6)
    return row


def time_to_first_token(request: Request) -> float:
    """Return the seconds from a request's arrival to its first token."""
    seconds = request.metrics()["time_to_first_token"]
    assert seconds is not None
    return seconds


def gap_fields(gaps: Sequence[float]) -> Row:
    """Return the fields of a row on the seconds between two tokens of a request."""
    if not gaps:
        return {}
    return {f"inter_token_{name}": value for name, value in {**summarize(gaps), "max": round(max(gaps), 6)}.items()}


if __name__ == "__main__":
    main()
