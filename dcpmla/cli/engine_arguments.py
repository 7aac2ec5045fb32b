"""Options of the commands that run a model: its source, its layout (`DCPConfig`), its engine (`EngineOptions`)."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dcpmla.cli.options import add_job_arguments, positive, seconds
from dcpmla.config import (
    DCP_COMM_BACKENDS,
    DCP_EXCHANGE_DTYPES,
    DECODE_QUERY_DTYPES,
    INDEX_CACHE_DTYPES,
    KV_CACHE_DTYPES,
    MODEL_DTYPES,
    DCPConfig,
)
from dcpmla.integrations.engine_options import SPECULATIVE_METHODS, EngineOptions


@dataclass(frozen=True)
class _Option:
    """An option that sets a field of `DCPConfig` or `EngineOptions`, and has its default.

    Attributes:
        usage: Name of the option, and of its value where it takes any.
        values: Choices, a function that reads a value, or bool for a flag.
        field: Name of the field, where it differs from the option's.
    """

    usage: str
    values: tuple[str, ...] | Callable[[str], object]
    help: str
    field: str = ""

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser."""
        name, *metavar = self.usage.split()
        field = self.field or name.removeprefix("--").replace("-", "_")
        keywords: dict[str, Any] = {"dest": field, "default": _DEFAULTS.get(field), "help": self.help}
        if self.values is bool:
            keywords["action"] = argparse.BooleanOptionalAction if keywords["default"] else "store_true"
        elif isinstance(self.values, tuple):
            keywords["choices"] = self.values
        else:
            keywords |= {"type": self.values, "metavar": metavar[0]}
        parser.add_argument(name, **keywords)


_DEFAULTS = {field.name: field.default for field in (*fields(DCPConfig), *fields(EngineOptions))}
_DEFAULTS["cp_kv_cache_interleave_size"] = None  # it depends on other options (`layout`)
_OPTIONS = (  # in the order of the help
    _Option(
        "--cp-kv-cache-interleave-size I",
        int,
        "consecutive tokens on one rank; default: 1, with --deterministic and -dcp 64",
    ),
    _Option(
        "--dcp-comm-backend",
        DCP_COMM_BACKENDS,
        "the exchange; auto: direct where all ranks reach each other over NVLink, else a2a",
    ),
    _Option("--dcp-exchange-dtype", DCP_EXCHANGE_DTYPES, "fp8: decode's rows travel as e4m3 (with direct only)"),
    _Option(
        "--dcp-exchange-timeout S",
        seconds,
        "seconds that direct waits for a rank's part of an exchange",
        "exchange_timeout",
    ),
    _Option(
        "--dcp-check-exchange",
        bool,
        "first compare the ranks' calls of the exchange: slow, for debugging",
        "check_exchange",
    ),
    _Option("--dcp-q-replicate", bool, "each rank projects the queries of all its DCP group's heads and gathers none"),
    _Option("--dcp-project-before-merge", bool, "large decode steps apply W_UV first and exchange the narrower rows"),
    _Option("--deterministic", bool, "the same bits whatever the batch, the chunks and -dcp (docs/determinism.md)"),
    _Option(
        "--kv-cache-dtype",
        (*KV_CACHE_DTYPES, "fp8_e4m3"),
        "format of the latent cache; auto: the model's dtype; fp8_e4m3: another name of fp8",
    ),
    _Option(
        "--kv-cache-scale X",
        float,
        "what the values of an fp8 cache are multiplied by; default: the checkpoint's, or 1",
    ),
    _Option("--calculate-kv-scales", bool, "take the scales of fp8 caches and queries from the first prompts' values"),
    _Option("--decode-query-dtype", DECODE_QUERY_DTYPES, "fp8: decode multiplies e4m3 queries by an fp8 cache"),
    _Option("--index-cache-dtype", INDEX_CACHE_DTYPES, "format of sparse MLA's index cache; auto: the model's dtype"),
    _Option("--index-hadamard", bool, "spread the values of the indexer's keys and queries before they are rounded"),
    _Option(
        "--attention-backend NAME", str, "kernel of decode's attention (docs/kernels.md); auto: the first that can"
    ),
    _Option("--prefill-backend NAME", str, "kernel of prefill's attention, alike"),
    _Option("--enable-expert-parallel", bool, "spread experts whole over the ranks instead of cutting each"),
    _Option("--block-size P", int, "tokens of a cache block on one rank"),
    _Option(
        "--enable-prefix-caching", bool, "reuse the cached blocks of earlier requests that begin with the same tokens"
    ),
    _Option(
        "--kv-offloading-size GIB",
        float,
        "host memory, of all ranks together, that keeps blocks which leave the cache, for requests that begin with "
        "the same tokens; default: none",
    ),
    _Option(
        "--kv-offloading-path DIR",
        str,
        "directory on each host's local disk for copies of these blocks, which survive restarts; goes with "
        "--kv-offloading-size and --kv-offloading-disk-size; default: none",
    ),
    _Option("--kv-offloading-disk-size GIB", float, "files of all ranks together in that directory"),
    _Option("--max-num-batched-tokens C", positive, "most tokens of one step"),
    _Option("--max-num-seqs R", positive, "most requests that run at the same time"),
    _Option(
        "--max-prefill-ms MS",
        float,
        "most milliseconds, by the planner's model, that pieces of prompts take in a step in which requests "
        "decode; default: what a step of --max-num-batched-tokens tokens without context takes, or longer "
        "where pieces would spend over a sixteenth of it on reading a long context again",
    ),
    _Option("--max-model-len L", int, "longest sequence, prompt and answer; default: the model's"),
    _Option(
        "--kv-cache-memory-bytes B", positive, "cache of one rank; default: what its requests need and memory allows"
    ),
    _Option("--gpu-memory-utilization F", float, "part of the device's memory to use, in (0, 1]"),
    _Option("--dtype", MODEL_DTYPES, "to compute in; auto: as stored, but not float16"),
    _Option(
        "--expert-dtype",
        ("auto", "fp8"),
        "fp8: experts that are stored in e2m1 (DeepSeek-V4) in 8 bits, the same values: more memory, faster",
    ),
    _Option(
        "--load-format",
        ("auto", "dummy"),
        "dummy: random weights instead of a checkpoint's; the directory needs a config.json alone",
    ),
    _Option(
        "--speculative-method",
        SPECULATIVE_METHODS,
        "drafts that a step verifies at once: ngram: what followed the last tokens before, for texts that repeat "
        "their prompt; mtp: the checkpoint's MTP module",
    ),
    _Option("--num-speculative-tokens K", positive, "most drafts of a request in a step"),
    _Option("--enforce-eager", bool, "no CUDA graphs of decode steps"),
)


def add_engine_arguments(parser: argparse.ArgumentParser, dcp_sizes: Callable[[str], object] = int) -> None:
    """Add the options of a model, its layout and its engine; dcp_sizes reads the value of -dcp."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="directory of a safetensors checkpoint, or a hub id")
    add("--revision", metavar="REV", help="branch, tag or commit of a hub id; default: its main branch")
    tp = "ranks that cut the heads; all ranks of the job"
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help=tp)
    dcp = "ranks that share one cache; divides -tp"
    add("-dcp", "--decode-context-parallel-size", type=dcp_sizes, default="1", metavar="D", help=dcp)
    for option in _OPTIONS:
        option.add_to(parser)
    add_job_arguments(parser)
