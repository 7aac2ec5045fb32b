"""Measure kernels, the exchange, steps of layers and models, and loads; `bench NAME --help` says more."""

import argparse
from importlib import import_module

BENCHMARKS = {  # modules of dcpmla.bench, each with its BENCHMARK
    "decode": "decode kernels on one GPU, ours and others'",
    "prefill": "prefill kernels on one GPU: new tokens over themselves, and over a context",
    "sparse": "sparse MLA's decode: selection, operation by operation, and attention to selected tokens, per DCP size",
    "output": "W_UV with a quantized output, as one kernel and as two",
    "experts": "experts and router of a layer, per format of the weights, beside torch's grouped products",
    "exchange": "the exchange of a DCP group, per backend and number of tokens, checked against float64",
    "reduce": "a TP group's sum with residual and RMSNorm, per backend and number of tokens",
    "layer": "a decode step of attention layers, part by part, per DCP size: scaling over GPUs and hosts, crossovers",
    "turns": "a layer's step of turns, few new tokens after long contexts, by both routes of attention",
    "generate": "decode steps of a whole model, with and without CUDA graphs, per batch",
    "serve": "a synthetic load: how many requests fit, throughput and latencies, per DCP size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks; only the module of the requested one is imported."""
    commands = parser.add_subparsers(dest="benchmark", required=True, parser_class=type(parser))
    for name, summary in BENCHMARKS.items():
        commands.add_parser(name, help=summary, fill=_fill)


def _fill(parser: argparse.ArgumentParser) -> None:
    from dcpmla.bench.runner import add_arguments

    module = import_module(f"dcpmla.bench.{parser.prog.split()[-1]}")
    parser.description = module.__doc__
    add_arguments(module.BENCHMARK, parser)
