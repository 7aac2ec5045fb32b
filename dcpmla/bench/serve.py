"""Serve a synthetic load under one or more DCP sizes with the same cache bytes on each rank: how many requests fit, and
how fast.
"""

import argparse
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch

from dcpmla.bench.load import Load, add_load, check_lengths, engine_fields, make_load, request_rate, served_row
from dcpmla.bench.options import single
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark
from dcpmla.cache.latent import num_blocks
from dcpmla.cli.options import add_engine_arguments, build_engine, dcp_config, positive, positive_list, seed
from dcpmla.config import DCPConfig
from dcpmla.integrations.open_model import check_layout, open_model
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import Job
from dcpmla.llm import run_with_bar
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.stats import Stats

_NUM_WARM_UPS = 8  # requests
_WARM_UP_OUTPUT_LEN = 16  # most new tokens of one
_OPTIONS = (
    *("block_size", "cp_kv_cache_interleave_size", "dcp_q_replicate", "dcp_project_before_merge", "decode_query_dtype"),
    *("index_cache_dtype", "index_hadamard", "enable_expert_parallel", "max_num_batched_tokens", "max_num_seqs"),
    *("enforce_eager", "num_requests", "input_lens", "output_lens", "seed"),
)


class Layout(NamedTuple):
    """Ranks that share a cache."""

    dcp: int


class Serve(Benchmark[Layout, None]):
    """The same load under each DCP size."""

    ranks_of = "tp"
    has_engine = True
    options = {
        "request_rate": single(request_rate, "inf", "R", "requests a second, Poisson; inf: all at once"),
        "num_requests": single(positive, 200, "N", "requests of the load"),
        "input_lens": single(positive_list, "512,2048", "A,B", "tokens of a prompt are one of these"),
        "output_lens": single(positive_list, "64,256", "A,B", "new tokens of a request are one of these"),
        "seed": {"type": seed, "default": 0, "help": "of arrivals, lengths and tokens"},
    }

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.files = open_model(args.model, args.max_model_len, args.revision)
        self.load = self._make_load(args.num_requests, args.request_rate, args.output_lens, args.seed)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_engine_arguments(parser, positive_list)
        super().add_arguments(parser)

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        files = open_model(args.model, args.max_model_len, args.revision)
        for dcp in _dcp_configs(args):
            check_layout(files, dcp)
        check_lengths(files, {"--input-lens": max(args.input_lens), "--output-lens": max(args.output_lens)})

    def cases(self) -> Iterator[Layout]:
        return map(Layout, dict.fromkeys(self.args.decode_context_parallel_size))

    def measure(self, case: Layout, inputs: None) -> list[Row]:
        gc.collect()  # a model refers to itself: the memory of the last one is wanted now
        torch.cuda.empty_cache()
        args = self.args
        engine, chosen = build_engine(args, self.job, dcp_config(args, case.dcp), self.files, None)
        with closing(engine):
            self._check_room(engine)
            args.kv_cache_memory_bytes = engine.cache.sizes.bytes_per_rank  # the same under every size
            self._serve(engine, "warm-up", self._warm_up())
            engine.stats = Stats()
            served = self._serve(engine, "load", self.load)
        rate = args.request_rate if math.isfinite(args.request_rate) else "inf"  # as JSON can hold it
        return [{**engine_fields(args, engine, chosen.exchange.name, _OPTIONS), "request_rate": rate, **served}]

    def _check_room(self, engine: Engine) -> None:
        """Raise ValueError unless the longest request fits under all sizes, before any is served."""
        longest, sizes = max(self.load.seq_lens), engine.cache.sizes
        for dcp in _dcp_configs(self.args):
            if num_blocks(longest, dcp) > sizes.num_blocks:
                room = sizes.num_blocks * dcp.virtual_block_size
                room_text = (
                    f"{sizes.bytes_per_rank:,} bytes a rank hold {room:,} with -dcp {dcp.decode_context_parallel_size}"
                )
                hint = "raise --kv-cache-memory-bytes, or shorten --input-lens or --output-lens"
                raise ValueError(f"cache: the longest request has {longest:,} tokens, but {room_text}; {hint}")

    def _warm_up(self) -> Load:
        """Return a few requests at once, of other tokens than the load's, so that compilation, connections and first
        allocations do not count.
        """
        output_lens = [min(_WARM_UP_OUTPUT_LEN, length) for length in self.args.output_lens]
        return self._make_load(_NUM_WARM_UPS, math.inf, output_lens, self.args.seed + 1)

    def _make_load(self, num_requests: int, rate: float, output_lens: Sequence[int], seed: int) -> Load:
        return make_load(num_requests, rate, self.args.input_lens, output_lens, self.files.config.vocab_size, seed)

    def _serve(self, engine: Engine, name: str, load: Load) -> Row:
        self.job.watchdog.enter("queueing the load")
        requests = add_load(engine, load)
        steps = run_with_bar(engine, f"dcp {engine.mesh.dcp_size}, {name}", len(requests), self.job.ranks.is_first)
        for _ in steps:
            pass
        return served_row(engine, requests)

    def summary(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield a table: a line for each name, a column for each DCP size."""
        cells = [[name, *(_cell(row[name]) for row in rows)] for name in rows[0]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for name, *values in cells:
            yield "  ".join([name.ljust(widths[0]), *map(str.rjust, values, widths[1:])])


def _dcp_configs(args: argparse.Namespace) -> list[DCPConfig]:
    return [dcp_config(args, size) for size in dict.fromkeys(args.decode_context_parallel_size)]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool | str):
        return "-" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
