"""Options of the commands that run a model: its source, its layout (`DCPConfig`), its engine (`EngineOptions`)."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from dcpmla.cli.field_options import add_fields
from dcpmla.cli.options import add_job_arguments, seconds
from dcpmla.config import KV_CACHE_DTYPES, DCPConfig
from dcpmla.integrations.engine_options import EngineOptions

_APART = ("tensor_parallel_size", "decode_context_parallel_size", "context_workspace_tokens")


def add_engine_arguments(parser: argparse.ArgumentParser, dcp_sizes: Callable[[str], object] = int) -> None:
    """Add the options of a model, its layout and its engine; dcp_sizes reads the value of -dcp."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="directory of a safetensors checkpoint, or a hub id")
    add("--revision", metavar="REV", help="branch, tag or commit of a hub id; default: its main branch")
    tp = "ranks that cut the heads; all ranks of the job"
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help=tp)
    dcp = "ranks that share one cache; divides -tp"
    add("-dcp", "--decode-context-parallel-size", type=dcp_sizes, default="1", metavar="D", help=dcp)
    add("--max-model-len", type=int, metavar="L", help="longest sequence, prompt and answer; default: the model's")
    layout = [field.name for field in fields(DCPConfig) if field.name not in _APART]
    options = {"exchange_timeout": "--dcp-exchange-timeout", "check_exchange": "--dcp-check-exchange"}
    changes: dict[str, dict[str, Any]] = {
        "exchange_timeout": {"type": seconds, "metavar": "S"},
        "block_size": {"type": int},  # the dataclass checks it
        "kv_cache_dtype": {"choices": (*KV_CACHE_DTYPES, "fp8_e4m3")},
    }
    add_fields(parser, DCPConfig, "layout of the cache", layout, options, changes)
    add_fields(parser, EngineOptions, "engine")
    parser.set_defaults(cp_kv_cache_interleave_size=None)  # it depends on other options (`layout`)
    add_job_arguments(parser)
