"""Measure sparse MLA's decode under DCP: the selection of tokens, operation by operation, and attention to selected
tokens.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.select.calls import IndexQueries
from dcpmla.attention.select.candidates import EMPTY
from dcpmla.attention.select.scores import index_scores
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.select.topk import choose_tokens, local_candidates
from dcpmla.bench.cache_formats import fill_randomly, fill_slots, kv_scale_of, storage_dtype
from dcpmla.bench.decode_inputs import LATENT_DIM, ROPE_DIM, Caches, DecodeCase, DecodeInputs
from dcpmla.bench.exchange_inputs import exchanges_of
from dcpmla.bench.options import directory_of, listed, single
from dcpmla.bench.peers import AttentionKernels, attention_limits, check_peers, load_kernels
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.timing import Operation, largest, num_rotated
from dcpmla.cache import formats, shared_format
from dcpmla.cache.index_keys import index_row_width, index_storage_dtype, index_to_fp8, write_index_keys
from dcpmla.cache.shared_rows import write_rows
from dcpmla.cli.options import positive, positive_list
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.config import DCPConfig
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import LOAD_TIMEOUT, Job
from dcpmla.ownership import Owner
from dcpmla.parallel.mesh import init_mesh

BLOCK_SIZE = 64
_INDEX_DIM = 128  # DeepSeek-V3.2 and GLM-5
_MADE_UP = "made up"  # the other ranks' candidates, where one process measures one rank of several
_SHARED = "shared_attention"
_MOST_DIFFERENT = 0.02  # share of the tokens: a sum in another order may exchange the last ones of topk
_SHARED_KEYS = "rows of shared keys (DeepSeek-V4), of --context, that each new token attends to; instead of the rest"


class SparseCase(NamedTuple):
    """One new token for each of `batch` requests of one length, on one of W = dcp ranks.

    Attributes:
        dcp: Ranks of the cache; rank: this one's number.
        context: Cached tokens of each request on all ranks, including the new one.
        topk: Tokens that each new token selects.
        is_shared: Whether attention is to shared keys (DeepSeek-V4), `topk` of `context` rows of a request.
    """

    batch: int
    context: int
    topk: int
    dcp: int = 1
    rank: int = 0
    is_shared: bool = False

    @property
    def sizes(self) -> Row:
        """Fields of a row."""
        return {"batch": self.batch, "context": self.context, "topk": self.topk, "dcp": self.dcp}

    @property
    def num_local(self) -> int:
        """Tokens of a request on this rank."""
        return self.owner.local_seq_lens(self.context)

    @property
    def owner(self) -> Owner:
        """This rank, as the owner of tokens."""
        return Owner(self.rank, self.dcp)

    @property
    def max_blocks(self) -> int:
        """Blocks of a request; the same on all ranks."""
        return -(-self.context // (self.dcp * BLOCK_SIZE))

    def block_tables(self, num_sets: int, device: torch.device) -> Tensor:
        """Return tables [num_sets, batch, max_blocks] int32 in which no block occurs twice."""
        shape = num_sets, self.batch, self.max_blocks
        return torch.randperm(num_sets * self.batch * self.max_blocks, device=device).view(shape).to(torch.int32)


class SelectionInputs:
    """Queries of an indexer and its cache, and each operation of a selection over them: call i takes set i % num_sets.

    Args:
        num_heads: Heads of the indexer.
        index_cache_dtype: Format of the index cache, see `DCPConfig`; dtype is the model's.
        exchange: Exchange of the DCP group; None without a group, when the other ranks' candidates are made from this
            rank's.
    Attributes:
        operations: Operations by name, in order; "selection" runs all. No "gather_candidates" where nothing moves.
        index_bytes: Bytes of the keys that one call scores.
    """

    def __init__(
        self,
        case: SparseCase,
        num_heads: int,
        index_cache_dtype: str,
        dtype: torch.dtype,
        device: torch.device,
        exchange: Exchange | None,
    ) -> None:
        self.case, self.exchange, self.index_cache_dtype, self.dtype = case, exchange, index_cache_dtype, dtype
        storage = index_storage_dtype(index_cache_dtype, dtype)
        width, num_blocks = index_row_width(storage, _INDEX_DIM), case.batch * case.max_blocks
        self.index_bytes = case.batch * case.num_local * width * storage.itemsize
        self.num_sets = num_rotated(num_blocks * BLOCK_SIZE * width * storage.itemsize, device)
        self.index_cache = torch.empty(self.num_sets * num_blocks, BLOCK_SIZE, width, dtype=storage, device=device)
        fill_slots(self.index_cache, _INDEX_DIM, dtype, write_index_keys)
        self.block_tables = case.block_tables(self.num_sets, device)
        self.q = torch.randn(self.num_sets, case.batch, num_heads, _INDEX_DIM, dtype=dtype, device=device)
        self.weights = torch.randn(self.q.shape[:3], device=device) * (num_heads * _INDEX_DIM) ** -0.5
        if index_cache_dtype == "fp8":
            self.q, scales = index_to_fp8(self.q)
            self.weights *= scales
        new: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.request = torch.arange(case.batch, **new)
        self.lens = torch.full((case.batch,), case.context, **new), torch.full((case.batch,), case.num_local, **new)
        self.selection = SelectedTokens.empty(case.batch, case.topk, device)
        # Inputs of single operations, from those before them. As in a step, they may be found in the L2.
        self._scores = [self.score(index) for index in range(self.num_sets)]
        self._candidates = [self.nominate(scores) for scores in self._scores]
        self._of_ranks = [
            self._made_up(candidates) if exchange is None else exchange.gather_candidates(candidates).clone()
            for candidates in self._candidates
        ]

    @property
    def operations(self) -> dict[str, Operation]:
        def over(operation: Callable[[Tensor], object], inputs: list[Tensor]) -> Operation:
            return lambda index: operation(inputs[index % self.num_sets])

        gather: dict[str, Operation] = {}
        if self.exchange is not None and not isinstance(self.exchange, LocalExchange):
            gather["gather_candidates"] = over(self.exchange.gather_candidates, self._candidates)
        return {
            "index_scores": self.score,
            "local_candidates": over(self.nominate, self._scores),
            **gather,
            "choose_tokens": lambda index: self.choose(index, self._of_ranks[index % self.num_sets]),
            "selection": self.select,
        }

    def score(self, index: int) -> Tensor:
        """Score this rank's keys."""
        number = index % self.num_sets
        keys = self.index_cache, self.block_tables[number], self.request, *self.lens
        return index_scores(IndexQueries(self.q[number], self.weights[number], *keys, self.case.topk))

    def nominate(self, scores: Tensor) -> Tensor:
        """Return this rank's candidates [T, k]."""
        case = self.case
        return local_candidates(scores, *self.lens, case.topk, case.owner)

    def choose(self, index: int, candidates: Tensor) -> None:
        """Choose tokens among all ranks' candidates [T, W, k]."""
        self._choose(candidates, self.block_tables[index % self.num_sets], self.request, self.selection)

    def _choose(self, candidates: Tensor, table: Tensor, request: Tensor, selection: SelectedTokens) -> None:
        case = self.case
        layout = SlotLayout(table, request, BLOCK_SIZE, case.owner)
        choose_tokens(candidates.flatten(1), layout, selection)

    def select(self, index: int) -> None:
        """Run all operations."""
        candidates = self.nominate(self.score(index))
        exchange, made_up = self.exchange, self._of_ranks[index % self.num_sets]
        self.choose(index, made_up if exchange is None else exchange.gather_candidates(candidates))

    def difference(self) -> float:
        """Return the share of the tokens selected for the last request of the first set that the operators' torch code
        would not select.
        """
        case, last = self.case, slice(-1, None)
        self.select(0)
        lens = self.lens[0][last], self.lens[1][last]
        # Float32 queries are scored by torch code on a GPU too; the other operations have it on CPUs alone.
        keys = self.index_cache, self.block_tables[0], self.request[last], *lens
        scores = index_scores(IndexQueries(self.q[0, last].float(), self.weights[0, last], *keys, case.topk)).cpu()
        candidates = self._of_ranks[0][last].cpu().clone()
        candidates[:, case.rank] = local_candidates(scores, lens[0].cpu(), lens[1].cpu(), case.topk, case.owner)
        answer = SelectedTokens.empty(1, case.topk, "cpu")
        self._choose(candidates, self.block_tables[0].cpu(), self.request[last].cpu(), answer)
        pairs = zip(_tokens(self.selection.rows(last)), _tokens(answer), strict=True)
        return max(len(selected ^ expected) for selected, expected in pairs) / (2 * case.topk)

    def _made_up(self, candidates: Tensor) -> Tensor:
        """Return [T, W, k] from rank 0's candidates [T, k]: the other ranks' have the same local indices, and scores a
        little higher.
        """
        num_ranks, device, own = self.case.dcp, candidates.device, candidates[:, None]
        increments = torch.randint(1 << 16, (len(candidates), num_ranks, candidates.shape[1]), device=device)
        increments[:, 0] = 0  # the others are under 1 % of a score
        rank = torch.arange(num_ranks, device=device)[:, None]
        return (own + (increments << 32) - rank).masked_fill(own == EMPTY, EMPTY)


def _tokens(selection: SelectedTokens) -> tuple[set[int], set[int]]:
    """Return the positions, and the slots on this rank, that one token selected."""
    return set(selection.positions[0].tolist()), set(selection.slots[0, : int(selection.num_slots)].tolist())


class SelectedRows(Caches):
    """A cache of single rows, as `selected_rows` makes it of blocks, and many selections from it, as its block tables.

    A request's selected tokens are spread over its context. This rank has about topk / W, at least one: the same
    number in every selection, and different tokens until nearly all had their turn.

    Attributes:
        blocks: Blocks [num_blocks, BLOCK_SIZE, row_width]; shared keys of the model's dtype as `rows`.
        rows: Rows [num_sets, num_rows, 1, row_width], or shared keys in pages, the same rows in each set.
        block_tables: Slots [num_sets, batch, topk] int32, -1 past the last.
        num_slots: Numbers of slots [batch] int32.
    """

    def __init__(self, case: SparseCase, dtype: torch.dtype, device: torch.device, kv_cache_dtype: str) -> None:
        self.dtype, self.kv_cache_dtype = dtype, kv_cache_dtype
        storage = storage_dtype(kv_cache_dtype, dtype)
        self.kv_scale = kv_scale_of(storage, device)
        num_blocks = case.batch * case.max_blocks
        width = formats.row_width(storage, LATENT_DIM, ROPE_DIM)
        if case.is_shared:
            self.head_dim = LATENT_DIM

        def shape_of(num_rows: int) -> tuple[int, ...]:
            if case.is_shared:
                return shared_format.rows_shape(num_rows, LATENT_DIM, storage)
            return num_rows // BLOCK_SIZE, BLOCK_SIZE, width

        row_bytes = math.prod(shape_of(BLOCK_SIZE)) // BLOCK_SIZE * storage.itemsize
        num_caches = num_rotated(num_blocks * BLOCK_SIZE * row_bytes, device)
        num_sets = num_rotated(-(-case.batch * case.topk // case.dcp) * row_bytes, device)
        self.blocks = torch.empty(shape_of(num_caches * num_blocks * BLOCK_SIZE), dtype=storage, device=device)
        if case.is_shared:
            fill_slots(self.blocks, LATENT_DIM, dtype, write_rows)
        else:
            fill_randomly(self.blocks, LATENT_DIM, dtype)
        rows = self.blocks if case.is_shared else self.blocks.view(-1, 1, width)
        self.rows = rows.expand(num_sets, *rows.shape)
        is_mine = torch.rand(case.batch, case.topk, device=device) * case.dcp < 1
        self.num_slots = is_mine.sum(1).clamp(1, case.num_local).to(torch.int32)
        self.block_tables = self._select(case, num_sets, case.block_tables(num_caches, device).long())

    def _select(self, case: SparseCase, num_sets: int, tables: Tensor) -> Tensor:
        stride = case.num_local // int(self.num_slots.max())
        number = torch.arange(case.topk, device=tables.device)
        offset = torch.randint(stride, (case.batch, case.topk), device=tables.device)
        selections = []
        for index in range(num_sets):
            turn, table = index // len(tables), tables[index % len(tables)]
            token = (number * stride + (offset + turn) % stride).clamp(max=case.num_local - 1)
            slots = table.gather(1, token // BLOCK_SIZE) * BLOCK_SIZE + token % BLOCK_SIZE
            selections.append(slots.masked_fill(number >= self.num_slots[:, None], -1).to(torch.int32))
        return torch.stack(selections)


def attention_inputs(case: SparseCase, num_heads: int, rows: SelectedRows) -> DecodeInputs:
    """Return queries of all heads of the group, over the tokens selected for them that this rank owns."""
    inputs = DecodeInputs(DecodeCase(case.batch, case.topk, num_heads, 1, rows.kv_cache_dtype), rows)
    inputs.selected_blocks, inputs.seq_lens, inputs.block_size = rows.blocks, rows.num_slots, 1
    return inputs


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
        return {**exchanges_of(self.args.dcp_comm_backend, ("a2a",), init_mesh(num_ranks, dcp).dcp_group, device)}

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
            decode = attention_inputs(case.load, heads, inputs)
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
