"""Measure sparse MLA's decode under DCP: the selection of tokens, operation by operation, and attention to selected
tokens.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from dcpmla.bench.decode_inputs import DecodeInputs
from dcpmla.bench.exchange_inputs import exchange_of, with_direct
from dcpmla.bench.options import directory_of, listed, single
from dcpmla.bench.peers import AttentionKernels, attention_limits, check_peers, load_kernels
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.sparse_inputs import SelectedRows, SelectionInputs, SparseCase, attention_inputs
from dcpmla.bench.timing import largest
from dcpmla.cli.options import positive, positive_list
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.config import DCPConfig
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import LOAD_TIMEOUT, Job
from dcpmla.parallel.mesh import init_mesh

_MADE_UP = "made up"  # the other ranks' candidates, where one process measures one rank of several
_SHARED = "shared_attention"
_MOST_DIFFERENT = 0.02  # share of the tokens: a sum in another order may exchange the last ones of topk
_SHARED_KEYS = "rows of shared keys (DeepSeek-V4), of --context, that each new token attends to; instead of the rest"


class Sparse(NamedTuple):
    """A selection over one index cache and exchange, or attention over one format of the cache."""

    operation: str
    load: SparseCase
    exchange: str = ""
    index_cache_dtype: str = "auto"
    kv_cache_dtype: str = "bf16"


class SparseBenchmark(Benchmark[Sparse, SelectionInputs | SelectedRows]):
    """Every load under all DCP sizes, the smallest first, which others are compared with.

    Attributes:
        exchanges: Exchanges by DCP size and backend; None where one process measures one rank of several.
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
    series = ("operation", "dcp", "exchange", "kernel", "heads", "topk", "index_cache_dtype", "kv_cache_dtype")
    sample_seconds = 0.1

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        job.watchdog.enter("loading the peer", LOAD_TIMEOUT)
        names = ["dcpmla", *(["flashmla-sparse"] if args.peers else [])]
        self.kernels = AttentionKernels(self, dict(load_kernels(names, args.peers)))
        self.exchanges = {dcp: self._find_exchanges(dcp) for dcp in sorted(args.decode_context_parallel_size)}

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
                    yield Sparse(_SHARED if is_shared else "attention", load, kv_cache_dtype=name)
                for name, backend in () if is_shared else product(args.index_cache_dtype, exchanges):
                    yield Sparse("selection", load, backend, name)

    def inputs(self, case: Sparse) -> SelectionInputs | SelectedRows:
        load = case.load
        if case.operation != "selection":
            return SelectedRows(load, self.dtype, self.device, case.kv_cache_dtype)
        exchange = self.exchanges[load.dcp][case.exchange]
        return SelectionInputs(load, self.args.index_heads, case.index_cache_dtype, self.dtype, self.device, exchange)

    def measure(self, case: Sparse, inputs: SelectionInputs | SelectedRows) -> list[Row]:
        sizes = {"operation": case.operation, **case.load.sizes}
        if isinstance(inputs, SelectionInputs):
            return [self._selection_row(case, sizes, inputs)]
        sizes["kv_cache_dtype"] = case.kv_cache_dtype
        fields = {"num_selected": round(float(inputs.num_slots.double().mean()), 1)}
        rows = list[Row]()
        for heads in self.args.heads:
            decode: DecodeInputs = attention_inputs(case.load, heads, inputs)
            rows += self.kernels.rows({**sizes, "heads": heads}, decode, fields, counts=False)
        return rows

    def _selection_row(self, case: Sparse, sizes: Row, inputs: SelectionInputs) -> Row:
        """Time every operation alone, and all together."""
        load, difference = case.load, largest(inputs.difference(), self.device)
        times = {name: self.time(operation, inputs.num_sets) for name, operation in inputs.operations.items()}
        total = times.pop("selection")
        fields = {
            "exchange": case.exchange,
            "heads": inputs.q.shape[2],
            "index_cache_dtype": inputs.index_cache_dtype,
            "num_sets": inputs.num_sets,
            **{f"{name}_us": round(timing.median_us, 2) for name, timing in times.items()},
            "index_bytes": inputs.index_bytes,
            "index_gb_per_s": round(inputs.index_bytes / times["index_scores"].median_us / 1e3, 1),
            "different": round(difference, 5),
        }
        unsharded = load.batch, load.context, case.index_cache_dtype
        return self.row(sizes, total, fields) | self.speedup_over("dcp_1", unsharded, total.median_us, load.dcp == 1)

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        return {"different": _MOST_DIFFERENT} if row["operation"] == "selection" else attention_limits({})
