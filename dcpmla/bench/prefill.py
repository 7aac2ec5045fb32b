"""Measure prefill kernels on one device: a chunk of new tokens over itself (causal), and over a cached context, for
every backend.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends import PREFILL_BACKENDS, Backend
from dcpmla.attention.calls import PrefillCall, Segments, join_keys
from dcpmla.bench.plots import check_outputs, new_figure, save_figure
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.runner import measurement, memory_on_all, num_samples
from dcpmla.bench.timing import TimeLimit, time_operation
from dcpmla.cli.options import LOAD_TIMEOUT, add_job_arguments, join
from dcpmla.cli.values import positive, positive_list, seconds
from dcpmla.job.bootstrap import agree
from dcpmla.job.launcher import LaunchInfo

_DIMS = (128, 64, 128)  # nope, rope and value widths of a head: DeepSeek V2 and V3, Kimi-K2
_SCALE = (_DIMS[0] + _DIMS[1]) ** -0.5
_CACHE_BYTES = 1 << 27  # inputs rotate until so many bytes lie between two uses of the same ones: no GPU's L2 is larger
_SAMPLE_SECONDS = 1.0  # that the samples of one kernel may take
_CALLS = 4  # of a sample, at least, on a GPU
_CHECKED_ROWS = 32  # queries of two heads, compared with float64
_LARGEST_ERROR = 0.02  # of out or lse: bfloat16 stays under 0.005, so a kernel beyond this computes something else
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--num-heads", type=positive, default=16, metavar="H", help="of one rank: 16 are DeepSeek-V3's with -tp 8")
    add(
        "--chunk", type=positive_list, default="2048,4096,8192,16384", metavar="T,...", help="new tokens of the request"
    )
    add("--context", type=positive_list, default="8192,32768,131072", metavar="S,...", help="its cached tokens")
    add("--time-limit", type=seconds, default=450, metavar="S", help="seconds after which no further case is begun")
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write a row for each case and backend")
    add("--plot", type=Path, metavar="OUT.png", help="draw TFLOP/s; needs the extra plot")
    add_commit_argument(parser)


@dataclass(frozen=True)
class _Case:
    """A chunk of new tokens over itself where context is 0, else over so many cached tokens."""

    num_heads: int
    chunk: int
    context: int

    @property
    def causal(self) -> bool:
        return self.context == 0

    @property
    def num_keys(self) -> int:
        return self.context or self.chunk

    @property
    def flops(self) -> int:
        """Of both matrix products, over the pairs that the causal bound leaves."""
        pairs = self.chunk * (self.chunk + 1) // 2 if self.causal else self.chunk * self.context
        return 2 * self.num_heads * sum(_DIMS) * pairs

    def __str__(self) -> str:
        return f"{self.chunk:,} new tokens over " + (f"{self.context:,}" if self.context else "themselves")


class _Inputs:
    """Sets of random (q, k_nope, k_pe, v) of a case, keys and values as views of one up-projection."""

    def __init__(self, case: _Case, dtype: torch.dtype, device: torch.device) -> None:
        nope, rope, value = _DIMS
        self.case = case
        self.queries, self.keys = (_one_request(length, device) for length in (case.chunk, case.num_keys))

        def new_set() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            q = torch.randn(case.chunk, case.num_heads, nope + rope, dtype=dtype, device=device)
            k_nope, v = torch.randn(case.num_keys, case.num_heads, nope + value, dtype=dtype, device=device).split(
                [nope, value], -1
            )
            return q, k_nope, torch.randn(case.num_keys, rope, dtype=dtype, device=device), v

        num_values = case.num_heads * (case.chunk * (nope + rope) + case.num_keys * (nope + value))
        num_sets = -(-_CACHE_BYTES // (num_values * dtype.itemsize)) if device.type == "cuda" else 1
        self.sets = [new_set() for _ in range(num_sets)]

    def call(self, index: int) -> PrefillCall:
        """Return the call over set `index`."""
        return PrefillCall(*self.sets[index % len(self.sets)], self.queries, self.keys, _SCALE, self.case.causal)

    def errors(self, out: Tensor, lse: Tensor) -> tuple[float, float]:
        """Of set 0's result, at some queries of the first and the last head, against float64: relative of out (norms),
        largest of lse.
        """
        heads = [0, self.case.num_heads - 1]
        rows = torch.linspace(0, self.case.chunk - 1, _CHECKED_ROWS, device=out.device).long()
        q, k_nope, k_pe, v = self.sets[0]
        keys, values = join_keys(k_nope[:, heads], k_pe).double(), v[:, heads].double()
        scores = torch.einsum("thd,shd->ths", q[rows][:, heads].double(), keys) * _SCALE
        if self.case.causal:
            is_later = torch.arange(self.case.num_keys, device=out.device) > rows[:, None]
            scores = scores.masked_fill(is_later[:, None], -torch.inf)
        wanted = torch.einsum("ths,shd->thd", scores.softmax(-1), values)
        error = (out[rows][:, heads] - wanted).norm() / wanted.norm()
        lse_error = (lse[rows][:, heads] - scores.logsumexp(-1)).abs().max()
        return float(error), float(lse_error)


def _one_request(length: int, device: torch.device) -> Segments:
    return Segments((0, length), torch.tensor((0, length), dtype=torch.int32, device=device))


def run(args: argparse.Namespace) -> None:
    """Measure every case with every backend that takes it, report."""
    with join(args, _check_alone) as job, torch.inference_mode():
        with agree():
            check_outputs(args.json, args.plot)
        device, rows = job.ranks.device, []
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        limit = TimeLimit(args.time_limit, device)
        for case in (_Case(args.num_heads, chunk, context) for chunk in args.chunk for context in (0, *args.context)):
            if limit.is_over():
                print(f"time is over (--time-limit): {case} and what follows is left out", flush=True)
                break
            with measurement(args, job, str(case)):
                with memory_on_all():
                    inputs = _Inputs(case, dtype, device)
                for row in _rows(inputs, dtype, device):
                    rows.append(row)
                    print(_line(case, row), flush=True)
                del inputs  # before the next ones are made
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if args.json:
            write_results(args.json, rows, 1, device, args.commit)
        if args.plot and rows:
            _plot(args.plot, rows, f"prefill kernels, {args.num_heads} heads of {_DIMS[0]} + {_DIMS[1]} and {_DIMS[2]}")


def _check_alone(launch: LaunchInfo) -> None:
    if launch.num_ranks != 1:
        raise ValueError(f"bench prefill measures one device, but {launch.num_ranks} ranks were started; start one")


def _rows(inputs: _Inputs, dtype: torch.dtype, device: torch.device) -> Iterator[Row]:
    """A row for each backend that takes the case; a line for each that fails."""
    for backend in PREFILL_BACKENDS:
        if backend.takes(inputs.call(0)):
            try:
                yield _row(backend, inputs, dtype, device)
            except (ImportError, RuntimeError) as error:  # others' code: we measure without it
                print(f"left out: {backend.name} of {inputs.case}: {str(error).partition(chr(10))[0]}", flush=True)


def _row(backend: Backend[PrefillCall], inputs: _Inputs, dtype: torch.dtype, device: torch.device) -> Row:
    case = inputs.case
    start = time.perf_counter()
    errors = inputs.errors(*backend.run(inputs.call(0)))  # reading them waits for the device
    first_call = time.perf_counter() - start
    calls = max(_CALLS, len(inputs.sets)) if device.type == "cuda" else 1
    timing = time_operation(
        lambda index: backend.run(inputs.call(index)), device, calls, num_samples(device), _SAMPLE_SECONDS
    )
    error, lse_error = (error if math.isfinite(error) else None for error in errors)  # JSON has no NaN
    return {
        "backend": backend.name,
        "num_heads": case.num_heads,
        "chunk": case.chunk,
        "context": case.context,
        "causal": case.causal,
        "dtype": str(dtype).removeprefix("torch."),
        "num_sets": len(inputs.sets),
        "in_graph": timing.in_graph,
        "first_call_ms": round(first_call * 1e3, 1),
        "median_us": round(timing.median_us, 1),
        "tflops": round(case.flops / timing.median_us / 1e6, 3),
        "error": error,
        "lse_error": lse_error,
    }


def _line(case: _Case, row: Row) -> str:
    is_right = all(row[key] is not None and row[key] <= _LARGEST_ERROR for key in ("error", "lse_error"))
    numbers = (
        f"{row['median_us']:>12,.1f} us {row['tflops']:>8,.1f} TFLOP/s   first call {row['first_call_ms']:>8,.1f} ms"
    )
    return f"{case!s:<38} {row['backend']:<10} {numbers}   error {row['error']} of lse {row['lse_error']}{'' if is_right else '   WRONG'}"


def _plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """TFLOP/s by backend: over the chunk's length among the new tokens, over the context's length for the longest
    chunk.
    """
    figure, (causal, context) = new_figure(title, num_axes=2)
    longest = max(row["chunk"] for row in rows)
    _plot_lines(causal, [row for row in rows if row["causal"]], "chunk", "new tokens, causal")
    _plot_lines(
        context,
        [row for row in rows if not row["causal"] and row["chunk"] == longest],
        "context",
        f"context of {longest:,} new tokens",
    )
    causal.legend()
    save_figure(path, figure)


def _plot_lines(axes: Any, rows: Sequence[Row], over: str, label: str) -> None:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        points = [row for row in rows if row["backend"] == backend]
        axes.plot([row[over] for row in points], [row["tflops"] for row in points], "o-", label=backend)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(bottom=0)
