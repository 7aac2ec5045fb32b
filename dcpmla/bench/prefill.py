"""Measure prefill kernels on one device: a chunk of new tokens over itself (causal) and over cached contexts, with
every backend.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends import PREFILL_BACKENDS, Backend
from dcpmla.attention.calls import PrefillCall, Segments, join_keys
from dcpmla.bench.plots import new_figure, save_figure, select
from dcpmla.bench.results import Row, dtype_name, finite
from dcpmla.bench.runner import Benchmark, leave_out
from dcpmla.bench.timing import time_operation
from dcpmla.cli.options import positive, positive_list

_DIMS = (128, 64, 128)  # nope, rope and value widths of a head: DeepSeek V2 and V3, Kimi-K2
_SCALE = (_DIMS[0] + _DIMS[1]) ** -0.5
_CACHE_BYTES = 1 << 27  # inputs rotate until so many bytes lie between two uses of the same ones: no GPU's L2 is larger
_SAMPLE_SECONDS = 1.0  # that the samples of one kernel may take
_FEWEST_CALLS = 4  # of a sample on a GPU
_CHECKED_ROWS = 32  # queries of two heads, compared with float64
_LARGEST_ERROR = 0.02  # of out or lse: bfloat16 stays below 0.005; a larger one means that something else was computed


@dataclass(frozen=True)
class PrefillCase:
    """New tokens over themselves where context is 0, else over so many cached tokens."""

    heads: int
    tokens: int
    context: int

    @property
    def causal(self) -> bool:
        return self.context == 0

    @property
    def num_keys(self) -> int:
        return self.context or self.tokens

    @property
    def flops(self) -> int:
        """Operations of both matrix products, over the pairs that the causal bound leaves."""
        pairs = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens * self.context
        return 2 * self.heads * sum(_DIMS) * pairs

    def __str__(self) -> str:
        return f"{self.tokens:,} new tokens over " + (f"{self.context:,}" if self.context else "themselves")


class PrefillInputs:
    """Sets of random (q, k_nope, k_pe, v) of a case, keys and values as views of one up-projection."""

    def __init__(self, case: PrefillCase, dtype: torch.dtype, device: torch.device) -> None:
        nope, rope, value = _DIMS
        self.case = case
        self.queries, self.keys = (_one_request(length, device) for length in (case.tokens, case.num_keys))
        new: dict[str, Any] = {"dtype": dtype, "device": device}

        def new_set() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            q = torch.randn(case.tokens, case.heads, nope + rope, **new)
            k_nope, v = torch.randn(case.num_keys, case.heads, nope + value, **new).split([nope, value], -1)
            return q, k_nope, torch.randn(case.num_keys, rope, **new), v

        num_values = case.heads * (case.tokens * (nope + rope) + case.num_keys * (nope + value))
        num_sets = -(-_CACHE_BYTES // (num_values * dtype.itemsize)) if device.type == "cuda" else 1
        self.sets = [new_set() for _ in range(num_sets)]

    def call(self, index: int) -> PrefillCall:
        """Return the call over set index % num_sets."""
        return PrefillCall(*self.sets[index % len(self.sets)], self.queries, self.keys, _SCALE, self.case.causal)

    def errors(self, out: Tensor, lse: Tensor) -> tuple[float, float]:
        """Return the errors of set 0's result against float64, at some queries of the first and the last head: of out
        relative (norms), of lse the largest.
        """
        heads = [0, self.case.heads - 1]
        rows = torch.linspace(0, self.case.tokens - 1, _CHECKED_ROWS, device=out.device).long()
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


class PrefillBenchmark(Benchmark[PrefillCase, PrefillInputs]):
    """Every backend that takes a case, on the same inputs."""

    ranks_of = "one"
    plot_help = "TFLOP/s"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--heads", type=positive, default=16, metavar="H", help="of one rank: 16 are DeepSeek-V3's with -tp 8")
        tokens = "2048,4096,8192,16384"
        add("--tokens", type=positive_list, default=tokens, metavar="T,...", help="new tokens of the request")
        add("--context", type=positive_list, default="8192,32768,131072", metavar="S,...", help="its cached tokens")

    def cases(self) -> Iterator[PrefillCase]:
        for tokens in self.args.tokens:
            for context in (0, *self.args.context):
                yield PrefillCase(self.args.heads, tokens, context)

    def inputs(self, case: PrefillCase) -> PrefillInputs:
        return PrefillInputs(case, self.dtype, self.device)

    def measure(self, case: PrefillCase, inputs: PrefillInputs) -> list[Row]:
        rows = []
        for backend in PREFILL_BACKENDS:
            if backend.takes(inputs.call(0)):
                try:
                    rows.append(self._row(backend, inputs))
                except (ImportError, RuntimeError) as error:  # others' code: we measure without it
                    leave_out(f"{backend.name} of {case}", error)
        return rows

    def _row(self, backend: Backend[PrefillCall], inputs: PrefillInputs) -> Row:
        case = inputs.case
        start = time.perf_counter()
        error, lse_error = inputs.errors(*backend.run(inputs.call(0)))  # reading them waits for the device
        first_call = time.perf_counter() - start
        calls = max(_FEWEST_CALLS, len(inputs.sets)) if self.device.type == "cuda" else 1
        timing = time_operation(lambda index: backend.run(inputs.call(index)), self.device, calls, _SAMPLE_SECONDS)
        return {
            "kernel": backend.name,
            "heads": case.heads,
            "tokens": case.tokens,
            "context": case.context,
            "causal": case.causal,
            "dtype": dtype_name(self.dtype),
            "num_sets": len(inputs.sets),
            "in_graph": timing.in_graph,
            "first_call_ms": round(first_call * 1e3, 1),
            "median_us": round(timing.median_us, 1),
            "tflops": round(case.flops / timing.median_us / 1e6, 3),
            "error": finite(error),
            "lse_error": finite(lse_error),
        }

    def line(self, rows: Sequence[Row]) -> str:
        return "\n".join(map(_line, rows)) or "no backend took this case"

    def plot(self, path: Path, rows: Sequence[Row]) -> None:
        """Draw TFLOP/s by backend: over new tokens that attend to themselves, over contexts of the longest chunk."""
        longest = max(row["tokens"] for row in rows)
        title = f"prefill kernels, {self.args.heads} heads of {_DIMS[0]} + {_DIMS[1]} and {_DIMS[2]}"
        figure, (causal, context) = new_figure(title, num_axes=2)
        _plot_lines(causal, select(rows, causal=True), "tokens", "new tokens, causal")
        label = f"context of {longest:,} new tokens"
        _plot_lines(context, select(rows, causal=False, tokens=longest), "context", label)
        causal.legend()
        save_figure(path, figure)


def _line(row: Row) -> str:
    case = PrefillCase(row["heads"], row["tokens"], row["context"])
    is_right = all(row[key] is not None and row[key] <= _LARGEST_ERROR for key in ("error", "lse_error"))
    time = f"{row['median_us']:>12,.1f} us {row['tflops']:>8,.1f} TFLOP/s   first call {row['first_call_ms']:>8,.1f} ms"
    errors = f"error {row['error']} of lse {row['lse_error']}{'' if is_right else '   WRONG'}"
    return f"{case!s:<38} {row['kernel']:<10} {time}   {errors}"


def _plot_lines(axes: Any, rows: Sequence[Row], over: str, label: str) -> None:
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        points = select(rows, kernel=kernel)
        axes.plot([row[over] for row in points], [row["tflops"] for row in points], "o-", label=kernel)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(bottom=0)


BENCHMARK = PrefillBenchmark
