"""Options of several benchmarks. Each takes a list, and all its items are measured."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

from dcpmla.cli.options import format_list, name_list, positive_list
from dcpmla.config import DCP_COMM_BACKENDS, DECODE_QUERY_DTYPES, INDEX_CACHE_DTYPES
from dcpmla.planning.capacity import FORMATS


def _caches(text: str) -> list[str]:
    """Read formats of caches, plain rows first: others are compared with them."""
    return sorted(format_list(text), key=FORMATS.index)


def names_of(choices: Sequence[str], noun: str) -> Callable[[str], list[str]]:
    """Return the reader of a list of names."""
    return partial(name_list, choices=choices, kind=noun)


_EXCHANGES = f"of {', '.join(DCP_COMM_BACKENDS)}; default: NCCL's, and direct where ranks have NVLink"
_QUERIES, _INDEX = "of queries over an fp8 cache", "of index caches; auto: in the model's dtype"
_OPTIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "heads": (positive_list, "query heads: of one rank, or of all ranks that share a cache"),
    "batch": (positive_list, "requests of a step"),
    "tokens": (positive_list, "tokens of a step, or new ones of each request"),
    "query_len": (positive_list, "new tokens of each request, causal"),
    "context": (positive_list, "cached tokens of each request"),
    "decode_context_parallel_size": (positive_list, "ranks that share a cache; others are compared with 1, plain TP"),
    "dcp_comm_backend": (names_of(DCP_COMM_BACKENDS, "an exchange"), _EXCHANGES),
    "kv_cache_dtype": (_caches, f"of {', '.join(FORMATS)}; bf16: rows that are not quantized"),
    "decode_query_dtype": (names_of(DECODE_QUERY_DTYPES, "a dtype of queries"), _QUERIES),
    "index_cache_dtype": (names_of(INDEX_CACHE_DTYPES, "an index cache's format"), _INDEX),
}


def add_measured(parser: argparse.ArgumentParser, **defaults: str | None) -> None:
    """Add options by their defaults; whatever an option lists is measured."""
    for name, default in defaults.items():
        reader, words = _OPTIONS[name]
        short = ["-dcp"] if name == "decode_context_parallel_size" else []
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(*short, option, type=reader, default=default, metavar="A,B", help=words)
