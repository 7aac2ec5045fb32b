"""Measure and check the exchange of a DCP group: each operation, per backend, variant, tokens, heads and ranks."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.bench.exchange_inputs import (
    OPERATIONS,
    ExchangeCase,
    ExchangeInputs,
    exchange_of,
    exchanges_of,
    find_errors,
)
from dcpmla.bench.options import single
from dcpmla.bench.peers import load_adapters
from dcpmla.bench.plots import Panel, draw_panels, grouped, select
from dcpmla.bench.results import Row, finite
from dcpmla.bench.runner import Benchmark, Work
from dcpmla.bench.timing import calls_per_sample, is_h200, largest
from dcpmla.bench.words import named
from dcpmla.cli.options import positive
from dcpmla.comm.exchange import Exchange
from dcpmla.job.bootstrap import Ranks, agree
from dcpmla.job.join import Job
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.machine import H200X8

_PEER = "vllm_direct"  # combines alone
_ROPE_DIM = 64  # part of queries and cached rows on top of the row width: DeepSeek V2 and V3, Kimi-K2
_ROW_WIDTH = f"of partial rows; queries and cached rows have {_ROPE_DIM} more"
_VALUE_WIDTH = "of partial rows that are projected before they are merged"
_PEERS = f"also measure {_PEER}, from DIR/direct/peer_direct.py and vllm_direct.so.xz"
# "pbm", project before merge: rows as wide as a head's values. "fp8": rows quantized in transit.
_VARIANTS: dict[str, tuple[str, ...]] = {
    "gather_heads": ("", "fp8"),
    "combine": ("", "pbm", "fp8"),
    "gather_context": ("",),
}
# By `find_errors`: gathers only move; a merged row is rounded once (half of 2^-7 in bfloat16), its float32 sums a few
# times.
_LARGEST_ERRORS = {"bfloat16": 0.005, "float32": 1e-5}
_LARGEST_FP8_ERROR = 2**-4  # half a step of e4m3


class Exchanged(NamedTuple):
    """One operation of one backend over groups of one size; heads is None for `gather_context`."""

    dcp: int
    operation: str
    exchange: str
    variant: str
    tokens: int
    heads: int | None
    row_width: int


class ExchangeBenchmark(Benchmark[Exchanged, ExchangeInputs]):
    """Every operation of every backend, groups of one size after the other.

    Attributes:
        group, exchanges: Group of this rank in the size that is measured, and its exchanges by backend and variant.
    """

    plot_help = "times over tokens"
    options = {
        "decode_context_parallel_size": None,
        "dcp_comm_backend": None,
        "tokens": "1,2,4,8,16,32,64,128,256,1024,4096",
        "heads": "64,128",
        "row_width": single(positive, 512, "D", _ROW_WIDTH),
        "value_width": single(positive, 128, "V", _VALUE_WIDTH),
        "peers": {"type": Path, "metavar": "DIR", "help": _PEERS},
    }
    series = ("operation", "exchange", "variant")

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.group: ProcessGroup
        self.exchanges: dict[tuple[str, str], Exchange] = {}
        with agree():
            self._make_peer = load_adapters("exchange").load_vllm_direct(args.peers) if args.peers else None

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        group_sizes(args, ranks.num_ranks)

    def cases(self) -> Iterator[Exchanged]:
        args = self.args
        operations = [*product(("gather_heads", "combine"), args.heads), ("gather_context", None)]
        for size in group_sizes(args, self.job.ranks.num_ranks):
            self.group = init_mesh(size, size).dcp_group
            self.exchanges = self._find_exchanges()
            loads = product(args.tokens, operations, self.exchanges)
            for tokens, (operation, heads), (backend, variant) in loads:
                width = args.value_width if variant == "pbm" else args.row_width
                if operation != "combine":
                    width += _ROPE_DIM
                if variant in _VARIANTS[operation] and (operation == "combine" or backend != _PEER):
                    yield Exchanged(size, operation, backend, variant, tokens, heads, width)

    def _find_exchanges(self) -> dict[tuple[str, str], Exchange]:
        """Return the exchanges of a group by backend and variant. Collective over the job."""
        group, device = self.group, self.device
        plain = exchanges_of(self.args.dcp_comm_backend, ("ag_rs", "a2a"), group, device)
        exchanges = {(backend, ""): exchange for backend, exchange in plain.items()}
        if "direct" in plain:
            options = {"dcp_comm_backend": "direct", "dcp_exchange_dtype": "fp8"}
            exchanges["direct", "fp8"] = exchange_of(group, device, **options)
        if self._make_peer is not None:
            exchanges[_PEER, ""] = self._make_peer(group, device)
        # Last: their inputs are others.
        return exchanges | {(backend, "pbm"): exchanges[backend, ""] for backend in plain}

    def inputs(self, case: Exchanged) -> ExchangeInputs:
        latent_dim = case.row_width - _ROPE_DIM * (case.operation != "combine")
        sizes = case.tokens, case.heads or 0, self.args.row_width + _ROPE_DIM, latent_dim
        one = ExchangeCase(self.group, calls_per_sample(self.device), *sizes, self.device, self.dtype)
        return self.kept.get((case.operation, one), lambda: OPERATIONS[case.operation](one))

    def measure(self, case: Exchanged, inputs: ExchangeInputs) -> list[Row]:
        ranks, exchange = self.job.ranks, self.exchanges[case.exchange, case.variant]
        link, received = _link_gb_per_s(ranks, case.dcp), inputs.received_bytes

        def errors(result: tuple[Tensor, ...], index: int) -> Row:
            return {"error": finite(largest(check(inputs, exchange, result, index), self.device))}

        fields: Row = {"tp": ranks.num_ranks, "gpus_per_node": ranks.num_local_ranks}
        fields["wire_us"] = None if link is None else round(received / link / 1e3, 3)
        work = Work(calls_per_sample(self.device), errors, num_bytes=received, fields=fields)
        return [self.kernel_row(case._asdict(), "", partial(inputs.run, exchange), work)]

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        exact_or_rounded = _LARGEST_ERRORS[row["dtype"]] if row["operation"] == "combine" else 0.0
        return {"error": _LARGEST_FP8_ERROR if row["variant"] == "fp8" else exact_or_rounded}

    @classmethod
    def plot(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw times over tokens in the largest group with the most heads: each operation by itself, a line for each
        backend and variant.
        """
        size, heads = max(row["dcp"] for row in rows), max(row["heads"] or 0 for row in rows)
        shown = [row for row in rows if row["dcp"] == size and row["heads"] in (heads, None)]
        merges = select(shown, operation="combine", variant="", tokens=min(row["tokens"] for row in shown))
        times = [f"{row['exchange']} {row['median_us']:,.1f} us" for row in sorted(merges, key=itemgetter("median_us"))]
        title = f"{merges[0]['tokens']:,} x {heads} heads merged over {size} ranks: {', '.join(times)}"
        over = itemgetter("tokens"), itemgetter("median_us"), ("tokens", "us")
        operations = grouped(shown, itemgetter("operation"))
        panels = [Panel(operation, of_operation, *over, is_logarithmic=True) for operation, of_operation in operations]
        draw_panels(path, title, panels, partial(named, ("exchange", "variant")))


def group_sizes(args: argparse.Namespace, num_ranks: int) -> list[int]:
    """Return the sizes of groups to measure.

    Raises:
        ValueError: A size of 1, or one that does not divide the ranks or the heads.
    """
    if num_ranks == 1:
        raise ValueError(
            "bench exchange measures 2 ranks or more, but 1 was started; give tensor_parallel_size (-tp) 2 or more"
        )
    sizes: list[int] = args.decode_context_parallel_size or [num_ranks]
    for size in sizes:
        if size == 1 or num_ranks % size:
            option = f"decode_context_parallel_size (-dcp) has {size}"
            raise ValueError(f"{option}; it must be 2 or more, and divide the {num_ranks} ranks that were started")
        for heads in args.heads:
            if heads % size:
                raise ValueError(f"--heads has {heads}; a group of {size} ranks must divide it")
    return sizes


def check(inputs: ExchangeInputs, exchange: Exchange, result: tuple[Tensor, ...], index: int) -> float:
    """Return the largest error of a call's result, and of the next call's, the last, in which shards are empty.
    Collective over the group.
    """
    # Check the result first: the next call may overwrite the rows that it gathered.
    errors = find_errors(result, inputs.answer(index))
    return max(errors + find_errors(inputs.run(exchange, index + 1), inputs.answer(index + 1)))


def _link_gb_per_s(ranks: Ranks, size: int) -> float | None:
    """Return the rate of the links between H200s of one node; None where a group has others."""
    num_nodes = replace(H200X8, gpus_per_node=ranks.num_local_ranks).num_nodes(size, ranks.num_ranks)
    return H200X8.nvlink_gb_per_s if is_h200(ranks.device) and num_nodes == 1 else None
