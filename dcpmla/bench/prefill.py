"""Measure prefill kernels on one device: a chunk of new tokens over itself (causal) and over cached contexts, with
every backend, over all keys and under masks of selected ones.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import PrefillCall, Segments, join_keys
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, Backend
from dcpmla.attention.backends.mask import selection_mask, unpack_mask
from dcpmla.bench.options import single
from dcpmla.bench.plots import Panel, draw_panels, select
from dcpmla.bench.results import Row, error_fields, leave_out
from dcpmla.bench.runner import Benchmark, Work
from dcpmla.bench.timing import num_rotated
from dcpmla.bench.words import name_of, named
from dcpmla.cli.options import positive

_DIMS = (128, 64, 128)  # nope, rope and value widths of a head: DeepSeek V2 and V3, Kimi-K2
_SCALE = (_DIMS[0] + _DIMS[1]) ** -0.5
_CHECKED_ROWS = 32  # queries of two heads, compared with float64
_LARGEST_ERROR = 0.02  # out or lse: bfloat16 stays below 0.005; a larger error means that something else was computed
_HEADS = "heads of one rank: 16 are DeepSeek-V3's with -tp 8"
_TOPK = "keys that each new token selects: more keys than that are measured under a mask as well"


class PrefillCase(NamedTuple):
    """New tokens over themselves where context is 0, else over so many cached tokens.

    Attributes:
        topk: Number of keys that each token selects under a mask; None for all keys without a mask.
    """

    heads: int
    tokens: int
    context: int
    topk: int | None

    @property
    def causal(self) -> bool:
        return self.context == 0

    @property
    def num_keys(self) -> int:
        return self.context or self.tokens

    @property
    def flops(self) -> int:
        """Operations of both matrix products, over the pairs that the causal bound leaves, selected or not."""
        pairs = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens * self.context
        return 2 * self.heads * sum(_DIMS) * pairs


class PrefillInputs:
    """Sets of random (q, k_nope, k_pe, v) of a case, keys and values as views of one up-projection, and their mask."""

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
        self.sets = [new_set() for _ in range(num_rotated(num_values * dtype.itemsize, device))]
        self.mask = None if case.topk is None else self._select(case.topk, device)

    def _select(self, topk: int, device: torch.device) -> Tensor:
        """Return a mask of topk keys of each token, or of all keys that it sees if these are fewer: one random key from
        each of topk ranges of nearly equal length.
        """
        case, number = self.case, torch.arange(topk, device=device)
        num_seen = torch.full((case.tokens, 1), case.num_keys, device=device)
        if case.causal:
            num_seen = torch.arange(1, case.tokens + 1, device=device)[:, None]
        first, end = number * num_seen // topk, (number + 1) * num_seen // topk
        offset = (torch.rand(case.tokens, topk, device=device) * (end - first)).long()
        # A range without keys, of a token that sees fewer than topk, selects nothing.
        positions = (first + offset).masked_fill(first == end, -1).to(torch.int32)
        start_loc = self.queries.start_loc
        return selection_mask(positions, start_loc, start_loc[:1], case.num_keys)  # the first key has position 0

    def call(self, index: int) -> PrefillCall:
        """Return the call over set index % num_sets."""
        tensors = self.sets[index % len(self.sets)]
        return PrefillCall(*tensors, *self.queries, *self.keys, _SCALE, self.case.causal, self.mask)

    def run(self, backend: Backend[PrefillCall], index: int) -> tuple[Tensor, Tensor]:
        """Run a backend over set index % num_sets."""
        return backend.run(self.call(index))

    def errors(self, result: tuple[Tensor, Tensor], index: int) -> Row:
        """Return the errors of a call's result against float64, at some queries of the first and the last head: of out
        relative (norms), of lse the largest.
        """
        out, lse = result
        heads = [0, self.case.heads - 1]
        rows = torch.linspace(0, self.case.tokens - 1, _CHECKED_ROWS, device=out.device).long()
        q, k_nope, k_pe, v = self.sets[index % len(self.sets)]
        keys, values = join_keys(k_nope[:, heads], k_pe).double(), v[:, heads].double()
        scores = torch.einsum("thd,shd->ths", q[rows][:, heads].double(), keys) * _SCALE
        if self.case.causal:
            is_later = torch.arange(self.case.num_keys, device=out.device) > rows[:, None]
            scores = scores.masked_fill(is_later[:, None], -torch.inf)
        if self.mask is not None:
            is_selected = unpack_mask(self.mask[rows], self.case.num_keys)
            scores = scores.masked_fill(~is_selected[:, None], -torch.inf)
        answer = torch.einsum("ths,shd->thd", scores.softmax(-1), values)
        error = (out[rows][:, heads] - answer).norm() / answer.norm()
        lse_error = (lse[rows][:, heads] - scores.logsumexp(-1)).abs().max()
        return error_fields(float(error), float(lse_error))


def _one_request(length: int, device: torch.device) -> Segments:
    return Segments((0, length), torch.tensor((0, length), dtype=torch.int32, device=device))


class PrefillBenchmark(Benchmark[PrefillCase, PrefillInputs]):
    """Every backend that takes a case, on the same inputs."""

    ranks_of = "one"
    plot_help = "TFLOP/s"
    series = ("kernel", "topk")
    options = {
        "heads": single(positive, 16, "H", _HEADS),
        "tokens": "2048,4096,8192,16384",
        "context": "8192,32768,131072",
        "topk": single(positive, None, "K", _TOPK),
    }
    sample_seconds = 1.0

    def cases(self) -> Iterator[PrefillCase]:
        for tokens, context in product(self.args.tokens, (0, *self.args.context)):
            case = PrefillCase(self.args.heads, tokens, context, topk=None)
            yield case
            if self.args.topk is not None and case.num_keys > self.args.topk:
                yield case._replace(topk=self.args.topk)

    def inputs(self, case: PrefillCase) -> PrefillInputs:
        return PrefillInputs(case, self.dtype, self.device)

    def measure(self, case: PrefillCase, inputs: PrefillInputs) -> list[Row]:
        work, rows = Work(len(inputs.sets), inputs.errors, case.flops, fields={"causal": case.causal}), []
        for backend in PREFILL_BACKENDS:
            if not backend.obstacle_to(inputs.call(0)):
                with leave_out(f"{backend.name} of {name_of(case)}", (ImportError, RuntimeError)):
                    run = partial(inputs.run, backend)
                    rows.append(self.kernel_row(case._asdict(), backend.name, run, work))
        return rows

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        return {"error": _LARGEST_ERROR, "lse_error": _LARGEST_ERROR}

    @classmethod
    def plot(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw TFLOP/s by backend: over new tokens that attend to themselves, over contexts of the longest chunk."""
        longest, best, y = max(row["tokens"] for row in rows), max(rows, key=itemgetter("tflops")), itemgetter("tflops")
        causal, others = select(rows, causal=True), select(rows, causal=False, tokens=longest)
        panels = [
            Panel("", causal, itemgetter("tokens"), y, ("new tokens, causal", "TFLOP/s")),
            Panel("", others, itemgetter("context"), y, (f"context of {longest:,} new tokens", "TFLOP/s")),
        ]
        title = f"prefill of {best['heads']} heads: {best['kernel']} reaches {best['tflops']:,.0f} TFLOP/s"
        draw_panels(path, title, panels, partial(named, cls.series), width=6.4)
