"""Measure: how the exchange and a decode step scale, how a load of requests is served."""

import argparse

from dcpmla.bench import decode as bench_decode
from dcpmla.bench import exchange as bench_exchange
from dcpmla.bench import generate as bench_generate
from dcpmla.bench import layer as bench_layer
from dcpmla.bench import output as bench_output
from dcpmla.bench import prefill as bench_prefill
from dcpmla.bench import scaling as bench_scaling
from dcpmla.bench import serve as bench_serve
from dcpmla.bench import sparse as bench_sparse

_BENCHMARKS = {
    "generate": (bench_generate, "decode steps of a whole model, with and without CUDA graphs, per batch"),
    "decode": (bench_decode, "decode kernels on one GPU, ours beside those of others"),
    "prefill": (bench_prefill, "prefill kernels on one GPU: new tokens over themselves, and over a context"),
    "sparse": (
        bench_sparse,
        "sparse MLA's decode: selection, operation by operation, and attention to selected tokens, per DCP size",
    ),
    "output": (bench_output, "W_UV with a quantized output, as one kernel and as two"),
    "layer": (
        bench_layer,
        "a decode step of attention layers, part by part, per DCP size; from which context on DCP wins",
    ),
    "exchange": (
        bench_exchange,
        "the exchange of a DCP group, per backend and number of tokens, checked against float64",
    ),
    "scaling": (bench_scaling, "exchange and decode step over ranks and nodes"),
    "serve": (bench_serve, "a synthetic load: how many requests fit, throughput and latencies, per DCP size"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", required=True, parser_class=type(parser))
    for name, (benchmark, summary) in _BENCHMARKS.items():
        benchmark.add_arguments(commands.add_parser(name, help=summary, description=benchmark.__doc__))
