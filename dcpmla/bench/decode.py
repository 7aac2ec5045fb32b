"""Measure decode kernels on one GPU, ours beside FlashMLA, FlashAttention-3 and FlashInfer: times, share of the floor,
ratios, errors.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dcpmla.bench.cache_formats import add_cache_arguments, quantized_name, query_dtypes
from dcpmla.bench.decode_inputs import Answer, Caches, Ceilings, DecodeCase, DecodeInputs, measure_ceilings
from dcpmla.bench.decode_kernels import OURS, PEERS, MakeKernel, Peer, load_kernel
from dcpmla.bench.kernel_plots import best_peer_ratio, kernel_name, plot_decode
from dcpmla.bench.plots import check_outputs
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.runner import measurement, memory_on_all, num_samples
from dcpmla.bench.timing import TimeLimit, Timing, time_with_result
from dcpmla.cli.options import LOAD_TIMEOUT, Job, add_job_arguments, join
from dcpmla.cli.values import positive, positive_list, seconds
from dcpmla.job.bootstrap import agree
from dcpmla.job.faults import is_out_of_memory
from dcpmla.job.launcher import LaunchInfo

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of out or lse, by the queries' dtype; a kernel beyond computes something else. Products in bfloat16 stay under 0.005,
# whatever the cache. Those of e4m3 round the probabilities too, by up to 1/16 each: of these inputs 1.7 % of the
# output, 2.2 % if small
# ones are denormals.
_LARGEST_ERROR = {"auto": 0.02, "fp8": 0.04}
_SAMPLE_SECONDS = 0.1  # that the samples of one kernel may take
_FEWEST_CALLS = 4  # of a sample
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "--peers",
        type=Path,
        metavar="DIR",
        help="directory with peers.py and the libraries of FlashMLA and FlashAttention-3",
    )
    names = ", ".join([*OURS, *PEERS])
    add(
        "--kernels",
        type=_kernels,
        metavar="NAME,...",
        help=f"of {names}; default: dcpmla, and with --peers all of theirs",
    )
    add("--heads", type=positive_list, default="16,64,128", metavar="H,...")
    add("--batch", type=positive_list, default="1,8,32,128", metavar="B,...", help="requests")
    add(
        "--context",
        type=positive_list,
        default="1024,4096,16384,65536",
        metavar="S,...",
        help="cached tokens of each request",
    )
    add("--query-len", type=positive_list, default="1,2,4", metavar="Q,...", help="new tokens of each request, causal")
    add("--block-size", type=positive, default=64, metavar="P", help="tokens of a cache block")
    add("--dtype", choices=tuple(_DTYPES), help="of what is not quantized; default: bfloat16 on GPUs, float32 on CPUs")
    add_cache_arguments(parser)
    add("--time-limit", type=seconds, default=450, metavar="S", help="seconds after which no further case is begun")
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write a row for each case and kernel")
    add("--plot", type=Path, metavar="OUT.png", help="draw shares of the floor and ratios; needs the extra plot")
    add_commit_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Measure every case with every kernel, report."""
    with join(args, _check_alone) as job, torch.no_grad():
        device = job.ranks.device
        with agree():
            names = _check(args)
        dtype = _DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
        limit = TimeLimit(args.time_limit, device)
        job.watchdog.enter("loading the kernels", LOAD_TIMEOUT)
        benchmark = _Benchmark(
            _load(names, args.peers), measure_ceilings(device, dtype), args.block_size, dtype, device
        )
        rows = []
        for case_rows in _measure(args, job, benchmark, limit):
            rows += case_rows
            print(_line(case_rows), flush=True)
        print("\n".join(_summary(rows)))
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if args.json:
            write_results(args.json, rows, 1, device, args.commit, {"ceilings": asdict(benchmark.ceilings)})
        if args.plot and rows:
            plot_decode(
                args.plot, rows, f"decode kernels, {str(dtype).removeprefix('torch.')}, blocks of {args.block_size}"
            )


def _check_alone(launch: LaunchInfo) -> None:
    if launch.num_ranks != 1:
        raise ValueError(f"bench decode measures one device, but {launch.num_ranks} ranks were started; start one")


def _kernels(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in (*OURS, *PEERS):
            raise argparse.ArgumentTypeError(f"{name!r} is not a kernel; choose from {', '.join([*OURS, *PEERS])}")
    return names


def _check(args: argparse.Namespace) -> list[str]:
    """The kernels to measure.

    Raises:
        ValueError: options that contradict each other, or files that cannot be.
    """
    check_outputs(args.json, args.plot)
    names: list[str] = args.kernels or (["dcpmla", *PEERS] if args.peers else ["dcpmla"])
    wanted = [name for name in names if name in PEERS]
    if wanted and args.peers is None:
        raise ValueError(f"--kernels has {wanted[0]}, which is loaded from --peers; give --peers DIR")
    unread = [name for name in wanted if not _is_read(PEERS[name], args)]
    if unread and args.kernels:
        formats = f"--kv-cache-dtype {PEERS[unread[0]].kv_cache_dtype} and --decode-query-dtype {PEERS[unread[0]].decode_query_dtype}"
        raise ValueError(f"--kernels has {unread[0]}, which reads what {formats} gives; add them, or leave it out")
    if args.peers is not None and not (args.peers / "peers.py").is_file():
        raise ValueError(f"--peers is {args.peers}, which has no peers.py; give the directory that has it")
    if max(args.query_len) > min(args.context):
        raise ValueError(
            f"--query-len has {max(args.query_len)} and --context {min(args.context)}; new tokens are part of the context"
        )
    return [name for name in names if name not in unread]


def _is_read(peer: Peer, args: argparse.Namespace) -> bool:
    """Whether some case is of the formats that a peer reads."""
    asked = query_dtypes(peer.kv_cache_dtype, args.decode_query_dtype)
    return peer.kv_cache_dtype in args.kv_cache_dtype and peer.decode_query_dtype in asked


def _load(names: Sequence[str], peers: Path | None) -> dict[str, MakeKernel]:
    """The kernels that can be had here; a line on each that cannot."""
    kernels = {}
    for name in names:
        try:
            kernels[name] = load_kernel(name, peers)
        except Exception as error:  # others' code: whatever it raises, we measure without it
            _leave_out(name, error)
    return kernels


def _leave_out(name: str, error: Exception) -> None:
    print(f"left out: {name}: {str(error).strip().partition(chr(10))[0] or type(error).__name__}", flush=True)


class _Benchmark:
    """The kernels under test, and what one case makes of them."""

    def __init__(
        self,
        kernels: dict[str, MakeKernel],
        ceilings: Ceilings,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kernels, self.ceilings = kernels, ceilings
        self.block_size, self.dtype, self.device = block_size, dtype, device
        self.refused: set[str] = set()  # kernels that did not take some case, which is said once
        self.plain_us: dict[tuple[str, DecodeCase], float] = {}  # of our kernels over plain rows

    def rows(self, case: DecodeCase, caches: Caches) -> list[Row]:
        """A row for each kernel that takes the case; ours with their ratios to the peers'."""
        inputs = DecodeInputs(case, caches)
        calls = len(caches) * -(-_FEWEST_CALLS // len(caches))
        answer = Answer(inputs, calls - 1)
        rows = []
        for name, make in self.kernels.items():
            if name in PEERS and not PEERS[name].reads(case):
                continue
            try:
                kernel = make(inputs)
                timing, (out, lse) = time_with_result(
                    kernel.launch, self.device, calls, num_samples(self.device), _SAMPLE_SECONDS
                )
            except Exception as error:
                if name in OURS and not (isinstance(error, ValueError) or is_out_of_memory(error)):
                    raise
                if name not in self.refused:
                    self.refused.add(name)
                    _leave_out(f"{name} of {_words(case)}", error)
                continue
            rows.append(self._row(name, inputs, timing, answer.errors(*kernel.result(out, lse))))
        return self._with_ratios(rows, case)

    def _with_ratios(self, rows: list[Row], case: DecodeCase) -> list[Row]:
        """Ours with `speedup_over_<peer>`, the peer's time over ours, or its own over bf16, where both are right."""
        peers = {row["kernel"]: row["median_us"] for row in rows if row["kernel"] in PEERS and is_right(row)}
        plain_case = replace(case, kv_cache_dtype="bf16", decode_query_dtype="auto")
        for row in (row for row in rows if row["kernel"] in OURS and is_right(row)):
            others = dict(peers)
            if case == plain_case:
                self.plain_us[row["kernel"], case] = row["median_us"]
            elif (row["kernel"], plain_case) in self.plain_us:
                others["bf16"] = self.plain_us[row["kernel"], plain_case]
            row.update({f"speedup_over_{name}": round(us / row["median_us"], 3) for name, us in others.items()})
        return rows

    def _row(self, name: str, inputs: DecodeInputs, timing: Timing, errors: tuple[float, float]) -> Row:
        case, us = inputs.case, timing.median_us
        floor_us = self.ceilings.floor_us(case, self.dtype.itemsize)
        error, lse_error = (error if math.isfinite(error) else None for error in errors)  # JSON has no NaN
        return {
            "kernel": name,
            "num_heads": case.num_heads,
            "batch": case.batch,
            "context": case.context,
            "query_len": case.query_len,
            "block_size": self.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_cache_dtype": case.kv_cache_dtype,
            "decode_query_dtype": case.decode_query_dtype,
            "num_sets": len(inputs.caches),
            "in_graph": timing.in_graph,
            "median_us": round(us, 2),
            "tflops": round(case.flops / us / 1e6, 2),
            "gb_per_s": round(case.num_bytes(self.dtype.itemsize) / us / 1e3, 1),
            "floor_us": round(floor_us, 2),
            "floor_share": round(floor_us / us, 4),
            "error": error,
            "lse_error": lse_error,
        }


def _measure(args: argparse.Namespace, job: Job, benchmark: _Benchmark, limit: TimeLimit) -> Iterator[list[Row]]:
    """The rows of one case after the other, until time is over.

    The caches of one size and format serve all its heads and queries.
    """
    for batch, context, kv_cache_dtype in product(
        dict.fromkeys(args.batch), dict.fromkeys(args.context), args.kv_cache_dtype
    ):
        with measurement(args, job, f"{batch} x {context:,} cached tokens in {kv_cache_dtype}"):
            with memory_on_all():
                caches = Caches(batch, context, args.block_size, benchmark.dtype, benchmark.device, kv_cache_dtype)
            try:
                queries = query_dtypes(kv_cache_dtype, args.decode_query_dtype)
                for num_heads, query_len, query_dtype in product(
                    dict.fromkeys(args.heads), dict.fromkeys(args.query_len), queries
                ):
                    case = DecodeCase(batch, context, num_heads, query_len, kv_cache_dtype, query_dtype)
                    if limit.is_over():
                        print(f"time is over (--time-limit): {_words(case)} and what follows is left out", flush=True)
                        return
                    with memory_on_all():
                        rows = benchmark.rows(case, caches)
                    yield rows
            finally:
                del caches  # before the next ones are made


def is_right(row: Row) -> bool:
    """Whether a kernel computed what it should."""
    limit = _LARGEST_ERROR[row["decode_query_dtype"]]
    return all(row[key] is not None and row[key] <= limit for key in ("error", "lse_error"))


def _words(case: DecodeCase) -> str:
    sizes = f"{case.batch} x {case.context:,}, {case.num_heads} heads, {case.query_len} new"
    return ", ".join(filter(None, [sizes, quantized_name(case.kv_cache_dtype, case.decode_query_dtype)]))


def _line(rows: Sequence[Row]) -> str:
    if not rows:
        return "no kernel took this case"
    first = rows[0]
    load = f"{first['batch']} x {first['context']:,}"
    cells = [
        f"{row['kernel']} {row['median_us']:>8,.1f} us {row['floor_share']:>4.0%}{'' if is_right(row) else ' WRONG'}"
        for row in rows
    ]
    ratios = [f"{row['kernel']} {best:.2f} x the best peer's speed" for row in rows if (best := best_peer_ratio(row))]
    ratios += [f"{row['speedup_over_bf16']:.2f} x its own in bf16" for row in rows if "speedup_over_bf16" in row]
    case = f"{load:>14}  heads {first['num_heads']:>3}  new {first['query_len']}  floor {first['floor_us']:>8,.1f} us"
    return "  ".join(
        [case, *filter(None, [quantized_name(first["kv_cache_dtype"], first["decode_query_dtype"])]), *cells, *ratios]
    )


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """For each kernel and format its share of the floor and its wrong results; for ours also the ratios, over all
    cases.
    """
    for name in dict.fromkeys(map(kernel_name, rows)):
        mine = [row for row in rows if kernel_name(row) == name]
        shares, num_wrong = [row["floor_share"] for row in mine], sum(not is_right(row) for row in mine)
        yield f"{name}: {median(shares):.0%} of the floor's speed in the median of {len(mine)} cases, {num_wrong} of them wrong"
        for other in (*PEERS, "bf16"):
            ratios = [row[f"speedup_over_{other}"] for row in mine if f"speedup_over_{other}" in row]
            if ratios:
                yield f"{name} against {other}: {median(ratios):.2f} x in the median, {min(ratios):.2f} x to {max(ratios):.2f} x"
