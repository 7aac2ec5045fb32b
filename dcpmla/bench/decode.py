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

import torch

from dcpmla.bench.cache_formats import query_dtypes
from dcpmla.bench.ceilings import measure_ceilings
from dcpmla.bench.decode_inputs import Caches, DecodeCase, DecodeInputs
from dcpmla.bench.options import directory_of, named, single
from dcpmla.bench.peers import OURS, PEERS, AttentionKernels, Formats, attention_limits, check_peers, load_kernels
from dcpmla.bench.plots import Panel, draw_panels, select
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.words import named as name_of_fields
from dcpmla.cli.options import positive
from dcpmla.config import DECODE_QUERY_DTYPES
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import LOAD_TIMEOUT, Job

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_KERNELS = [*OURS, *PEERS]
_DEFAULT = "default: dcpmla, and with --peers all of theirs"
_DTYPE = "of what is not quantized; default: bfloat16 on GPUs, float32 on CPUs"


class Decode(Benchmark[DecodeCase, DecodeInputs]):
    """Every kernel on the same inputs, case by case."""

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
    series = ("kernel", "kv_cache_dtype", "decode_query_dtype")
    sample_seconds = 0.1
    limits = staticmethod(attention_limits)

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.dtype = _DTYPES[args.dtype] if args.dtype else self.dtype
        job.watchdog.enter("loading the kernels", LOAD_TIMEOUT)
        names = args.kernels or ["dcpmla", *(PEERS if args.peers else ())]
        names = [name for name in names if name in OURS or _measures(args, PEERS[name])]
        self.kernels = AttentionKernels(self, dict(load_kernels(names, args.peers)))
        self.ceilings = measure_ceilings(self.device, self.dtype)

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
        """Return a row for each kernel that takes the case; ours with ratios to the peers and to their plain rows."""
        rows = self.kernels.rows(case._asdict(), inputs, {"block_size": self.args.block_size}, counts=True)
        plain = case._replace(kv_cache_dtype="bf16", decode_query_dtype="auto")
        for row in (row for row in rows if row["kernel"] in OURS and not self.wrong(row)):
            row.update(self.speedup_over("bf16", (row["kernel"], plain), row["median_us"], case == plain))
        return rows

    @classmethod
    def plot(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw every kernel's share of the floor's speed over the cached tokens of all requests, for each number of
        heads and the fewest new tokens. A kernel measured over several formats is drawn once for each.
        """
        query_len, kernel = min(row["query_len"] for row in rows), rows[0]["kernel"]
        share = median(row["floor_share"] for row in select(rows, kernel=kernel))
        names = "cached tokens of all requests", "share of the floor's speed"
        panels = [
            Panel(f"{heads} heads, new tokens: {query_len}", shown, _num_cached, itemgetter("floor_share"), names)
            for heads in sorted({row["heads"] for row in rows})
            for shown in [select(rows, heads=heads, query_len=query_len)]
        ]
        title = f"{kernel}: {share:.0%} of the floor's speed in the median"
        draw_panels(path, title, panels, partial(name_of_fields, cls.series))


def _measures(args: argparse.Namespace, formats: Formats) -> bool:
    """Return whether any case has a peer's formats."""
    queries = query_dtypes(formats.kv_cache_dtype, args.decode_query_dtype)
    return formats.kv_cache_dtype in args.kv_cache_dtype and formats.decode_query_dtype in queries


def _num_cached(row: Row) -> int:
    return row["batch"] * row["context"]
