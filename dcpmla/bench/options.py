"""Options of benchmarks. An option that several benchmarks have takes a list, and all its items are measured."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dcpmla.cli.options import format_list, name_list, positive_list
from dcpmla.config import DCP_COMM_BACKENDS, DECODE_QUERY_DTYPES, INDEX_CACHE_DTYPES
from dcpmla.planning.capacity import FORMATS

Arguments = dict[str, Any]  # of `ArgumentParser.add_argument`


def single(reader: Callable[[str], object], default: object, metavar: str, words: str) -> Arguments:
    """Return the arguments of an option with one value, by its help."""
    return {"type": reader, "default": default, "metavar": metavar, "help": words}


def listed(reader: Callable[[str], list[Any]], words: str, metavar: str = "A,B") -> Arguments:
    """Return the arguments of an option with a list, by its help; each item counts once."""
    return {"type": lambda text: list(dict.fromkeys(reader(text))), "metavar": metavar, "help": words}


def named(choices: Sequence[str], noun: str, words: str, metavar: str = "NAME,...") -> Arguments:
    """Return the arguments of an option with a list of names.

    Args:
        noun: Noun with its article for messages about a wrong name, as in "a cache format".
    """
    return listed(partial(name_list, choices=choices, kind=noun), words, metavar)


def directory_of(content: str) -> Arguments:
    """Return the arguments of --peers, by what the directory has."""
    return {"type": Path, "metavar": "DIR", "help": f"directory with {content}"}


def _caches(text: str) -> list[str]:
    """Read formats of caches, plain rows first: others are compared with them."""
    return sorted(format_list(text), key=FORMATS.index)


_EXCHANGES = f"of {', '.join(DCP_COMM_BACKENDS)}; default: NCCL's, and direct where ranks have NVLink"
_QUERIES, _INDEX = "of queries over an fp8 cache", "of index caches; auto: in the model's dtype"
_MEASURED = {
    "heads": listed(positive_list, "query heads: of one rank, or of all ranks that share a cache"),
    "batch": listed(positive_list, "requests of a step"),
    "tokens": listed(positive_list, "tokens of a step, or new ones of each request"),
    "query_len": listed(positive_list, "new tokens of each request, causal"),
    "context": listed(positive_list, "cached tokens of each request"),
    "decode_context_parallel_size": listed(
        positive_list, "ranks that share a cache; others are compared with 1, plain TP"
    ),
    "dcp_comm_backend": named(DCP_COMM_BACKENDS, "an exchange", _EXCHANGES, "A,B"),
    "kv_cache_dtype": listed(_caches, f"of {', '.join(FORMATS)}; bf16: rows that are not quantized"),
    "decode_query_dtype": named(DECODE_QUERY_DTYPES, "a dtype of queries", _QUERIES, "A,B"),
    "index_cache_dtype": named(INDEX_CACHE_DTYPES, "an index cache's format", _INDEX, "A,B"),
}
_SHORT = {"tensor_parallel_size": ["-tp"], "decode_context_parallel_size": ["-dcp"]}


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Arguments | str | None]) -> None:
    """Add options by their names in Python.

    Args:
        options: Arguments of each; or of one that several benchmarks have, the default alone, as text or None.
    """
    for name, option in options.items():
        arguments = option if isinstance(option, dict) else {**_MEASURED[name], "default": option}
        parser.add_argument(*_SHORT.get(name, []), f"--{name.replace('_', '-')}", **arguments)
