"""Report the abilities of this machine, and prove them: versions, devices, kernels; self-tests of attention and
exchange, the exchange's latency.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dcpmla.bench.results import dtype_name
from dcpmla.cli.options import add_job_arguments, add_model, add_rank_arguments, start
from dcpmla.cli.output import align, check_writable, write_json
from dcpmla.cli.rank_facts import RankFacts, find_facts
from dcpmla.cli.self_tests import ExchangeTest, SelfTest, attention_self_tests, exchange_heads, judge
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig, MLAConfig
from dcpmla.extras import install, missing
from dcpmla.job.bootstrap import agree
from dcpmla.job.join import LOAD_TIMEOUT, Job
from dcpmla.parallel.collectives import gather_values
from dcpmla.parallel.mesh import init_mesh

# Attention of DeepSeek-V3, which is tested.
CONFIG = MLAConfig(
    hidden_size=7168,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    softmax_scale=192**-0.5,
)
_NUM_TOKENS = (1, 32, 256)
_TIMEOUTS = 5  # limit of one test in multiples of --timeout, compilation of its kernels included


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.set_defaults(run=run)
    add_job_arguments(parser)
    add_rank_arguments(parser)
    determinism = "also serve prompts in many ways with --deterministic, and compare their logits bit by bit"
    parser.add_argument("--determinism", action="store_true", help=determinism)
    model = "model of --determinism, a directory or a hub id; default: a small one of random weights"
    add_model(parser, model, is_required=False)
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write what was found")


def run(args: argparse.Namespace) -> int:
    """Examine all ranks of the job; the first one reports.

    Returns:
        The exit code: 1 where a self-test failed, on every rank.
    """
    with start(args) as job, torch.inference_mode():
        with agree():
            if args.model and not args.determinism:
                raise ValueError(f"--model is {args.model}; it goes with --determinism")
            if job.ranks.is_first:
                check_writable("--json", args.json)
        examination = _Examination(job, _TIMEOUTS * args.timeout)
        examination.find_facts()
        examination.test_attention()
        examination.test_exchanges()
        if args.determinism:
            examination.test_determinism(args.model)
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if job.ranks.is_first and args.json:
            write_json(args.json, examination.as_json())
        return examination.conclude()


class _Examination:
    """Everything that was found so far.

    Every method is collective; the first rank prints as it goes, so that a fault shows how far it came.
    """

    def __init__(self, job: Job, limit: float) -> None:
        self._job, self._limit = job, limit
        self._device = job.ranks.device
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._group = init_mesh(job.ranks.num_ranks, job.ranks.num_ranks).dcp_group
        self._facts: list[RankFacts] = []
        self._tests: list[dict[str, Any]] = []
        self._exchanges: dict[str, str] = {}
        self._latencies: list[dict[str, Any]] = []

    def find_facts(self) -> None:
        """Report every rank's device, and the connections between the GPUs of a host."""
        self._say(f"ranks: {self._job.ranks.origin}")
        self._job.watchdog.enter("looking at the machine", self._limit)
        facts_here = asdict(find_facts(self._job.ranks, CONFIG, self._dtype))
        self._facts = [RankFacts(**fields) for fields in gather_values(facts_here, None, "comparing machines")]
        first = self._facts[0]
        self._say(f"versions: {_join(first.versions)}")
        for extra in ("engine", "serve"):
            if packages := missing(extra):
                self._say(f"not installed: {', '.join(packages)}; with the extra {extra}: {install(extra)}")
        for facts in self._facts:
            self._say(facts.describe())
            own = {name: version for name, version in facts.versions.items() if version != first.versions.get(name)}
            if own:
                self._say(f"rank {facts.rank} has other versions than rank 0: {_join(own)}")
        for phase, obstacles in first.passed_over.items():
            self._say("\n".join(f"{phase} passes over {name}: {why}" for name, why in obstacles.items()))
        for facts in self._facts:
            if facts.peers and len(facts.peers) > 1:
                self._say("\n".join([f"GPU to GPU on {facts.host}:", *_table(facts.peers)]))

    def test_attention(self) -> None:
        """Test decode and prefill on every rank."""
        self._job.watchdog.enter("self-tests of attention", self._limit)
        self._record(attention_self_tests(CONFIG, self._device, self._dtype))

    def test_exchanges(self) -> None:
        """Test and time each backend once, under its own name: "auto" and the backend of one rank duplicate others."""
        exchanges: dict[str, Exchange] = {}
        num_ranks = self._job.ranks.num_ranks
        dcp = DCPConfig(tensor_parallel_size=num_ranks, decode_context_parallel_size=num_ranks)
        for backend in DCP_COMM_BACKENDS:
            try:
                chosen = select_exchange(replace(dcp, dcp_comm_backend=backend), self._group, self._device)
            except ValueError as obstacle:
                self._say(f"exchange {backend}: not here: {obstacle}")
                continue
            exchanges[chosen.exchange.name] = chosen.exchange
            self._exchanges[backend] = chosen.exchange.name
            if backend == "auto":
                self._say(f"exchange: {chosen.exchange.name} ({chosen.reason})")
        for name, exchange in exchanges.items() if num_ranks > 1 else ():
            self._job.watchdog.enter(f"self-test of the exchange {name}", self._limit)
            test = ExchangeTest(exchange, self._group, CONFIG, self._device, self._dtype)
            self._record([judge(f"exchange {name}", test.errors(), self._dtype)])
            self._time(name, test)

    def test_determinism(self, model: str | None) -> None:
        """Test that logits have the same bits in all ways and layouts.

        Raises:
            ValueError: The model does not exist, or does not support the mode.
        """
        from dcpmla.cli.determinism import bit_tests  # imports transformers, which takes seconds

        for test in bit_tests(self._job, model, self._dtype):
            self._record([test])

    def conclude(self) -> int:
        """Print the last line; return the exit code."""
        failed = [test["name"] for test in self._tests if test["failures"]]
        passed = f"all well: {len(self._tests)} self-tests passed on every rank"
        self._say(f"FAILED: {', '.join(failed)}" if failed else passed)
        return 1 if failed else 0

    def as_json(self) -> dict[str, Any]:
        """Return the contents of the --json file."""
        return {
            "ok": not any(test["failures"] for test in self._tests),
            "dtype": dtype_name(self._dtype),
            "ranks": [asdict(facts) for facts in self._facts],
            "self_tests": self._tests,
            "exchanges": self._exchanges,
            "latencies": self._latencies,
        }

    def _record(self, outcomes_here: list[SelfTest]) -> None:
        """Bring the ranks' outcomes of the same tests together."""
        everyone = gather_values([asdict(outcome) for outcome in outcomes_here], None, "comparing self-tests")
        for outcomes in zip(*([SelfTest(**fields) for fields in own] for own in everyone), strict=True):
            failures = [f"rank {rank}: {outcome.failure}" for rank, outcome in enumerate(outcomes) if outcome.failure]
            errors = [outcome.largest_error for outcome in outcomes if outcome.largest_error is not None]
            largest = max(errors) if len(errors) == len(outcomes) else None
            self._tests.append({"name": outcomes[0].name, "largest_error": largest, "failures": failures})
            if failures:
                result = "FAILED: " + "; ".join(failures)
            else:
                result = outcomes[0].passed or f"ok, largest error {largest:.1e}"
            self._say(f"self-test of {outcomes[0].name}: {result}")

    def _time(self, name: str, test: ExchangeTest) -> None:
        heads, words = exchange_heads(CONFIG, self._job.ranks.num_ranks, self._device), []
        for tokens in _NUM_TOKENS:
            self._job.watchdog.enter(f"timing the exchange {name}, {tokens} tokens", self._limit)
            timing = test.timing(tokens)
            row = {"exchange": name, "tokens": tokens, "heads": heads}
            self._latencies.append({**row, **timing.fields(1)})
            words.append(f"{tokens} {'token' if tokens == 1 else 'tokens'} {timing.median_us:,.0f} us")
        self._say(f"latency of {name}, gather_heads and combine of {heads} heads: {', '.join(words)}")

    def _say(self, words: str) -> None:
        if self._job.ranks.is_first and words:
            print(words, flush=True)


def _join(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _table(peers: Sequence[Sequence[str]]) -> list[str]:
    rows = [{"": str(index), **{str(other): cell for other, cell in enumerate(row)}} for index, row in enumerate(peers)]
    return [f"  {line}" for line in align(rows)]
