"""The runner of all benchmarks: options, time limit, cases that do not fit, memory on all ranks, printing, files."""

import argparse
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from dcpmla.bench.ceilings import Ceilings, floor_fields
from dcpmla.bench.options import add_options
from dcpmla.bench.plots import check_outputs, grouped
from dcpmla.bench.results import Row, add_commit_argument, dtype_name, write_results
from dcpmla.bench.timing import Operation, TimeLimit, Timing, calls_over, time_operation, time_with_result
from dcpmla.bench.words import comparisons, fields_of, name_of, named, results_of
from dcpmla.cli.options import add_host_arguments, add_job_arguments, add_rank_arguments, join, seconds, start
from dcpmla.job.bootstrap import Ranks, agree
from dcpmla.job.faults import is_out_of_memory
from dcpmla.job.join import LOAD_TIMEOUT, Job
from dcpmla.job.launch_info import LaunchInfo

_TIMEOUTS = 5  # limit of one case in multiples of --timeout, compilation of its kernels included
_TIME_LIMIT = 450  # seconds

Case = TypeVar("Case")
Inputs = TypeVar("Inputs")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Work:
    """Computation of a case, the same for all its kernels.

    Attributes:
        num_sets: Sets of inputs; call i takes set i % num_sets.
        errors: Function of a call's result and its index to the fields of a row on its errors.
        flops, num_bytes: Operations, and bytes that must move, of one call; 0 where they are not counted.
        fields: Further fields of each row.
    """

    num_sets: int
    errors: Callable[[Any, int], Row]
    flops: float = 0.0
    num_bytes: float = 0.0
    in_fp8: bool = False
    fields: Row = field(default_factory=dict)

    def rates(self, time_us: float, ceilings: Ceilings | None) -> Row:
        """Return the fields of a row on a kernel's speed."""
        rates: Row = {"tflops": round(self.flops / time_us / 1e6, 3)} if self.flops else {}
        if self.num_bytes:
            rates["gb_per_s"] = round(self.num_bytes / time_us / 1e3, 3)
        if self.num_bytes and ceilings is not None:
            floor_us = ceilings.floor_us(self.num_bytes, self.flops, in_fp8=self.in_fp8)
            rates |= floor_fields(floor_us, time_us)
        return rates


class Kept:
    """The last value made: neighboring cases share their inputs, and the old ones are freed before new ones are
    made.
    """

    def __init__(self) -> None:
        self._last: tuple[Hashable, Any] | None = None

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value made for a key, if it is the last one's; else make it."""
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, make()
        return self._last[1]


class Benchmark(Generic[Case, Inputs]):
    """A benchmark, defined in a file of its own; `run` takes it through its cases.

    Attributes:
        ranks_of: Number of ranks that may measure: "one", "tp" (the value of -tp, 1 by default) or "any" (likewise,
            or as many as a launcher has started).
        has_engine: Whether it runs a model: it then adds `generate`'s options itself, and has no default time limit.
        plot_help: Description of the plot; "" where there is no plot.
        options: Options of its own, as `add_options` takes them.
        series: Fields that name a row, as a line of a plot and in the summary.
        sample_seconds: Limit for the samples of one operation.
        args, job, device: Options, job that measures, this rank's device.
        dtype: Dtype of tensors that are not quantized: bfloat16 on GPUs, float32 on CPUs.
        kept: Inputs that neighboring cases share.
        ceilings: Peak rates of the device, None where no floor is measured.
    """

    ranks_of: ClassVar[str] = "any"
    has_engine: ClassVar[bool] = False
    plot_help: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    series: ClassVar[tuple[str, ...]] = ()
    sample_seconds: ClassVar[float] = math.inf
    ceilings: Ceilings | None = None

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self.args, self.job = args, job
        self.device = job.ranks.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.kept = Kept()
        self._baselines: dict[Hashable, float] = {}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the benchmark's own options."""
        add_options(parser, cls.options)

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        """Raise ValueError for options that contradict each other, or that these ranks cannot measure."""

    def cases(self) -> Iterable[Case]:
        """Yield the cases in order, the same on all ranks."""
        raise NotImplementedError

    def inputs(self, case: Case) -> Inputs:
        """Allocate and return a case's inputs, which are None with an engine; all ranks skip the case after a
        ValueError or without memory.
        """
        raise NotImplementedError

    def measure(self, case: Case, inputs: Inputs) -> list[Row]:
        """Return the rows of a case. Collective over the job."""
        raise NotImplementedError

    def product(self, *options: str) -> Iterator[tuple[Any, ...]]:
        """Yield the combinations of what options list; the last option's items vary fastest."""
        yield from product(*(getattr(self.args, name) for name in options))

    def time(self, operation: Operation, num_sets: int | None = None) -> Timing:
        """Time an operation that rotates through sets of inputs, by default one for each call. Collective."""
        calls = None if num_sets is None else calls_over(num_sets, self.device)
        return time_operation(operation, self.device, calls, self.sample_seconds)

    def kernel_row(self, case: Row, name: str, run: Callable[[int], Any], work: Work) -> Row:
        """Time a kernel ("": without a name), and return its row with the errors of the last timed call. Collective."""
        calls = calls_over(work.num_sets, self.device)
        timing, result = time_with_result(run, self.device, calls, self.sample_seconds)
        fields = {**({"kernel": name} if name else {}), "num_sets": work.num_sets, **work.fields}
        rates = work.rates(timing.median_us, self.ceilings)
        return self.row(case, timing, {**fields, **rates, **work.errors(result, calls - 1)})

    def speedup_over(self, name: str, load: Hashable, time_us: float, is_baseline: bool) -> Row:
        """Return the field of a row that compares a time with the baseline's of the same load, if that was measured
        before; keep the time of a baseline.
        """
        if is_baseline:
            self._baselines[load] = time_us
        elif load in self._baselines:
            return {f"speedup_over_{name}": round(self._baselines[load] / time_us, 3)}
        return {}

    def row(self, case: Row, timing: Timing, fields: Mapping[str, Any], digits: int = 2) -> Row:
        """Return a row: the fields of a case, a time in microseconds with so many digits, and further fields."""
        return {**case, "dtype": dtype_name(self.dtype), **timing.fields(digits), **fields}

    @staticmethod
    def limits(row: Row) -> Mapping[str, float]:
        """Return the largest right values of a row's errors, by their fields."""
        return {}

    @classmethod
    def wrong(cls, row: Row) -> list[str]:
        """Return the fields of a row's errors that are not finite or beyond their limits."""
        limits = cls.limits(row)
        return [name for name in limits if row[name] is None or not row[name] <= limits[name]]

    def text(self, case: Case, rows: Sequence[Row]) -> str:
        """Return the text to print for a case's rows, wrong results marked."""
        known, lines = fields_of(case), []
        for row in rows:
            label = named((name for name in self.series if name not in known), row)
            wrong = ", ".join(f"{name} {row[name]}" for name in self.wrong(row))
            results = "  ".join(results_of(row, known))
            lines.append(f"{label}  {results}".strip() + (f"   WRONG: {wrong}" if wrong else ""))
        lines = lines or ["no kernel took this case"]
        return f"{name_of(case)}:" + ("\n    " if len(lines) > 1 else " ") + "\n    ".join(lines)

    def summary(self, rows: Sequence[Row]) -> Iterable[str]:
        """Yield the lines to print after the last case: of each series the wrong results, and the ratios."""
        for name, results in grouped(rows, partial(named, self.series)):
            num_wrong = sum(bool(self.wrong(row)) for row in results)
            checked = [f"{num_wrong} of {len(results)} wrong"] if self.limits(results[0]) else []
            if parts := [*checked, *comparisons([row for row in results if not self.wrong(row)])]:
                yield f"{name}: {', '.join(parts)}"

    def findings(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the file's fields besides its rows."""
        return {} if self.ceilings is None else {"ceilings": self.ceilings._asdict()}

    @classmethod
    def plot(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw one or more rows, which may come from a result file."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what outlives the cases."""


def add_arguments(kind: type[Benchmark[Any, Any]], parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark, and the common options; `args.run` measures."""
    parser.set_defaults(run=lambda args: run(kind, args))
    add = parser.add_argument
    kind.add_arguments(parser)
    if not kind.has_engine:
        add_job_arguments(parser)
        if kind.ranks_of == "tp":
            add_host_arguments(parser)
        elif kind.ranks_of == "any":
            add_rank_arguments(parser)
    limit = None if kind.has_engine else _TIME_LIMIT
    add("--time-limit", type=seconds, default=limit, metavar="S", help="seconds after which no further case begins")
    add("--json", type=Path, metavar="OUT.json", help="write the rows")
    if kind.plot_help:
        add("--plot", type=Path, metavar="OUT.png", help=f"draw {kind.plot_help}; needs the extra plot")
    add_commit_argument(parser)


def run(kind: type[Benchmark[Any, Any]], args: argparse.Namespace) -> int:
    """Measure every case, print and write the rows. Every rank calls it; the first one reports.

    Returns:
        Exit code: 1 if a result is wrong.
    """
    plot_path: Path | None = getattr(args, "plot", None)
    joined = join(args, partial(_check_ranks, args)) if kind.ranks_of == "one" else start(args)
    with joined as job, nullcontext() if kind.has_engine else torch.inference_mode():
        job.watchdog.enter("checking the options", LOAD_TIMEOUT)
        is_first = job.ranks.is_first
        with agree():
            kind.check(args, job.ranks)
            if is_first:
                check_outputs(args.json, plot_path, _inputs(kind, args))
        if is_first and not kind.has_engine:  # an engine says it itself
            print(f"ranks: {job.ranks.origin}", flush=True)
        rows: list[Row] = []
        with closing(kind(args, job)) as benchmark:
            for case, case_rows in _measure(benchmark):
                rows += case_rows
                if is_first:
                    print(benchmark.text(case, case_rows), flush=True)
            job.watchdog.enter("writing the results", LOAD_TIMEOUT)
            if is_first:
                for line in benchmark.summary(rows):
                    print(line, flush=True)
                if args.json:
                    findings = benchmark.findings(rows)
                    write_results(args.json, rows, job.ranks.num_ranks, job.ranks.device, args.commit, findings)
                if plot_path and rows:
                    benchmark.plot(plot_path, rows)
    return int(any(map(kind.wrong, rows)))


def _inputs(kind: type[Benchmark[Any, Any]], args: argparse.Namespace) -> list[Path]:
    """Return the directory or the config file of a model that is read: no result may overwrite it."""
    if kind.has_engine:
        from dcpmla.integrations.model_files import find_model

        return [find_model(args.model, args.revision)]
    return [Path(args.geometry)] if "geometry" in args else []


def _check_ranks(args: argparse.Namespace, info: LaunchInfo) -> None:
    if info.num_ranks != 1:
        started = f"{info.num_ranks} ranks were started"
        raise ValueError(f"bench {args.benchmark} measures one device, but {started}; start one")


def _measure(benchmark: Benchmark[Case, Any]) -> Iterator[tuple[Case, list[Row]]]:
    """Yield one case after the other with its rows until time is over; skip cases that do not fit, with a line."""
    args, ranks, watchdog = benchmark.args, benchmark.job.ranks, benchmark.job.watchdog
    limit = TimeLimit(args.time_limit, ranks.device)
    for case in benchmark.cases():
        if limit.is_over():
            if ranks.is_first:
                print(f"time is over (--time-limit): {name_of(case)} and what follows is left out", flush=True)
            return
        watchdog.enter(name_of(case), LOAD_TIMEOUT if benchmark.has_engine else _TIMEOUTS * args.timeout)
        try:
            yield case, _rows(benchmark, case)
        except ValueError as error:
            if benchmark.has_engine:  # each of its cases must fit: this is a mistake
                raise
            if ranks.is_first:
                print(f"skipped: {name_of(case)}: {error}", flush=True)
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(benchmark: Benchmark[Case, Any], case: Case) -> list[Row]:
    """Return the rows of a case, and free its inputs."""
    if benchmark.has_engine:  # an engine reports its faults without another collective
        return benchmark.measure(case, None)
    with memory_on_all():
        inputs = benchmark.inputs(case)
    with memory_on_all():
        return benchmark.measure(case, inputs)


@contextmanager
def memory_on_all() -> Iterator[None]:
    """Raise ValueError on every rank if some rank finds no memory for the block. Collective."""
    with agree():
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(str(error).partition("\n")[0] or "out of memory") from error
