"""Measure kernels, the exchange, and steps of layers and models; `bench NAME --help` says more."""

import argparse
from importlib import import_module

BENCHMARKS = {  # by the module of dcpmla.bench: the benchmark's class, and its subject
    "decode": ("Decode", "decode kernels on one GPU, ours and others'"),
    "prefill": ("PrefillBenchmark", "prefill kernels on one GPU: new tokens over themselves, and over a context"),
    "sparse": (
        "SparseBenchmark",
        "sparse MLA's decode: selection, operation by operation, and attention to selected tokens, per DCP size",
    ),
    "output": ("Output", "W_UV with a quantized output, as one kernel and as two"),
    "experts": ("Experts", "experts and router of a layer, per format of the weights, beside torch's grouped products"),
    "linears": ("Linears", "linear layers, per format of the weights, beside torch's product of bfloat16"),
    "exchange": (
        "ExchangeBenchmark",
        "the exchange of a DCP group, per backend and number of tokens, checked against float64",
    ),
    "reduce": ("ReduceBenchmark", "a TP group's sum with residual and RMSNorm, per backend and number of tokens"),
    "layer": (
        "Layer",
        "a decode step of attention layers, part by part, per DCP size: scaling over GPUs and hosts, crossovers",
    ),
    "turns": (
        "TurnBenchmark",
        "a layer's step of turns, few new tokens after long contexts, by both routes of attention",
    ),
    "generate": ("Generate", "decode steps of a whole model, with and without CUDA graphs, per batch"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks; only the module of the requested one is imported."""
    commands = parser.add_subparsers(dest="benchmark", required=True, parser_class=type(parser))
    for name, (_, summary) in BENCHMARKS.items():
        commands.add_parser(name, help=summary, fill=_fill)


def _fill(parser: argparse.ArgumentParser) -> None:
    from dcpmla.bench.runner import add_arguments

    name = parser.prog.split()[-1]
    module = import_module(f"dcpmla.bench.{name}")
    parser.description = module.__doc__
    add_arguments(getattr(module, BENCHMARKS[name][0]), parser)
