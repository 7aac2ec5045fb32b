"""Say what this machine can do, and prove it: versions, devices, kernels; self-tests of attention and exchange, the
exchange's latency.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcpmla.bench.geometries import GEOMETRIES
from dcpmla.cli.machine_facts import RankFacts, find_facts
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, join
from dcpmla.cli.output import check_writable, write_json
from dcpmla.cli.self_tests import (
    SelfTest,
    attention_self_tests,
    exchange_errors,
    exchange_heads,
    exchange_timing,
    judge,
)
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig, MLAConfig
from dcpmla.job.bootstrap import agree
from dcpmla.parallel.mesh import init_mesh

_NUM_TOKENS = (1, 32, 256)
_TIMEOUTS = 5  # that one test may take, kernels' compilation in it
_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add_job_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write what was found")


def run(args: argparse.Namespace) -> int:
    """Examine all ranks of the job; the first one reports.

    Returns the exit code: 1 where a self-test failed, on every rank.
    """
    with join(args) as job, torch.inference_mode():
        with agree():
            if job.ranks.is_first:
                check_writable("--json", args.json)
        examination = _Examination(job, _TIMEOUTS * args.timeout)
        examination.find_facts()
        examination.test_attention()
        examination.test_exchanges()
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if job.ranks.is_first and args.json:
            write_json(args.json, examination.as_json())
        return examination.conclude()


class _Examination:
    """What was found so far.

    Every method is collective; the first rank prints as it goes, so that a fault shows how far it came.
    """

    def __init__(self, job: Job, limit: float) -> None:
        self._job, self._limit = job, limit
        self._device = job.ranks.device
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._group = init_mesh(job.ranks.num_ranks, job.ranks.num_ranks).dcp_group
        self._config = MLAConfig.from_hf(GEOMETRIES["deepseek-v3"]())
        self._facts: list[RankFacts] = []
        self._tests: list[dict[str, Any]] = []
        self._exchanges: dict[str, str] = {}
        self._latencies: list[dict[str, Any]] = []

    def find_facts(self) -> None:
        self._say(f"ranks: {self._job.ranks.origin}")
        self._job.watchdog.enter("looking at the machine", self._limit)
        self._facts = _gather(find_facts(self._job.ranks, self._config, self._dtype))
        first = self._facts[0]
        self._say(f"versions: {_join(first.versions)}")
        for facts in self._facts:
            self._say(_describe(facts))
            differing = {
                name: version for name, version in facts.versions.items() if version != first.versions.get(name)
            }
            if differing:
                self._say(f"rank {facts.rank} has other versions than rank 0: {_join(differing)}")
        for facts in self._facts:
            if facts.peers and len(facts.peers) > 1:
                self._say("\n".join([f"GPU to GPU on {facts.host}:", *_table(facts.peers)]))

    def test_attention(self) -> None:
        self._job.watchdog.enter("self-tests of attention", self._limit)
        self._record(attention_self_tests(self._config, self._device, self._dtype))

    def test_exchanges(self) -> None:
        """Each backend once, under the name that it has itself: "auto" and one rank's take one of the others."""
        exchanges: dict[str, Exchange] = {}
        num_ranks = self._job.ranks.num_ranks
        dcp = DCPConfig(tensor_parallel_size=num_ranks, decode_context_parallel_size=num_ranks)
        for backend in DCP_COMM_BACKENDS:
            try:
                selection = select_exchange(replace(dcp, dcp_comm_backend=backend), self._group, self._device)
            except ValueError as obstacle:
                self._say(f"exchange {backend}: not here: {obstacle}")
                continue
            exchanges[selection.exchange.name] = selection.exchange
            self._exchanges[backend] = selection.exchange.name
            if backend == "auto":
                self._say(f"exchange: {selection.exchange.name} ({selection.reason})")
        for name, exchange in exchanges.items() if self._job.ranks.num_ranks > 1 else ():
            self._job.watchdog.enter(f"self-test of the exchange {name}", self._limit)
            errors = exchange_errors(exchange, self._group, self._config, self._device, self._dtype)
            self._record([judge(f"exchange {name}", errors, self._dtype)])
            self._time(name, exchange)

    def conclude(self) -> int:
        """The last line, and the exit code."""
        failed = [test["name"] for test in self._tests if test["failures"]]
        self._say(
            f"FAILED: {', '.join(failed)}"
            if failed
            else f"all well: {len(self._tests)} self-tests passed on every rank"
        )
        return 1 if failed else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not any(test["failures"] for test in self._tests),
            "dtype": str(self._dtype).removeprefix("torch."),
            "ranks": [asdict(facts) for facts in self._facts],
            "self_tests": self._tests,
            "exchanges": self._exchanges,
            "latencies": self._latencies,
        }

    def _record(self, mine: list[SelfTest]) -> None:
        """Bring the ranks' outcomes of the same tests together."""
        for outcomes in zip(*_gather(mine), strict=True):
            failures = [f"rank {rank}: {outcome.failure}" for rank, outcome in enumerate(outcomes) if outcome.failure]
            errors = [outcome.largest_error for outcome in outcomes if outcome.largest_error is not None]
            largest = max(errors) if len(errors) == len(outcomes) else None
            self._tests.append({"name": outcomes[0].name, "largest_error": largest, "failures": failures})
            result = "FAILED: " + "; ".join(failures) if failures else f"ok, largest error {largest:.1e}"
            self._say(f"self-test of {outcomes[0].name}: {result}")

    def _time(self, name: str, exchange: Exchange) -> None:
        num_heads, words = exchange_heads(self._config, self._job.ranks.num_ranks, self._device), []
        for num_tokens in _NUM_TOKENS:
            self._job.watchdog.enter(f"timing the exchange {name}, {num_tokens} tokens", self._limit)
            timing = exchange_timing(exchange, self._group, self._config, num_tokens, self._device, self._dtype)
            row = {"backend": name, "num_tokens": num_tokens, "num_heads": num_heads}
            self._latencies.append({**row, "in_graph": timing.in_graph, "median_us": round(timing.median_us, 1)})
            words.append(f"{num_tokens} {'token' if num_tokens == 1 else 'tokens'} {timing.median_us:,.0f} us")
        self._say(f"latency of {name}, gather_heads and combine of {num_heads} heads: {', '.join(words)}")

    def _say(self, words: str) -> None:
        if self._job.ranks.is_first:
            print(words, flush=True)


def _gather(mine: _T) -> list[_T]:
    """Of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _join(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _describe(facts: RankFacts) -> str:
    words = [f"{facts.device} of {facts.host}, {facts.name}, {facts.memory_bytes / 2**30:.0f} GiB"]
    if facts.compute_capability:
        words.append(f"compute capability {facts.compute_capability}, {facts.multiprocessors} multiprocessors")
    if facts.num_nvlinks is not None:
        words.append(f"{facts.num_nvlinks} NVLinks")
    memory = f"symmetric memory {facts.symmetric_memory}" if facts.symmetric_memory else "no symmetric memory"
    return f"rank {facts.rank}: {', '.join(words)}; kernels: decode {facts.decode}, prefill {facts.prefill}; {memory}"


def _table(peers: Sequence[Sequence[str]]) -> list[str]:
    lines = [["", *map(str, range(len(peers)))], *([str(index), *row] for index, row in enumerate(peers))]
    width = max(len(cell) for line in lines for cell in line)
    return ["  " + "  ".join(cell.rjust(width) for cell in line) for line in lines]
