"""Measure decode kernels on one GPU, ours and FlashMLA's, FlashAttention-3's and FlashInfer's: times, share of the
floor, ratios, errors.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dcpmla.attention.backends.choice import DECODE_BACKENDS
from dcpmla.bench.cache_formats import quantized_name, query_dtypes
from dcpmla.bench.ceilings import floor_fields, measure_ceilings
from dcpmla.bench.decode_inputs import Answer, Caches, DecodeCase, DecodeInputs, MakeKernel, Ours
from dcpmla.bench.options import directory_of, named, single
from dcpmla.bench.peers import PEERS, Formats, check_peers, load_peer
from dcpmla.bench.plots import draw_rows, grouped, new_figure, save_figure, select
from dcpmla.bench.results import Row, error_fields, left_out
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.timing import Timing, calls_over
from dcpmla.cli.options import positive
from dcpmla.config import DECODE_QUERY_DTYPES
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.faults import is_out_of_memory
from dcpmla.job.join import LOAD_TIMEOUT, Job

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OURS = {"dcpmla": "auto", **{f"dcpmla-{backend.name}": backend.name for backend in DECODE_BACKENDS}}
_KERNELS = [*OURS, *PEERS]
_DEFAULT = "default: dcpmla, and with --peers all of theirs"
_DTYPE = "of what is not quantized; default: bfloat16 on GPUs, float32 on CPUs"
# Errors of out or lse, by the queries' dtype; a larger one means that something else was computed. Products in bfloat16
# stay below 0.005 over every cache. Products in e4m3 round probabilities too, by up to 1/16 each: 1.7 % of the
# outputs, 2.2 % where small ones are denormals.
_LARGEST_ERROR = {"auto": 0.02, "fp8": 0.04}
_ROUNDS = {"cuda": 2, "cpu": 1}  # the last round counts: each kernel then finds the clock that the others leave


class Decode(Benchmark[DecodeCase, DecodeInputs]):
    """Every kernel on the same inputs, case by case.

    Attributes:
        kernels: Available kernels, by name.
        plain_us: Times of our kernels over plain rows, by kernel and case.
    """

    ranks_of = "one"
    plot_help = "shares of the floor's speed"
    options = {
        "peers": directory_of("peers.py and the libraries of FlashMLA and FlashAttention-3"),
        "kernels": named(_KERNELS, "a kernel", f"of {', '.join(_KERNELS)}; {_DEFAULT}"),
        "heads": "16,64,128",
        "batch": "1,8,32,128",
        "context": "1024,4096,16384,65536",
        "query_len": "1,2,4",
        "block_size": single(positive, 64, "P", "tokens of a cache block"),
        "dtype": {"choices": tuple(_DTYPES), "help": _DTYPE},
        "kv_cache_dtype": "bf16",
        "decode_query_dtype": ",".join(DECODE_QUERY_DTYPES),
    }
    sample_seconds = 0.1

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.dtype = _DTYPES[args.dtype] if args.dtype else self.dtype
        job.watchdog.enter("loading the kernels", LOAD_TIMEOUT)
        self.kernels = dict(_load(args))
        self.ceilings = measure_ceilings(self.device, self.dtype)
        self.refused: set[str] = set()  # kernels that did not take some case, which is said once
        self.plain_us: dict[tuple[str, DecodeCase], float] = {}

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        peers = [name for name in args.kernels or () if name in PEERS]
        if peers and args.peers is None:
            raise ValueError(f"--kernels has {peers[0]}, which is loaded from --peers; give --peers DIR")
        for name in peers:
            if not _measures(args, PEERS[name]):
                options = "--kv-cache-dtype {} and --decode-query-dtype {}".format(*PEERS[name])
                raise ValueError(f"--kernels has {name}, which reads what {options} gives; add them, or leave it out")
        check_peers(args.peers)
        if max(args.query_len) > min(args.context):
            sizes = f"--query-len has {max(args.query_len)} and --context {min(args.context)}"
            raise ValueError(f"{sizes}; new tokens are part of the context")

    def cases(self) -> Iterator[DecodeCase]:
        """Yield cases, grouped by their caches."""
        for batch, context, cache in self.product("batch", "context", "kv_cache_dtype"):
            queries = query_dtypes(cache, self.args.decode_query_dtype)
            for (heads, query_len), query_dtype in product(self.product("heads", "query_len"), queries):
                yield DecodeCase(batch, context, heads, query_len, cache, query_dtype)

    def inputs(self, case: DecodeCase) -> DecodeInputs:
        size = case.batch, case.context, self.args.block_size, self.dtype, self.device, case.kv_cache_dtype
        return DecodeInputs(case, self.kept.get(size, lambda: Caches(*size)))

    def measure(self, case: DecodeCase, inputs: DecodeInputs) -> list[Row]:
        """Return a row for each kernel that takes the case; ours with their ratios to the peers'."""
        num_sets = len(inputs.caches)
        answer, rows = Answer(inputs, calls_over(num_sets, self.device) - 1), {}
        for name, make in [*self.kernels.items()] * _ROUNDS[self.device.type]:
            if name in PEERS and not PEERS[name].match(case):
                continue
            try:
                kernel = make(inputs)
                timing, last = self.time_with_result(kernel.launch, num_sets)
            except Exception as error:  # others' code may raise anything
                if name in OURS and not (isinstance(error, ValueError) or is_out_of_memory(error)):
                    raise
                if name not in self.refused:
                    self.refused.add(name)
                    print(left_out(f"{name} of {case}", error), flush=True)
                continue
            rows[name] = self._row(name, inputs, timing, answer.errors(*kernel.result(*last)))
        return self._with_ratios([*rows.values()], case)

    def _row(self, name: str, inputs: DecodeInputs, timing: Timing, errors: tuple[float, float]) -> Row:
        case, us, itemsize = inputs.case, timing.median_us, self.dtype.itemsize
        fields = {
            "kernel": name,
            "block_size": self.args.block_size,
            "num_sets": len(inputs.caches),
            "tflops": round(case.flops / us / 1e6, 2),
            "gb_per_s": round(case.num_bytes(itemsize) / us / 1e3, 1),
            **floor_fields(case.floor_us(self.ceilings, itemsize), us),
            **error_fields(*errors),
        }
        return self.row(case._asdict(), timing, fields)

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        return dict.fromkeys(("error", "lse_error"), _LARGEST_ERROR[row["decode_query_dtype"]])

    def _with_ratios(self, rows: list[Row], case: DecodeCase) -> list[Row]:
        """Add `speedup_over_NAME` to our rows: a peer's time, or our own over plain rows, over ours; of right ones."""
        peers = {row["kernel"]: row["median_us"] for row in rows if row["kernel"] in PEERS and not self.wrong(row)}
        plain_case = case._replace(kv_cache_dtype="bf16", decode_query_dtype="auto")
        for row in (row for row in rows if row["kernel"] in OURS and not self.wrong(row)):
            baselines = dict(peers)
            if case == plain_case:
                self.plain_us[row["kernel"], case] = row["median_us"]
            elif (row["kernel"], plain_case) in self.plain_us:
                baselines["bf16"] = self.plain_us[row["kernel"], plain_case]
            row.update({f"speedup_over_{name}": round(us / row["median_us"], 3) for name, us in baselines.items()})
        return rows

    def text(self, case: DecodeCase, rows: Sequence[Row]) -> str:
        if not rows:
            return super().text(case, rows)
        load = f"{case.batch} x {case.context:,}".rjust(14) + f"  heads {case.heads:>3}"
        cells = [f"{load}  new {case.query_len}  floor {rows[0]['floor_us']:>8,.1f} us", *filter(None, [case.formats])]
        for row in rows:
            wrong = " WRONG" if self.wrong(row) else ""
            cells.append(f"{row['kernel']} {row['median_us']:>8,.1f} us {row['floor_share']:>4.0%}{wrong}")
        for row in rows:
            if (best := best_peer_ratio(row)) is not None:
                cells.append(f"{row['kernel']} {best:.2f} x the best peer's speed")
            if "speedup_over_bf16" in row:
                cells.append(f"{row['speedup_over_bf16']:.2f} x its own in bf16")
        return "  ".join(cells)

    def summary(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield for each kernel and format its share of the floor and its wrong results; for ours also the ratios."""
        for name, of_kernel in grouped(rows, kernel_name):
            share = median(row["floor_share"] for row in of_kernel)
            num_wrong = sum(bool(self.wrong(row)) for row in of_kernel)
            cases = f"in the median of {len(of_kernel)} cases, {num_wrong} of them wrong"
            yield f"{name}: {share:.0%} of the floor's speed {cases}"
            for other in (*PEERS, "bf16"):
                ratios = [row[f"speedup_over_{other}"] for row in of_kernel if f"speedup_over_{other}" in row]
                if ratios:
                    span = f"{min(ratios):.2f} x to {max(ratios):.2f} x"
                    yield f"{name} against {other}: {median(ratios):.2f} x in the median, {span}"

    def findings(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"ceilings": self.ceilings._asdict()}

    @staticmethod
    def plot(path: Path, rows: Sequence[Row]) -> None:
        """Draw every kernel's share of the floor's speed over the cached tokens of all requests, for each number of
        heads and the fewest new tokens. A kernel measured over several formats is drawn once for each.
        """
        heads, query_len = sorted({row["heads"] for row in rows}), min(row["query_len"] for row in rows)
        kernel = rows[0]["kernel"]
        ours = select(rows, kernel=kernel)
        title = f"{kernel}: {median(row['floor_share'] for row in ours):.0%} of the floor's speed in the median"
        if ratios := [ratio for row in ours if (ratio := best_peer_ratio(row)) is not None]:
            title += f", {median(ratios):.2f} x the best other kernel's"
        figure, axes = new_figure(title, num_axes=len(heads), width=4.8)
        names = "cached tokens of all requests", "share of the floor's speed"
        for axis, num_heads in zip(axes, heads, strict=True):
            axis.set_title(f"{num_heads} heads, new tokens: {query_len}")
            shown = select(rows, heads=num_heads, query_len=query_len)
            draw_rows(axis, shown, _num_cached, itemgetter("floor_share"), kernel_name, names)
        save_figure(path, figure)


def _measures(args: argparse.Namespace, formats: Formats) -> bool:
    """Return whether any case has a peer's formats."""
    queries = query_dtypes(formats.kv_cache_dtype, args.decode_query_dtype)
    return formats.kv_cache_dtype in args.kv_cache_dtype and formats.decode_query_dtype in queries


def _load(args: argparse.Namespace) -> Iterator[tuple[str, MakeKernel]]:
    """Yield the names and makers of the kernels that can be had here; print a line on each that cannot."""
    for name in args.kernels or ["dcpmla", *(PEERS if args.peers else ())]:
        if name in OURS:
            yield name, partial(Ours, backend=OURS[name])
        elif _measures(args, PEERS[name]) and (make := load_peer(name, args.peers)) is not None:
            yield name, make


def _num_cached(row: Row) -> int:
    return row["batch"] * row["context"]


def best_peer_ratio(row: Row) -> float | None:
    """Return the fastest peer's time divided by the row's kernel's; None without peers."""
    return min(
        (row[key] for key in row if key.startswith("speedup_over_") and key != "speedup_over_bf16"), default=None
    )


def kernel_name(row: Row) -> str:
    """Return the kernel of a row, and its inputs if they are quantized."""
    return ", ".join(filter(None, [row["kernel"], quantized_name(row["kv_cache_dtype"], row["decode_query_dtype"])]))
