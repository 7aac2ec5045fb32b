"""Measure: how the exchange and a decode step scale, how a load of requests is served."""

import argparse

from dcpmla.cli import bench_scaling, bench_serve

_BENCHMARKS = {
    "scaling": (bench_scaling, "exchange and decode step over ranks and nodes"),
    "serve": (bench_serve, "a synthetic load: how many requests fit, throughput and latencies, per DCP size"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", required=True, parser_class=type(parser))
    for name, (benchmark, summary) in _BENCHMARKS.items():
        benchmark.add_arguments(commands.add_parser(name, help=summary, description=benchmark.__doc__))
