"""Measure sparse MLA's decode under DCP: the selection of tokens, operation by operation, and attention to selected
tokens.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median
from typing import NamedTuple

from dcpmla.bench.decode_inputs import Answer, Kernel, Ours
from dcpmla.bench.exchange_inputs import exchange_of, with_direct
from dcpmla.bench.options import directory_of, listed, single
from dcpmla.bench.peers import PEERS, check_peers, load_peer
from dcpmla.bench.plots import grouped
from dcpmla.bench.results import Row, error_fields, leave_out
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.sparse_inputs import AttentionInputs, SelectedRows, SelectionInputs, SparseCase
from dcpmla.bench.timing import Timing, calls_over, largest
from dcpmla.cli.options import positive, positive_list
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.config import DCPConfig
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import LOAD_TIMEOUT, Job
from dcpmla.parallel.mesh import init_mesh

_MADE_UP = "made up"  # the other ranks' candidates, where one process measures one rank of several
_PEER = "flashmla-sparse"
_SHARED = "shared_attention"
_OPERATIONS = ("index_scores", "local_candidates", "gather_candidates", "choose_tokens")
_MOST_DIFFERENT = 0.02  # share of the tokens: a sum in another order may exchange the last ones of topk
_LARGEST_ERROR = 0.02  # limit for out and lse, as in `bench decode`
_SHARED_KEYS = "rows of shared keys (DeepSeek-V4), of --context, that each new token attends to; instead of the rest"


class Sparse(NamedTuple):
    """A selection over one index cache and exchange, or attention over one format of the cache."""

    operation: str
    load: SparseCase
    cache_dtype: str
    exchange: str = ""

    def __str__(self) -> str:
        cache = f"{self.cache_dtype} {'index ' if self.exchange else ''}cache"
        return ", ".join(filter(None, [f"{self.operation} of {self.load}", cache, self.exchange]))


class SparseBenchmark(Benchmark[Sparse, SelectionInputs | SelectedRows]):
    """Every load under all DCP sizes, the smallest first, which others are compared with.

    Attributes:
        exchanges: Exchanges by DCP size and backend; None where one process measures one rank of several.
        unsharded_us: Times of whole selections under dcp 1, by load and index cache.
        make_peer: Maker of FlashMLA's kernel, None without it.
    """

    ranks_of = "tp"

    options = {
        "tensor_parallel_size": single(positive, 1, "N", "ranks of the job; 1 measures one rank of each -dcp"),
        "decode_context_parallel_size": "1,2,4,8",
        "dcp_comm_backend": None,
        "heads": "128",
        "batch": "1,8,32,64,128",
        "context": "8192,32768,131072,524288",
        "topk": single(positive, 2048, "K", "tokens that each new token selects"),
        "index_heads": single(positive, 64, "H", "of the indexer"),
        "index_cache_dtype": "auto,fp8",
        "kv_cache_dtype": "bf16,fp8_ds_mla",
        "shared_keys": listed(positive_list, _SHARED_KEYS, "N,..."),
        "peers": directory_of("peers.py and FlashMLA's library, for a job of one rank"),
    }
    sample_seconds = 0.1

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        job.watchdog.enter("loading the peer", LOAD_TIMEOUT)
        self.make_peer = load_peer(_PEER, args.peers) if args.peers else None
        self.exchanges = {dcp: self._find_exchanges(dcp) for dcp in sorted(args.decode_context_parallel_size)}
        self.unsharded_us: dict[tuple[int, int, str], float] = {}

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        shortest, sizes = min(args.context), args.decode_context_parallel_size
        option, topk = ("--shared-keys", max(args.shared_keys)) if args.shared_keys else ("--topk", args.topk)
        if ranks.num_ranks > 1:
            for dcp in sizes:
                DCPConfig(tensor_parallel_size=ranks.num_ranks, decode_context_parallel_size=dcp)
        if shortest <= topk:
            options = f"--context has {shortest} and {option} is {topk}"
            raise ValueError(f"{options}; there must be more tokens than are selected")
        if args.shared_keys and "fp8" in args.kv_cache_dtype:
            raise ValueError("--kv-cache-dtype has fp8, which shared keys do not have; choose from bf16, fp8_ds_mla")
        if shortest < max(sizes):
            raise ValueError(f"--context has {shortest} and -dcp {max(sizes)}; each rank must have a token")
        if args.peers is not None and ranks.num_ranks > 1:
            options = f"--peers measures one device, but {ranks.num_ranks} ranks were started"
            raise ValueError(f"{options}; start one, or leave it out")
        check_peers(args.peers)

    def _find_exchanges(self, dcp: int) -> dict[str, Exchange | None]:
        """Return the exchanges of a DCP size by backend. Collective over the job."""
        if dcp == 1:
            return {LocalExchange.name: LocalExchange()}
        num_ranks, device = self.job.ranks.num_ranks, self.device
        if num_ranks == 1:
            return {_MADE_UP: None}
        group = init_mesh(num_ranks, dcp).dcp_group
        backends = self.args.dcp_comm_backend or with_direct(("a2a",), group, device)
        return {backend: exchange_of(group, device, dcp_comm_backend=backend) for backend in backends}

    def cases(self) -> Iterator[Sparse]:
        args, is_shared = self.args, bool(self.args.shared_keys)
        for batch, context in self.product("batch", "context"):
            for dcp, exchanges in self.exchanges.items():
                for topk, name in product(args.shared_keys or [args.topk], args.kv_cache_dtype):
                    load = SparseCase(batch, context, topk, dcp, self.job.ranks.rank % dcp, is_shared)
                    yield Sparse("attention", load, name)
                for name, backend in () if is_shared else product(args.index_cache_dtype, exchanges):
                    yield Sparse("selection", load, name, backend)

    def inputs(self, case: Sparse) -> SelectionInputs | SelectedRows:
        load = case.load
        if case.operation == "attention":
            return SelectedRows(load, self.dtype, self.device, case.cache_dtype)
        exchange = self.exchanges[load.dcp_size][case.exchange]
        return SelectionInputs(load, self.args.index_heads, case.cache_dtype, self.dtype, self.device, exchange)

    def measure(self, case: Sparse, inputs: SelectionInputs | SelectedRows) -> list[Row]:
        if isinstance(inputs, SelectionInputs):
            return [self._selection_row(case, inputs)]
        return [self._attention_row(case.load, heads, inputs) for heads in self.args.heads]

    def _selection_row(self, case: Sparse, inputs: SelectionInputs) -> Row:
        """Time every operation alone, and all together."""
        load, difference = case.load, largest(inputs.difference(), self.device)
        times = {name: self.time(operation, inputs.num_sets) for name, operation in inputs.operations.items()}
        total = times["selection"]
        key = load.batch, load.context, case.cache_dtype
        unsharded_us = self.unsharded_us.get(key)
        if load.dcp_size == 1:
            self.unsharded_us[key] = round(total.median_us, 2)
        fields = {
            "operation": "selection",
            "exchange": case.exchange,
            "heads": inputs.q.shape[2],
            "index_cache_dtype": inputs.index_cache_dtype,
            "num_sets": inputs.num_sets,
            **{f"{name}_us": round(times[name].median_us, 2) if name in times else None for name in _OPERATIONS},
            "index_bytes": inputs.index_bytes,
            "index_gb_per_s": round(inputs.index_bytes / times["index_scores"].median_us / 1e3, 1),
            "different": round(difference, 5),
            "speedup_over_dcp_1": None if unsharded_us is None else round(unsharded_us / total.median_us, 3),
        }
        return self.row(load.sizes, total, fields)

    def _attention_row(self, load: SparseCase, heads: int, rows: SelectedRows) -> Row:
        """Time our kernel, and the peer where it takes the case."""
        inputs = AttentionInputs(load, heads, rows)
        timing, errors = self._attend(Ours(inputs), inputs)
        fields = {
            "operation": _SHARED if load.is_shared else "attention",
            "heads": heads,
            "kv_cache_dtype": rows.kv_cache_dtype,
            "num_sets": len(rows),
            "num_selected": round(float(rows.num_slots.double().mean()), 1),
            **errors,
            "flashmla_us": None,
            "speedup_over_flashmla": None,
        }
        row = self.row(load.sizes, timing, fields)
        if self.make_peer is not None and PEERS[_PEER].match(inputs.case):
            with leave_out(f"flashmla of {load}, {heads} heads"):
                peer_timing, peer_errors = self._attend(self.make_peer(inputs), inputs)
                row["flashmla_us"] = round(peer_timing.median_us, 2)
                if not self.wrong(row) and not self.wrong(row | peer_errors):
                    row["speedup_over_flashmla"] = round(peer_timing.median_us / timing.median_us, 3)
        return row

    def _attend(self, kernel: Kernel, inputs: AttentionInputs) -> tuple[Timing, Row]:
        """Return a kernel's time, and the largest errors of its last timed call on any rank. Collective."""
        num_sets = len(inputs.caches)
        timing, last = self.time_with_result(kernel.launch, num_sets)
        errors = Answer(inputs, calls_over(num_sets, self.device) - 1).errors(*kernel.result(*last))
        return timing, error_fields(*(largest(error, self.device) for error in errors))

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        if row["operation"] == "selection":
            return {"different": _MOST_DIFFERENT}
        return {"error": _LARGEST_ERROR, "lse_error": _LARGEST_ERROR}

    def line(self, case: Sparse, row: Row) -> str:
        times = [f"{key.removesuffix('_us')} {row[key]:>8,.1f}" for key in row if key.endswith("_us") and row[key]]
        rate = [f"{row['index_gb_per_s']:>7,.1f} GB/s"] if row["operation"] == "selection" else []
        ratio = row[_ratio_key(row)]
        ratios = [] if ratio is None else [f"{ratio:.2f} x"]
        load = f"{row['batch']} x {row['context']:,}"
        return "  ".join([f"{_name(row):<46} {load:>14}", "us:", *times, *rate, *ratios])

    def summary(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield wrong results, the speed of selections relative to dcp 1, and of attention relative to the peer."""
        for name, results in grouped(rows, _name):
            key = _ratio_key(results[0])
            line = f"{name}: {sum(bool(self.wrong(row)) for row in results)} of {len(results)} wrong"
            if ratios := [row[key] for row in results if row[key] is not None]:
                baseline = key.removeprefix("speedup_over_").replace("_", " ")
                line += f"; {median(ratios):.2f} x {baseline}'s speed in the median"
                line += f", {min(ratios):.2f} x to {max(ratios):.2f} x"
            yield line


def _ratio_key(row: Row) -> str:
    return "speedup_over_dcp_1" if row["operation"] == "selection" else "speedup_over_flashmla"


def _name(row: Row) -> str:
    """Return a readable name, shared by the rows that are compared over batches and contexts."""
    if row["operation"] == _SHARED:
        cache = f"{row['kv_cache_dtype']} cache"
        return f"attention to {row['topk']} shared keys, dcp {row['dcp']}, {row['heads']} heads, {cache}"
    if row["operation"] == "attention":
        return f"attention, dcp {row['dcp']}, {row['heads']} heads, {row['kv_cache_dtype']} cache"
    return f"selection, dcp {row['dcp']}, {row['exchange']}, {row['index_cache_dtype']} index cache"
