"""Simulate the load of agents.py: the engine's scheduler and cache as they are, steps by the planner's model of times.

Usage: `python benchmarks/simulated_agents.py CONFIG -tp 8 -dcp 1,8 --first 20000 --growth 1664 --json OUT.json`

It needs no GPU. It shows what the order of prompts, the size of the cache and the sharing of steps make of a load, not
how fast kernels are. `--in-order` serves prompts as they arrive, for a comparison.
"""

import argparse
import heapq
import json
import math
import sys
from array import array
from collections.abc import Generator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from benchmarks.agent_sessions import Turn, add_arguments, draw_session, num_fitting, subagent_parts  # noqa: E402
from benchmarks.agents import draw, knees, served  # noqa: E402
from benchmarks.http_load import Answer  # noqa: E402
from dcpmla.bench.results import Row, add_commit_argument, write_results  # noqa: E402
from dcpmla.cache.blocks import BlockAllocator  # noqa: E402
from dcpmla.cli.options import positive, positive_list  # noqa: E402
from dcpmla.cli.plan import load_machine, load_model_size  # noqa: E402
from dcpmla.planning.deployment import Deployment  # noqa: E402
from dcpmla.planning.prefill import PrefillCosts  # noqa: E402
from dcpmla.planning.recommend import make_plan  # noqa: E402
from dcpmla.planning.setting import Setting  # noqa: E402
from dcpmla.runtime.batch import Batch  # noqa: E402
from dcpmla.runtime.request import Request  # noqa: E402
from dcpmla.runtime.sampling import SamplingParams  # noqa: E402
from dcpmla.runtime.scheduler import Scheduler  # noqa: E402
from dcpmla.runtime.waiting import Precedence  # noqa: E402

_CONTEXT_STEP = 16_384  # contexts are rounded up to it for the time of a step of decodes

Context = tuple["array[int]", list[bytes]]  # tokens, and the keys of their full blocks
Process = Generator[Any, Any, None]  # of an agent: it yields seconds, processes to wait for, or a request to answer


class Job:
    """One server: a scheduler, and the time of its steps."""

    def __init__(self, deployment: Deployment, args: argparse.Namespace) -> None:
        plan = make_plan(deployment, 1, 1)
        self.deployment, self.block_tokens = deployment, deployment.block().block_tokens
        num_tokens = min(args.kv_cache_tokens or plan.kv_tokens_total, plan.kv_tokens_total)
        if num_tokens < 2 * args.max_context:
            raise ValueError(
                f"--max-context is {args.max_context}, but the cache at -dcp {deployment.setting.dcp} has {num_tokens} "
                "tokens; it must hold two contexts"
            )
        self.costs = PrefillCosts(deployment, args.max_num_batched_tokens)
        allocator = BlockAllocator(num_tokens // self.block_tokens, self.block_tokens)
        self.scheduler = Scheduler(allocator, args.max_num_batched_tokens, args.max_num_seqs, costs=self.costs)
        self._decodes: dict[tuple[int, int], float] = {}

    def step_us(self, batch: Batch) -> float:
        """Return the microseconds of a step: its decodes, or the weights alone, and its pieces of prompts."""
        pieces = [(piece.num_tokens, piece.request.num_computed_tokens) for piece in batch.pieces]
        decodes = [context for num_tokens, context in pieces if num_tokens == 1]
        context = sum(decodes) // max(1, len(decodes))
        key = max(1, len(decodes)), -(-context // _CONTEXT_STEP) * _CONTEXT_STEP
        if key not in self._decodes:
            self._decodes[key] = self.deployment.step_us(*key)["total"]
        return self._decodes[key] + sum(self.costs.piece_us(*piece) for piece in pieces if piece[0] > 1)


class Agents:
    """Agents that work at the same time on a server, by a clock that jumps from step to step."""

    def __init__(self, job: Job, args: argparse.Namespace, level: int) -> None:
        self._job, self._args, self._level = job, args, level
        self.now, self.answers = 0.0, list[Answer]()
        self.num_prompt = self.num_cached = 0
        self._tokens, self._serials, self._sessions = count(), count(), count()
        self._due: list[tuple[float, int, Process, Any]] = []
        self._asked: dict[Request, tuple[Process, Answer | None]] = {}

    def run(self) -> Row:
        """Run the load; return its row."""
        lanes = [self._begun(lane) for lane in range(self._level)]
        for _, _, context, _ in lanes:
            if context[0]:
                self._due.append((0.0, next(self._serials), self._bring(context), None))
        self._work(until=math.inf)
        self.now = 0.0
        for turns, at, context, key in lanes:
            heapq.heappush(self._due, (0.0, next(self._serials), self._lane(turns, at, context, key), None))
        end = self._args.settle + self._args.seconds
        self._work(until=end)
        num_gpus = self._job.deployment.setting.num_ranks
        return {
            "concurrency": self._level,
            "num_gpus": num_gpus,
            **served(self.answers, self._args.settle, end, num_gpus),
            "gpu_hit_rate": round(self.num_cached / max(1, self.num_prompt), 4),
        }

    def _work(self, until: float) -> None:
        """Let time pass until nothing is left to do, or until a time."""
        scheduler = self._job.scheduler
        while self.now < until and (self._due or scheduler.running or scheduler.waiting):
            while self._due and self._due[0][0] <= self.now:
                _, _, process, value = heapq.heappop(self._due)
                self._resume(process, value)
            batch = scheduler.schedule(self.now, agreed_now=self.now)
            if batch.pieces:
                self.now += self._job.step_us(batch) / 1e6
                self._end(batch)
            elif self._due:
                self.now = max(self.now, self._due[0][0])
            else:
                assert not scheduler.waiting, "requests wait, and no step runs"

    def _end(self, batch: Batch) -> None:
        """Give the requests of a step their tokens."""
        scheduler = self._job.scheduler
        batch.advance()
        for request, *_ in batch.pieces:
            if request.num_computed_tokens == request.num_tokens:
                request.append(next(self._tokens), frozenset())
                process, answer = self._asked[request]
                if answer is not None:
                    answer.first_token_time = answer.first_token_time or self.now
                    answer.token_times.append(self.now)
                    answer.num_tokens = len(request.token_ids)
            scheduler.reuse.remember(request)
            if request.finish_reason:
                scheduler.remove(request)
                del self._asked[request]
                if answer is not None:
                    answer.finish_time = self.now
                tokens = request.tokens(0, request.num_tokens)
                keys = request.block_keys(0, request.num_tokens // self._job.block_tokens, self._job.block_tokens)
                heapq.heappush(self._due, (self.now, next(self._serials), process, (array("q", tokens), keys)))

    def _resume(self, process: Process, value: Any) -> None:
        """Run an agent until it waits again."""
        try:
            wanted = process.send(value)
        except StopIteration:
            return
        if isinstance(wanted, float):
            heapq.heappush(self._due, (self.now + wanted, next(self._serials), process, None))
        elif isinstance(wanted, Request):
            answer = None
            if wanted.request_id:
                answer = Answer(self.now)
                answer.num_prompt_tokens = len(wanted.prompt_token_ids)
                self.answers.append(answer)
            self._asked[wanted] = process, answer
            self._job.scheduler.reuse.add(wanted)
            self._job.scheduler.add(wanted)
        else:
            left = [len(wanted)]
            for each in wanted:
                self._resume(self._joined(each, process, left), None)

    def _joined(self, part: Process, whole: Process, left: list[int]) -> Process:
        """Run a process, and the one that waits for it and others once the last of them has ended."""
        yield from part
        left[0] -= 1
        if not left[0]:
            heapq.heappush(self._due, (self.now, next(self._serials), whole, None))

    def _request(self, context: Context, num_new: int, counts: bool = True) -> Request:
        """Return a request, whose name says whether its answer counts."""
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        return Request(context[0], params, int(counts), self.now, prompt_keys=list(context[1]))

    def _bring(self, context: Context) -> Process:
        """Bring a context into the cache."""
        yield self._request(context, 1, counts=False)

    def _begun(self, lane: int) -> tuple[list[Turn], int, Context, str]:
        """Return a session in its middle, as agents.py begins it."""
        turns, key = draw_session(self._args, lane), f"{self._args.seed} {self._level} {lane}"
        at = int(num_fitting(turns, self._args.max_context) * Random(f"{key} begun").uniform(0.25, 0.75))
        num_tokens = sum(turn.num_new + turn.num_answer for turn in turns[:at])
        return turns, at, (self._new(num_tokens), []), key

    def _new(self, num_tokens: int) -> "array[int]":
        """Return tokens that no other text has."""
        return array("q", (next(self._tokens) for _ in range(num_tokens)))

    def _lane(self, turns: Sequence[Turn], at: int, context: Context, key: str) -> Process:
        yield from self._turns(turns, at, context, key)
        while True:
            index = self._level + next(self._sessions)
            yield from self._turns(draw_session(self._args, index), 0, (array("q"), []), f"{key} {index}")

    def _turns(self, turns: Sequence[Turn], at: int, context: Context, key: str) -> Process:
        """Run a session's turns from number `at` on, until they end or the context is full."""
        for number in range(at, len(turns)):
            turn = turns[number]
            yield turn.think
            if turn.subagents:
                nums_shared = [subagent_parts(key, 0, each[0].num_new)[0][1] for each in turn.subagents]
                shared = self._new(max(nums_shared))
                each_shared = zip(turn.subagents, nums_shared, strict=True)
                yield [self._turns(each, 0, (shared[:num_shared], []), key) for each, num_shared in each_shared]
            num_new = turn.num_new - (0 if number else len(context[0]))  # a subagent begins with what others have, too
            if len(context[0]) + num_new + turn.num_answer > self._args.max_context:
                return
            request = self._request((context[0] + self._new(num_new), context[1]), turn.num_answer)
            context = yield request
            self.num_prompt += len(request.prompt_token_ids)
            self.num_cached += request.num_cached_tokens


def simulate(args: argparse.Namespace) -> list[Row]:
    """Return the rows of all sizes of DCP groups and numbers of agents."""
    model = load_model_size(args.config)
    machine, rows = load_machine(args.machine, model), list[Row]()
    for dcp in args.decode_context_parallel_size:
        setting = Setting(tp=args.tensor_parallel_size, dcp=dcp, kv_cache_dtype=args.kv_cache_dtype)
        num_failed = 0
        for level in args.concurrency:
            job = Job(Deployment(machine, model, setting), args)
            label = f"DCP {dcp}{', in order' if args.in_order else ''}"
            row = {"label": label, "load": "simulated agents", **Agents(job, args, level).run()}
            row["kv_tokens_total"] = job.scheduler.allocator.num_blocks * job.block_tokens
            slowest, row["ttft_bound"] = row["time_to_first_token_p90"], args.ttft_bound
            row["is_within_bound"] = slowest is not None and slowest <= args.ttft_bound
            rows.append(row)
            print(json.dumps(row), flush=True)
            num_failed += not row["is_within_bound"]
            if num_failed > args.past_knee:
                break
    return rows


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="directory or config.json of the model")
    add("--machine", default="h200x8", metavar="NAME_OR_JSON", help="machine, as of plan")
    add("-tp", "--tensor-parallel-size", type=positive, default=8, metavar="N", help="ranks")
    add("-dcp", "--decode-context-parallel-size", type=positive_list, default=[1, 8], metavar="D,D", help="DCP sizes")
    add("--kv-cache-dtype", default="bf16", metavar="F", help="format of the cache")
    add("--kv-cache-tokens", type=positive, metavar="N", help="most tokens of the cache; default: what fits")
    add("--max-num-batched-tokens", type=positive, default=8192, metavar="N", help="tokens of a step")
    add("--max-num-seqs", type=positive, default=128, metavar="N", help="requests that run at once")
    add("--in-order", action="store_true", help="serve prompts as they arrive, running ones first")
    add("--concurrency", type=positive_list, default=[1, 2, 3, 4, 5, 6, 8, 10, 12, 16], metavar="N,N", help="agents")
    add("--ttft-bound", type=float, default=10.0, metavar="S", help="bound of the 90th percentile of first tokens")
    add("--past-knee", type=int, default=1, metavar="N", help="numbers of agents past the bound that are run, too")
    add("--seconds", type=float, default=600.0, metavar="S", help="duration of each number of agents")
    add("--settle", type=float, default=60.0, metavar="S", help="seconds before, which do not count")
    add("--json", type=Path, metavar="OUT.json", help="result file to write")
    add("--plot", type=Path, metavar="OUT.png", help="figure to draw; needs the extra plot")
    add_arguments(parser)
    add_commit_argument(parser)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line, or other words."""
    args = make_parser().parse_args(words)
    if args.in_order:
        Precedence.arrange = lambda *_: 0  # type: ignore[method-assign]
        Precedence.lacks_little = lambda *_: False  # type: ignore[method-assign]
        Scheduler._lets_others_return = lambda *_: False  # type: ignore[method-assign]
    rows = simulate(args)
    found = {"knee": knees(rows)}
    print(json.dumps(found))
    if args.json is not None:
        write_results(args.json, rows, args.tensor_parallel_size, torch.device("cpu"), args.commit, found)
    if args.plot is not None:
        draw(args.plot, rows)


if __name__ == "__main__":
    main()
