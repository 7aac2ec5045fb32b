"""Measure how many coding agents a server with OpenAI's API serves: sessions in closed loop, for more and more agents.

Usage: `python benchmarks/agents.py URL --label "ours, DCP 2" --num-gpus 2 --ttft-bound 4 --json agents.json`

A lane for each agent holds a session: a long first prompt, then turns that add tokens to the context and to which the
server answers, each a pause after the answer before. First sessions begin in their middle, and what was before is
brought into the cache first. The sweep ends some levels past the knee, the highest number of agents up to which the
90th percentile of times to first tokens is within the bound. `--rows` merges files of several runs into one and draws.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from urllib.request import Request, urlopen

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from benchmarks.agent_sessions import (  # noqa: E402
    ChatForm,
    Form,
    TokenForm,
    Turn,
    add_arguments,
    body,
    draw_session,
    num_fitting,
    read_trace,
    subagent_parts,
    traced_parts,
)
from benchmarks.http_load import Answer, describe_lost, read_answer  # noqa: E402
from benchmarks.load import summarize  # noqa: E402
from dcpmla.bench.plots import Panel, check_outputs, draw_panels  # noqa: E402
from dcpmla.bench.results import Row, add_commit_argument, write_results, write_rows  # noqa: E402
from dcpmla.cli.options import positive, positive_list  # noqa: E402

_LEVELS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16]
# What a server counts, under this package's name and under vLLM's.
_METRICS = {
    "prompt": ("dcpmla_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "cached": ("dcpmla_cached_prompt_tokens_total", "vllm:prefix_cache_hits_total"),
    "preempted": ("dcpmla_preemptions_total", "vllm:num_preemptions_total"),
    "from_host": ("vllm:external_prefix_cache_hits_total",),
    "loaded": ('dcpmla_kv_offload_blocks_total{direction="load",tier="host"}',),
}


_BLOCK_TOKENS = re.compile(r'dcpmla_cache_info{block_tokens="(\d+)"')
Counts = dict[str, float]  # values of /metrics by name and labels


class Agents:
    """Agents that work at the same time, and the answers that they get.

    Args:
        level: Number of agents; each number has tokens of its own.
    """

    def __init__(self, args: argparse.Namespace, form: Form, level: int) -> None:
        self._args, self._form, self.level = args, form, level
        self.answers: list[Answer] = []
        self._started = time.perf_counter()
        self._serials = count()

    @property
    def now(self) -> float:
        """Return seconds after the load's beginning."""
        return time.perf_counter() - self._started

    async def ask(self, pieces: Sequence[str], num_new: int, counts: bool = True) -> Answer:
        """Return the answer to a context; it is an agent's if it counts."""
        answer = Answer(self.now)
        if counts:
            self.answers.append(answer)
        content = body(self._form, pieces, num_new, self._args.model)
        await read_answer(answer, self._args.url + self._form.route, self._args.api_key, content, self._started)
        if not answer.error and answer.num_tokens != num_new:
            answer.error = f"{answer.num_tokens} of {num_new} tokens"
        return answer

    async def run_lane(self, turns: Sequence[Turn], at: int, pieces: list[str], num_tokens: int, key: str) -> None:
        """Go on with a session, and then with others, without end."""
        await self.run_turns(turns, at, pieces, num_tokens, key)
        while True:
            index = self.level + next(self._serials)
            await self.run_turns(draw_session(self._args, index), 0, [], 0, self._key(index))

    async def run_sessions(self, num_sessions: int) -> None:
        """Run whole sessions, each by the agent that is free first."""

        async def lane() -> None:
            while (index := next(self._serials)) < num_sessions:
                await self.run_turns(draw_session(self._args, index), 0, [], 0, self._key(index))

        await asyncio.gather(*(lane() for _ in range(self.level)))

    def begun(self, lane: int) -> tuple[list[Turn], int, list[str], int, str]:
        """Return a session in its middle: turns, the number of those that were, and the context after them."""
        turns, key = draw_session(self._args, lane), self._key(lane)
        chooser = random.Random(f"{key} begun")
        at = int(num_fitting(turns, self._args.max_context) * chooser.uniform(0.25, 0.75))
        pieces = list[str]()
        for turn in turns[:at]:
            pieces += [self._form.new((chooser, turn.num_new)), self._form.made_answer((chooser, turn.num_answer))]
        return turns, at, pieces, sum(turn.num_new + turn.num_answer for turn in turns[:at]), key

    async def run_turns(
        self,
        turns: Sequence[Turn],
        at: int,
        pieces: list[str],
        num_tokens: int,
        key: str,
        first: str | None = None,
    ) -> None:
        """Run a session's turns from number `at` on, until they end, the context is full or an answer is lost.

        Args:
            pieces, num_tokens: Context so far, and its tokens.
            first: First prompt of a subagent; None for one of the session's own.
        """
        for number in range(at, len(turns)):
            turn = turns[number]
            await asyncio.sleep(turn.think)
            await asyncio.gather(
                *(
                    self.run_turns(each, 0, [], 0, f"{key} {number} {index}", self._first(key, number, index, each))
                    for index, each in enumerate(turn.subagents)
                )
            )
            if num_tokens + turn.num_new + turn.num_answer > self._args.max_context:
                return
            own = self._form.new((random.Random(f"{key} turn {number}"), turn.num_new))
            pieces.append(first if first is not None and number == 0 else own)
            answer = await self.ask(pieces, turn.num_answer)
            if answer.error:
                return
            pieces.append(self._form.answer(answer))
            num_tokens = answer.num_prompt_tokens + answer.num_tokens

    async def run_trace(self) -> None:
        """Send the requests of the trace at their times."""
        args = self._args
        traced = read_trace(args.trace, args.trace_block, args.time_scale, args.max_context)[: args.num_requests]
        contents = [self._form.new(*traced_parts(each, args.trace_block, args.seed)) for each in traced]
        self._started = time.perf_counter()

        async def ask_at(due: float, content: str, num_answer: int) -> None:
            await asyncio.sleep(due - self.now)
            await self.ask([content], num_answer)

        asking = zip(traced, contents, strict=True)
        await asyncio.gather(*(ask_at(each.due, content, each.num_answer) for each, content in asking))

    def _key(self, index: int) -> str:
        return f"{self._args.seed} {self.level} {index}"

    def _first(self, key: str, number: int, index: int, turns: Sequence[Turn]) -> str:
        return self._form.new(*subagent_parts(f"{key} {number}", index, turns[0].num_new))


async def measure(args: argparse.Namespace, form: Form, level: int) -> Row:
    """Return the row of a number of agents."""
    agents, settle = Agents(args, form, level), 0.0
    if args.trace is not None or args.num_sessions is not None:
        before = await read_metrics(args)
        await (agents.run_trace() if args.trace is not None else agents.run_sessions(args.num_sessions))
        end = max((answer.finish_time for answer in agents.answers), default=0.0)
    else:
        lanes, settle = [agents.begun(lane) for lane in range(level)], args.settle
        await asyncio.gather(*(agents.ask(pieces, 1, counts=False) for _, at, pieces, _, _ in lanes if at))
        agents._started = time.perf_counter()
        tasks = [asyncio.create_task(agents.run_lane(*lane)) for lane in lanes]
        await asyncio.sleep(settle)
        before = await read_metrics(args)
        await asyncio.sleep(args.seconds)
        end = agents.now
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended
    if lost := describe_lost(agents.answers):
        print(lost, file=sys.stderr)
    after = await read_metrics(args)
    return {
        "label": args.label,
        "load": "agents" if args.trace is None else "trace",
        "concurrency": level,
        "num_gpus": args.num_gpus,
        **served(agents.answers, settle, end, args.num_gpus),
        **hit_rates(before, after),
    }


def served(answers: Sequence[Answer], start: float, end: float, num_gpus: int) -> Row:
    """Return what was served from start to end. Tokens of a prompt count when its first token comes, as InferenceX
    counts them. A request that still waits at the end has waited at least so long, which counts if most waited less.
    """
    begun = [each for each in answers if each.first_token_time is not None and start <= each.first_token_time <= end]
    ended = [each for each in begun if each.finish_time and each.finish_time <= end and not each.error]
    first = [(each.first_token_time or 0.0) - each.arrival_time for each in begun]
    waiting = [end - each.arrival_time for each in answers if each.first_token_time is None and not each.error]
    usual = summarize(first)["p90"] or 0.0
    first += [seconds for seconds in waiting if seconds > usual]
    per_token = [
        (each.finish_time - (each.first_token_time or 0.0)) / (each.num_tokens - 1)
        for each in ended
        if each.num_tokens > 1
    ]
    times = [at for each in answers for at in each.token_times]
    num_new, num_prompt = sum(start <= at <= end for at in times), sum(each.num_prompt_tokens for each in begun)
    seconds = max(end - start, 1e-9)
    return {
        "seconds": round(seconds, 3),
        "num_requests": len(ended),
        "num_waiting": len(waiting),
        "num_lost": sum(bool(each.error) for each in answers),
        "num_prompt_tokens": num_prompt,
        "num_new_tokens": num_new,
        "total_tokens_per_second_per_gpu": round((num_prompt + num_new) / seconds / num_gpus, 1),
        "output_tokens_per_second": round(num_new / seconds, 1),
        **{f"time_to_first_token_{name}": value for name, value in summarize(first).items()},
        **{f"time_per_token_{name}": value for name, value in summarize(per_token).items()},
    }


def hit_rates(before: Counts, after: Counts) -> Row:
    """Return the shares of prompt tokens that the GPUs and host memory had, and preemptions, from a server's counters:
    vLLM counts tokens that its host memory has apart, this package blocks that were copied back.
    """
    counted = {name: sum(after.get(key, 0.0) - before.get(key, 0.0) for key in keys) for name, keys in _METRICS.items()}
    sizes = (_BLOCK_TOKENS.match(key) for key in after)
    block_tokens = next((int(size[1]) for size in sizes if size), 0)
    num_prompt = max(1.0, counted["prompt"])
    from_host = min(counted["cached"], counted["loaded"] * block_tokens)
    return {
        "gpu_hit_rate": round((counted["cached"] - from_host) / num_prompt, 4),
        "host_hit_rate": round((from_host + counted["from_host"]) / num_prompt, 4),
        "num_preemptions": int(counted["preempted"]),
    }


async def read_metrics(args: argparse.Namespace) -> Counts:
    """Return a server's counters without timestamps; labels that vLLM adds to all its metrics are left out."""
    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}

    def read() -> str:
        with urlopen(Request(f"{args.url}/metrics", headers=headers)) as answer:
            return str(answer.read().decode())

    counts = Counts()
    for line in (await asyncio.to_thread(read)).splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name.partition("{")[0] if name.startswith("vllm:") else name
            counts[key] = counts.get(key, 0.0) + float(value)
    return counts


async def sweep(args: argparse.Namespace, form: Form) -> list[Row]:
    """Return the rows of numbers of agents, up to some past the knee."""
    rows, num_failed = list[Row](), 0
    for level in args.concurrency:
        row = await measure(args, form, level)
        slowest = row["time_to_first_token_p90"]
        row["ttft_bound"] = args.ttft_bound
        row["is_within_bound"] = slowest is not None and slowest <= args.ttft_bound and not row["num_lost"]
        rows.append(row)
        print(json.dumps(row), flush=True)
        num_failed += not row["is_within_bound"]
        if num_failed > args.past_knee:
            break
    return rows


def knees(rows: Sequence[Row]) -> dict[str, int]:
    """Return the highest number of agents up to which times are within the bound, by label; 0 for none."""
    found: dict[str, int] = {}
    for label in dict.fromkeys(row["label"] for row in rows):
        found[label] = 0
        for row in sorted((row for row in rows if row["label"] == label), key=lambda row: int(row["concurrency"])):
            if not row["is_within_bound"]:
                break
            found[label] = row["concurrency"]
    return found


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw times to first tokens and tokens a second over numbers of agents, a line for each label."""
    panel = partial(Panel, rows=rows, x=lambda row: row["concurrency"])
    panels = [
        panel("first tokens", y=lambda row: row["time_to_first_token_p90"] or 0.0, names=("agents", "TTFT p90, s")),
        panel("tokens", y=lambda row: row["total_tokens_per_second_per_gpu"], names=("agents", "tokens/s a GPU")),
    ]
    draw_panels(path, "Coding agents", panels, lambda row: str(row["label"]))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help="address of the server, without /v1")
    add("--rows", type=Path, nargs="+", default=[], metavar="IN.json", help="merge result files in place of a server")
    add("--label", default="", help="name of the line of this server in the figure")
    add("--model", metavar="NAME", help="name of the model for the server")
    add("--api-key", metavar="KEY", help="key of the server")
    add("--num-gpus", type=positive, default=1, metavar="N", help="GPUs of the server")
    add("--vocab-size", type=positive, default=100_000, metavar="N", help="token ids of prompts are below it")
    add("--chat", action="store_true", help="send messages of words in place of token ids")
    add("--concurrency", type=positive_list, default=_LEVELS, metavar="N,N", help="numbers of agents, ascending")
    add("--ttft-bound", type=float, default=10.0, metavar="S", help="bound of the 90th percentile of first tokens")
    add("--past-knee", type=int, default=1, metavar="N", help="numbers of agents past the bound that are measured, too")
    add("--seconds", type=float, default=60.0, metavar="S", help="duration of each number of agents")
    add("--settle", type=float, default=5.0, metavar="S", help="seconds before, which do not count")
    add("--num-sessions", type=positive, metavar="N", help="run so many whole sessions in place of --seconds")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="send the requests of this file in Mooncake's format",
    )
    add("--trace-block", type=positive, default=512, metavar="N", help="tokens of its blocks in place of 512")
    add("--time-scale", type=float, default=1.0, metavar="X", help="factor of its times")
    add("--num-requests", type=positive, metavar="N", help="first requests of it; default: all")
    add("--json", type=Path, metavar="OUT.json", help="result file to write")
    add("--plot", type=Path, metavar="OUT.png", help="figure to draw; needs the extra plot")
    add_arguments(parser)
    add_commit_argument(parser)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line, or other words."""
    parser = make_parser()
    args = parser.parse_args(words)
    if (args.url is None) == (not args.rows):
        parser.error("give either the URL of a server or --rows")
    try:
        check_outputs(args.json, args.plot, args.rows)
    except ValueError as error:
        parser.error(str(error))
    merged = [json.loads(path.read_text()) for path in args.rows]
    if args.url is None:
        rows = [row for each in merged for row in each["rows"]]
    else:
        args.url = args.url.rstrip("/")
        args.concurrency = args.concurrency if args.trace is None else args.concurrency[:1]
        rows = asyncio.run(sweep(args, ChatForm() if args.chat else TokenForm(args.vocab_size)))
    found = {"knee": knees(rows)}
    print(json.dumps(found))
    if args.json is not None and merged:
        first = merged[0]
        write_rows(args.json, rows, first["machine"], first["versions"], first["commit"], found)
    elif args.json is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_results(args.json, rows, args.num_gpus, device, args.commit, found)
    if args.plot is not None:
        draw(args.plot, rows)


if __name__ == "__main__":
    main()
