"""Measure a layer's step of turns: a few new tokens of each request after a long cached context, by both routes of
attention, with and without a decode in the same step.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from dcpmla.attention.costs import RouteCosts
from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench.cache_formats import config_name
from dcpmla.bench.geometries import GEOMETRIES, config_of
from dcpmla.bench.layer_stack import LayerStack
from dcpmla.bench.options import single
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.stack import StackSizes
from dcpmla.bench.timing import time_operation
from dcpmla.cache.latent import num_blocks
from dcpmla.cli.options import positive
from dcpmla.integrations.families.table import attention_of
from dcpmla.job.bootstrap import Ranks
from dcpmla.parallel.mesh import init_mesh

_ROUTES = ("mha", "absorbed")
_CALLS = {"cuda": 2, "cpu": 1}  # calls of a sample


class TurnCase(NamedTuple):
    """Requests with new tokens after a context, and the number of decodes after the same context in the step."""

    heads: int
    kv_cache_dtype: str
    context: int
    batch: int
    query_len: int
    decodes: int


class TurnBenchmark(Benchmark[TurnCase, LayerStack]):
    """One layer over a cache that all cases of a context share."""

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
            yield from (TurnCase._make((*sizes, decodes)) for decodes in (0, 1))

    def inputs(self, case: TurnCase) -> LayerStack:
        return self.kept.get((case.heads, case.kv_cache_dtype, case.context), lambda: self._new_stack(case))

    def _new_stack(self, case: TurnCase) -> LayerStack:
        """Return a layer over a cache for the most requests and the longest turns after the case's context."""
        args, size = self.args, self.job.ranks.num_ranks
        config = attention_of(config_of(args.geometry)).config
        config = replace(config, num_heads=case.heads * size)
        mesh, num_reqs = init_mesh(size, args.decode_context_parallel_size), max(args.batch) + 1
        sizes = StackSizes(mesh, 1, num_reqs, case.context + max(args.tokens), self.device, self.dtype)
        return LayerStack(config, sizes, kv_cache_dtype=config_name(case.kv_cache_dtype))

    def measure(self, case: TurnCase, inputs: LayerStack) -> list[Row]:
        return [self._row(case, inputs, route) for route in _ROUTES]

    def _row(self, case: TurnCase, inputs: LayerStack, route: str) -> Row:
        """Return the time of a layer's step in which the turns take a route."""
        routes = RouteCosts(inputs.config, inputs.dcp)
        (is_absorbed, *_) = routes.choose_absorbed([(case.query_len, case.context)] * case.batch)
        step, hidden = self._step(case, inputs, routes.tokens_per_request, route)
        layer, cache = inputs.layers[0], inputs.cache[0]
        calls = _CALLS[self.device.type]
        timing = time_operation(lambda _: layer(hidden, cache, step), self.device, calls, self.sample_seconds)
        inputs.exchange.check()
        fields = {
            "geometry": self.args.geometry,
            "tp": self.job.ranks.num_ranks,
            "dcp": inputs.dcp.decode_context_parallel_size,
            "exchange": inputs.exchange.name,
            "route": route,
            "is_chosen": (route == "absorbed") == is_absorbed,
        }
        return self.row(case._asdict(), timing, fields, digits=1)

    def _step(
        self, case: TurnCase, inputs: LayerStack, tokens_per_request: int, route: str
    ) -> tuple[StepMetadata, torch.Tensor]:
        """Return the step in which the turns take a route, and random hidden states."""
        lens = [1] * case.decodes + [case.query_len] * case.batch
        seq_lens = [case.context + length for length in lens]
        per_request = num_blocks(max(seq_lens), inputs.dcp)
        tables = torch.randperm(inputs.cache.sizes.num_blocks)[: per_request * len(lens)].view(len(lens), -1).tolist()
        decode = inputs.metadata[0].decode
        steps = StepBuilder(inputs.dcp, inputs.layers[0].mesh.dcp_rank, self.device)
        step = steps.build(
            StepRequests(lens, seq_lens, tables),
            max_decode_query_len=tokens_per_request,
            num_decodes=len(lens) if route == "absorbed" else case.decodes,
            workspace=None if decode is None else decode.workspace,
        )
        config = inputs.config
        cos_sin = torch.randn(sum(lens), config.qk_rope_head_dim, device=self.device)
        hidden = torch.randn(sum(lens), config.hidden_size, device=self.device, dtype=self.dtype)
        return step.with_cos_sin(cos_sin), hidden
