"""Measure a layer's step of turns: a few new tokens of each request after a long cached context, by both routes of
attention, with and without a decode in the same step.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from dcpmla.attention.costs import RouteCosts
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.stack import Stack as AttentionStack
from dcpmla.bench.cache_formats import config_name
from dcpmla.bench.geometries import GEOMETRIES, config_of
from dcpmla.bench.options import single
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.stack import Stack, StackSizes
from dcpmla.cli.options import positive
from dcpmla.integrations.families.table import attention_of
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import Job
from dcpmla.parallel.mesh import init_mesh

_ROUTES = ("mha", "absorbed")


class TurnCase(NamedTuple):
    """Requests with new tokens after a context, the number of decodes after the same context in the step, and the route
    of the turns.
    """

    heads: int
    kv_cache_dtype: str
    context: int
    batch: int
    query_len: int
    decodes: int
    route: str


class TurnBenchmark(Benchmark[TurnCase, Stack]):
    """One layer in steps of turns."""

    options = {
        "geometry": {"choices": GEOMETRIES, "default": "deepseek-v3", "help": "model whose layer is measured"},
        "decode_context_parallel_size": single(positive, 1, "D", "ranks of a cache"),
        "heads": "16,128",
        "kv_cache_dtype": "bf16",
        "context": "8192,65536",
        "batch": "1,16",
        "tokens": "8,64,128,256",
    }
    series = ("route",)
    sample_seconds = 0.5

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.config = attention_of(config_of(args.geometry)).config
        self.mesh = init_mesh(job.ranks.num_ranks, args.decode_context_parallel_size)

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        if attention_of(config_of(args.geometry)).dense_stack() is None:
            raise ValueError(f"geometry (--geometry) is {args.geometry}; its layers must be MLA")
        size = args.decode_context_parallel_size
        if ranks.num_ranks % size:
            raise ValueError(
                f"decode_context_parallel_size (-dcp) is {size}; it must divide the number of ranks, {ranks.num_ranks}"
            )

    def cases(self) -> Iterator[TurnCase]:
        for sizes in self.product("heads", "kv_cache_dtype", "context", "batch", "tokens"):
            yield from (TurnCase._make((*sizes, decodes, route)) for decodes in (0, 1) for route in _ROUTES)

    def inputs(self, case: TurnCase) -> Stack:
        config = replace(self.config, num_heads=case.heads * self.job.ranks.num_ranks)
        lens = [1] * case.decodes + [case.query_len] * case.batch
        seq_lens = [case.context + length for length in lens]
        sizes = StackSizes(self.mesh, 1, lens, seq_lens, self.device, self.dtype)
        dcp = sizes.dcp_config(kv_cache_dtype=config_name(case.kv_cache_dtype))
        num_decodes = len(lens) if case.route == "absorbed" else case.decodes
        routes = {"max_decode_query_len": RouteCosts(config, dcp).tokens_per_request, "num_decodes": num_decodes}
        return Stack(AttentionStack(config, (LatentSpec(config),)), replace(sizes, routes=routes), dcp)

    def measure(self, case: TurnCase, inputs: Stack) -> list[Row]:
        turns = [(case.query_len, case.context)] * case.batch
        (is_absorbed, *_) = RouteCosts(inputs.config, inputs.dcp).choose_absorbed(turns)

        def run(index: int) -> None:
            hidden, metadata = inputs.inputs(index)
            inputs.layers[0](hidden, inputs.cache[0], metadata)

        timing = self.time(run, len(inputs.metadata))
        inputs.exchange.check()
        fields = {
            "geometry": self.args.geometry,
            "tp": self.job.ranks.num_ranks,
            "dcp": inputs.dcp.decode_context_parallel_size,
            "exchange": inputs.exchange.name,
            "is_chosen": (case.route == "absorbed") == is_absorbed,
        }
        return [self.row(case._asdict(), timing, fields, digits=1)]
