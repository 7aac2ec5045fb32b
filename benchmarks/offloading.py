"""Engines whose cache goes on in host memory and on disks, over random weights: the parts that `returning.py` and
`conversations.py` share.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from dcpmla.bench.geometries import config_of
from dcpmla.bench.results import Row, add_commit_argument, dtype_name, write_results
from dcpmla.cache.formats import format_name
from dcpmla.cache.plan import CachePlan
from dcpmla.cli.options import positive
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_size import read_model
from dcpmla.llm import LLM
from dcpmla.planning.capacity import block_of
from dcpmla.planning.weights import ModelSize

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_GEOMETRIES = ("deepseek-v3", "v2-lite", "tiny")  # tiny: for CPUs
_OPTIONS = ("max_num_batched_tokens", "max_num_seqs", "enforce_eager")
_TIERS = ("kv_offloading_size", "kv_offloading_path", "kv_offloading_disk_size")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, of the engine and of its tiers, and of the result file."""
    add = parser.add_argument
    add("--geometry", choices=_GEOMETRIES, default="deepseek-v3", help="published sizes; tiny: for CPUs")
    add("--layers", type=positive, default=4, metavar="L", help="layers of the model; the first one is dense")
    add("--experts", type=positive, metavar="E", help="routed experts of a layer; default: the published number")
    add("-tp", "--tensor-parallel-size", type=positive, default=1, metavar="N", help="ranks, all of the job")
    add("-dcp", "--decode-context-parallel-size", type=positive, default=1, metavar="D", help="ranks of a cache")
    add("--max-num-batched-tokens", type=positive, default=8192, metavar="N", help="limit of a step's tokens")
    add("--max-num-seqs", type=positive, default=64, metavar="N", help="limit of requests that run at once")
    add("--enforce-eager", action="store_true", help="run without CUDA graphs")
    add("--device", default="auto", help="cuda, cpu, or auto")
    host = "host memory of all ranks for cached blocks; default: none"
    add("--kv-offloading-size", type=float, metavar="GIB", help=host)
    add("--kv-offloading-path", metavar="DIR", help="directory of cached blocks on disks; default: none")
    add("--kv-offloading-disk-size", type=float, metavar="GIB", help="bytes of all ranks on disks")
    add("--json", type=Path, metavar="OUT.json", help="result file to write")
    add_commit_argument(parser)


def model_config(args: argparse.Namespace, max_model_len: int) -> Any:
    """Return the transformers config of the model."""
    sizes: dict[str, Any] = {"num_hidden_layers": args.layers, "first_k_dense_replace": 1}
    sizes |= {"max_position_embeddings": max_model_len, "eos_token_id": None, "dtype": "bfloat16"}
    if args.experts is not None:
        sizes["n_routed_experts"] = args.experts
    config = config_of(args.geometry, **sizes)
    if args.geometry == "deepseek-v3":
        config.quantization_config = _FP8
    return config


def published_model(args: argparse.Namespace) -> ModelSize:
    """Return the sizes of the model with all its layers."""
    config = config_of(args.geometry, dtype="bfloat16")
    if args.geometry == "deepseek-v3":
        config.quantization_config = _FP8
    return read_model(config)


def write_config(config: Any) -> Path:
    """Write a config into a directory that has the same name on all ranks; return the directory. Random weights need no
    other file. Ranks may write at the same time.
    """
    text = config.to_json_string(use_diff=False)
    directory = Path(tempfile.gettempdir()) / f"dcpmla-offloading-{sha256(text.encode()).hexdigest()[:12]}"
    directory.mkdir(exist_ok=True)
    written = directory / f"config.json.{os.getpid()}"
    written.write_text(text)
    os.replace(written, directory / "config.json")
    return directory


def block_sizes(args: argparse.Namespace, config: Any) -> CachePlan:
    """Return the sizes of the engine's cache with one block."""
    sizes = args.tensor_parallel_size, args.decode_context_parallel_size
    dcp = DCPConfig(tensor_parallel_size=sizes[0], decode_context_parallel_size=sizes[1])
    return block_of(attention_of(config), dcp, num_states=1)


def new_llm(args: argparse.Namespace, config: Any, kv_cache_memory_bytes: int, has_tiers: bool = True) -> LLM:
    """Return an engine over random weights with prefix caching. Collective over the job.

    Args:
        kv_cache_memory_bytes: Bytes of the GPU's cache on each rank.
        has_tiers: Whether the engine gets the tiers of the options; if not, its cache is the GPU's alone.
    """
    tiers = {name: value for name in _TIERS if has_tiers and (value := getattr(args, name)) is not None}
    return LLM(
        write_config(config),
        args.tensor_parallel_size,
        args.decode_context_parallel_size,
        max_model_len=config.max_position_embeddings,
        device=args.device,
        load_format="dummy",
        enable_prefix_caching=True,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        **{name: getattr(args, name) for name in _OPTIONS},
        **tiers,
    )


def engine_fields(args: argparse.Namespace, llm: LLM, has_tiers: bool = True) -> Row:
    """Return the fields of a row on the model, the engine and its tiers."""
    engine, tiers = llm.engine, [*_TIERS[:1], *_TIERS[2:]] if has_tiers else []  # a path of this machine is left out
    return {
        "geometry": args.geometry,
        "num_layers": args.layers,
        "tp": args.tensor_parallel_size,
        "dcp": args.decode_context_parallel_size,
        "exchange": llm.exchange.exchange.name,
        "dtype": dtype_name(engine.model.dtype),
        "kv_cache_dtype": format_name(engine.cache.sizes.dtype),
        **{name: getattr(args, name) for name in _OPTIONS},
        **{name: getattr(args, name) for name in tiers},
        "kv_cache_bytes_per_rank": engine.cache.sizes.bytes_per_rank,
        "kv_tokens_total": engine.cache.sizes.tokens_total,
    }


def random_prompts(num_prompts: int, length: int, vocab_size: int, *stream: int) -> list[list[int]]:
    """Return prompts of random tokens, the same on all ranks for the same stream."""
    tokens: list[list[int]] = np.random.default_rng(stream).integers(vocab_size, size=(num_prompts, length)).tolist()
    return tokens


def write_rows(args: argparse.Namespace, llm: LLM, rows: Sequence[Row]) -> None:
    """Write the rows on the first rank, if the options name a file."""
    if args.json is not None and llm.rank == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_results(args.json, rows, args.tensor_parallel_size, llm.engine.model.device, args.commit)


def print_row(llm: LLM, row: Row, *names: str) -> None:
    """Print some fields of a row on the first rank."""
    if llm.rank == 0:
        print(json.dumps({name: row[name] for name in names if name in row}), flush=True)
