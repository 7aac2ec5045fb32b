"""Measure sparse MLA's decode under DCP: the selection of tokens, operation by operation, and attention to selected
ones.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dcpmla.bench.exchange_inputs import exchange_of
from dcpmla.bench.plots import check_outputs
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.runner import measurement, memory_on_all
from dcpmla.bench.sparse_inputs import SelectedRows, SelectionInputs, SparseCase
from dcpmla.bench.sparse_kernels import MakePeer, load_flashmla
from dcpmla.bench.sparse_rows import attention_row, is_right, selection_row
from dcpmla.bench.timing import TimeLimit, largest
from dcpmla.cache.capacity import FORMATS
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, start
from dcpmla.cli.values import exchange_list, name_list, positive, positive_list, seconds
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.comm.reach import reach
from dcpmla.config import DCP_COMM_BACKENDS, INDEX_CACHE_DTYPES, DCPConfig
from dcpmla.job.bootstrap import Ranks, agree
from dcpmla.parallel.mesh import init_mesh

_MADE_UP = "made up"  # the other ranks' candidates, where one process stands for one rank of several
_RATIO = {"selection": "speedup_over_dcp_1", "attention": "speedup_over_flashmla"}
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "-tp",
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="ranks of the job; 1 measures one rank of each -dcp",
    )
    add(
        "-dcp",
        "--decode-context-parallel-size",
        type=positive_list,
        default="1,2,4,8",
        metavar="D,...",
        help="ranks that share a cache",
    )
    backends = f"of {', '.join(DCP_COMM_BACKENDS)}; default: a2a, and direct where ranks have NVLink"
    add("--dcp-comm-backend", type=exchange_list, metavar="NAME,...", help=backends)
    add("--batch", type=positive_list, default="1,8,32,64,128", metavar="B,...", help="requests, one new token each")
    add(
        "--context",
        type=positive_list,
        default="8192,32768,131072,524288",
        metavar="S,...",
        help="cached tokens of each request",
    )
    add("--num-heads", type=positive_list, default="128", metavar="H,...", help="of attention, all of the DCP group's")
    add("--topk", type=positive, default=2048, metavar="K", help="tokens that each new token selects")
    add("--index-heads", type=positive, default=64, metavar="H", help="of the indexer")
    names = f"of {', '.join(INDEX_CACHE_DTYPES)}; auto: the model's dtype"
    add("--index-cache-dtype", type=_index_formats, default="auto,fp8", metavar="NAME,...", help=names)
    names = f"of {', '.join(FORMATS)}; bf16 stands for rows that are not quantized"
    add("--kv-cache-dtype", type=_cache_formats, default="bf16,fp8_ds_mla", metavar="NAME,...", help=names)
    add(
        "--peers",
        type=Path,
        metavar="DIR",
        help="directory with peers.py and FlashMLA's library, for a job of one rank",
    )
    add("--time-limit", type=seconds, default=450, metavar="S", help="seconds after which no further case is begun")
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write a row for each selection and each attention")
    add_commit_argument(parser)


def _index_formats(text: str) -> list[str]:
    return name_list(text, INDEX_CACHE_DTYPES, "an index cache's format")


def _cache_formats(text: str) -> list[str]:
    return name_list(text, FORMATS, "a cache format")


def run(args: argparse.Namespace) -> None:
    """Measure on the ranks of the job, report. Every rank calls it; the first one reports."""
    with start(args) as job, torch.inference_mode():
        ranks = job.ranks
        with agree():
            _check(args, ranks)
        if ranks.is_first:
            print(f"ranks: {ranks.origin}", flush=True)
        rows = []
        for row in _measure(args, job):
            rows.append(row)
            if ranks.is_first:
                print(_line(row), flush=True)
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if ranks.is_first:
            print("\n".join(_summary(rows)))
            if args.json:
                write_results(args.json, rows, ranks.num_ranks, ranks.device, args.commit)


def _check(args: argparse.Namespace, ranks: Ranks) -> None:
    """Raise ValueError for options that contradict each other, and for files that cannot be."""
    if ranks.num_ranks > 1:
        for dcp in args.decode_context_parallel_size:
            DCPConfig(tensor_parallel_size=ranks.num_ranks, decode_context_parallel_size=dcp)
    if min(args.context) <= args.topk:
        raise ValueError(
            f"--context has {min(args.context)} and --topk is {args.topk}; there must be more tokens than are selected"
        )
    if min(args.context) < max(args.decode_context_parallel_size):
        sizes = f"--context has {min(args.context)} and -dcp {max(args.decode_context_parallel_size)}"
        raise ValueError(f"{sizes}; each rank must have a token")
    if args.peers is not None and ranks.num_ranks > 1:
        raise ValueError(
            f"--peers measures one device, but {ranks.num_ranks} ranks were started; start one, or leave it out"
        )
    if args.peers is not None and not (args.peers / "peers.py").is_file():
        raise ValueError(f"--peers is {args.peers}, which has no peers.py; give the directory that has it")
    if ranks.is_first:
        check_outputs(args.json, None)


def _measure(args: argparse.Namespace, job: Job) -> Iterator[Row]:
    """The rows of one case after the other, until time is over: the smallest DCP size first, which others are set
    against.
    """
    device = job.ranks.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    job.watchdog.enter("loading the peer", LOAD_TIMEOUT)
    make_peer = _load_peer(args.peers) if args.peers else None
    exchanges = {dcp: _find_exchanges(args, job.ranks, dcp) for dcp in sorted(set(args.decode_context_parallel_size))}
    limit = TimeLimit(args.time_limit, device)
    for batch, context in product(dict.fromkeys(args.batch), dict.fromkeys(args.context)):
        unsharded_us: dict[str, float] = {}
        for dcp, of_backends in exchanges.items():
            case = SparseCase(batch, context, args.topk, dcp, job.ranks.rank % dcp)
            name = f"{batch} x {context:,}, dcp {dcp}"
            if limit.is_over():
                if job.ranks.is_first:
                    print(f"time is over (--time-limit): {name} and what follows is left out", flush=True)
                return
            for kv_format in args.kv_cache_dtype:
                with measurement(args, job, f"attention of {name}, {kv_format} cache"):
                    with memory_on_all():
                        selected = SelectedRows(case, dtype, device, kv_format)
                        rows = [
                            attention_row(case, num_heads, selected, make_peer, device)
                            for num_heads in dict.fromkeys(args.num_heads)
                        ]
                        del selected
                    yield from rows
            for index_format, (backend, exchange) in product(args.index_cache_dtype, of_backends.items()):
                with measurement(args, job, f"selection of {name}, {index_format} index cache, {backend}"):
                    with memory_on_all():
                        inputs = SelectionInputs(case, args.index_heads, index_format, dtype, device, exchange)
                        row = selection_row(inputs, backend, unsharded_us.get(index_format), device)
                        del inputs  # before the next ones are made
                    if dcp == 1:
                        unsharded_us[index_format] = row["selection_us"]
                    yield row


def _load_peer(directory: Path) -> MakePeer | None:
    try:
        return load_flashmla(directory)
    except Exception as error:  # others' code: whatever it raises, we measure without it
        print(f"left out: flashmla: {str(error).strip().partition(chr(10))[0] or type(error).__name__}", flush=True)
        return None


def _find_exchanges(args: argparse.Namespace, ranks: Ranks, dcp: int) -> dict[str, Exchange | None]:
    """Of a DCP size, by backend. Collective over the job."""
    if dcp == 1:
        return {LocalExchange.name: LocalExchange()}
    if ranks.num_ranks == 1:
        return {_MADE_UP: None}
    group = init_mesh(ranks.num_ranks, dcp).dcp_group
    is_apart = largest(bool(reach(group, ranks.device)), ranks.device)  # some group's ranks: all ranks measure the same
    backends = args.dcp_comm_backend or ["a2a", *([] if is_apart else ["direct"])]
    return {backend: exchange_of(group, ranks.device, dcp_comm_backend=backend) for backend in backends}


def _name(row: Row) -> str:
    """Of what is compared with its like over batches and contexts, for people."""
    if row["part"] == "attention":
        return f"attention, dcp {row['dcp']}, {row['num_heads']} heads, {row['kv_cache_dtype']} cache"
    return f"selection, dcp {row['dcp']}, {row['dcp_comm_backend']}, {row['index_cache_dtype']} index cache"


def _line(row: Row) -> str:
    times = "  ".join(
        f"{key.removesuffix('_us')} {row[key]:>8,.1f}" for key in row if key.endswith("_us") and row[key] is not None
    )
    rate = f"  {row['index_gb_per_s']:>7,.1f} GB/s" if row["part"] == "selection" else ""
    ratio = f"  {row[_RATIO[row['part']]]:.2f} x" if row[_RATIO[row["part"]]] is not None else ""
    load = f"{row['batch']} x {row['context']:,}"
    return f"{_name(row):<46} {load:>14}  us: {times}{rate}{ratio}{'' if is_right(row) else '  WRONG'}"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """Wrong results, and how much faster selections are than under a DCP size of 1, and attention than the peer, over
    all cases.
    """
    for name in dict.fromkeys(map(_name, rows)):
        mine = [row for row in rows if _name(row) == name]
        key = _RATIO[mine[0]["part"]]
        ratios = [row[key] for row in mine if row[key] is not None]
        other = key.removeprefix("speedup_over_").replace("_", " ")
        found = (
            f"; {median(ratios):.2f} x {other}'s speed in the median, {min(ratios):.2f} x to {max(ratios):.2f} x"
            if ratios
            else ""
        )
        yield f"{name}: {sum(not is_right(row) for row in mine)} of {len(mine)} wrong{found}"
