"""Result files, `{"commit", "machine", "versions", "rows"}`, and the one vocabulary of their rows."""

import argparse
import math
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dcpmla.cli.output import write_json

Row = dict[str, Any]

# Every field of every row, by its name or pattern; docs/benchmarks.md has the same table. Times end in their unit.
FIELDS = {
    # the case
    "model": "name of the checkpoint's directory",
    "num_parameters": "of that model",
    "geometry": "published model whose layers were measured, or the config's file",
    "operation": "an exchange's `gather_heads`, `combine`, `gather_context`; sparse MLA's `selection`, `attention`, "
    "DeepSeek-V4's `shared_attention`; `add_norm` of a TP group; a layer's `decode` and `prefill` inside vLLM",
    "part": "of a decode step of attention layers: `total`, or one of its parts",
    "layer_kind": "of the stack's layers: `mla`; DeepSeek-V4's `window`, `csa` or `hca`",
    "kernel": "kernel or backend of what is measured",
    "quantization": "of attention's output",
    "weights": "format of the weights: `bf16`, `fp8` (blocks of 128 x 128), `fp4` or `int4` (groups of 32)",
    "mode": "`graph`: decode steps as CUDA graphs; `eager`: without",
    "tp": "ranks of the job; each has its share of the heads",
    "dcp": "ranks that share a cache, and exchange",
    "gpus_per_node": "ranks on a host",
    "exchange": "backend; `none` under `dcp` 1, `made up` where one process measures one rank of several",
    "variant": "what decode exchanges: empty (rows as they are), `pbm`, `q_replicate` or `fp8`",
    "num_layers": "layers of the stack; times cover the whole stack",
    "batch": "requests of a step",
    "context": "cached tokens of each request",
    "query_len": "new tokens of each request",
    "decodes": "requests of one new token each in the same step",
    "route": "of new tokens' attention: `mha` over up-projected keys, or `absorbed` queries",
    "tokens": "tokens of an operation or a step; of `gather_context`, cached ones of all ranks",
    "heads": "query heads: of one device, the model (`part`), the group (an exchange) or the indexer (`selection`)",
    "topk": "tokens that a new token selects",
    "num_selected": "of these, the mean number on this rank",
    "row_width": "columns of the rows that an operation moves",
    "hidden_size": "columns of a layer's hidden states",
    "width": "columns between an expert's two products, on one rank",
    "num_experts": "routed experts of a layer",
    "top_k": "of these, those of a token",
    "num_shared": "experts that every token takes",
    "query_dim": "columns of an absorbed query and of a cached row",
    "latent_dim": "columns of the latent, and of partial outputs",
    "block_size": "tokens of a cache block",
    "causal": "new tokens attend to themselves; else to a context",
    "dtype": "of what is not quantized",
    "kv_cache_dtype": "format of the latent cache; `bf16`: rows that are not quantized",
    "decode_query_dtype": "`fp8`: e4m3 queries; `auto`: in `dtype`",
    "index_cache_dtype": "format of the index cache; `auto`: in `dtype`",
    "num_sets": "sets of inputs that calls rotate through",
    # the results
    "is_chosen": "whether it is the route that the engine takes",
    "in_graph": "whether a CUDA graph was timed, or calls one by one",
    "step_us": "time of an engine's decode step, or from a prompt to its first token: the median, the slowest rank's",
    "device_us": "of `step_us`, a decode step's time on the device alone, its graph replayed without an engine; "
    "with a piece of a prompt the time of all kernels",
    "us_per_moe_layer": "time on the device of a block of attention and experts, in steps of such blocks alone",
    "num_kernels": "kernels of a step",
    "prefill_*": "the same for the prefill of one prompt of `input_len` tokens, at most `max_num_batched_tokens`",
    "median_us": "time of one call: the median over samples, the slowest rank's",
    "first_call_ms": "time of the first call with these sizes: compilation, a library's plan",
    "added_us_per_layer": "what sharding adds to a layer apart from attention, compared with `dcp` 1 at the same load",
    "*_us": "time of what the name says, as `median_us`",
    "tflops": "TFLOP/s of both matrix products; pairs beyond the causal bound do not count",
    "gb_per_s": "GB/s of what must move: cache, queries and output of decode, rows that a rank receives",
    "index_bytes": "bytes of the keys that a rank scores in a call",
    "index_gb_per_s": "rate at which `index_scores` reads them",
    "bytes_read": "bytes that a rank reads in a call: rows attended to, keys scored, in `total` with all weights",
    "floor_share": "`floor_us` / `median_us`, of an engine's step / `device_us`; of a `part`, the floor is the time of "
    "`bytes_read` at the memory's rate",
    "speedup_over_*": "time of what the name says / `median_us`",
    "scaling_efficiency": "time under `dcp` 1 / (`dcp` x time), at the same load",
    "error": "largest relative difference to float64; null: not finite",
    "lse_error": "largest difference of an LSE to float64; null: not finite",
    "different": "share of bytes or selected tokens that differ from the reference's",
    "tokens_per_second": "`batch` / `step_us`; with drafts `tokens_a_step` / `step_us`",
    "acceptance": "probability that a draft is accepted if those before it are, forced; none in rows without drafts",
    "is_adaptive": "drafts in those steps where they pay, and `step_us` is the mean; else in every step",
    "tokens_a_step": "new tokens of a step of the whole batch, on average",
    # a load that was served
    "engine": "engine that served it, in `engines.py`: `dcpmla`, `vllm`, or `vllm+dcpmla-plugin`",
    "load": "name of the load in `engines.py`",
    "call": "number of the call in `engines.py`; rows of different calls are of different machines or times",
    "tag": "word that distinguishes a run from others of the same load, for example `nocompile`",
    "num_turns": "turns of each conversation",
    "turn_len": "new tokens of each prompt of a conversation after the first",
    "import_seconds": "time to import the engine",
    "start_seconds": "time from the imports to an engine that takes requests",
    "url": "server that was driven over HTTP; without it the engine is driven in the same process",
    "request_rate": "requests, or conversations, a second of the Poisson process, or `inf`",
    "seconds": "from the load's beginning to the end of its last request",
    "*_per_second": "requests, prompt tokens or new tokens over `seconds`",
    **{
        f"{name}_*": f"seconds, {what}: mean and percentiles over the requests"
        for name, what in {
            "queue_seconds": "arrival to first step",
            "time_to_first_token": "arrival to first token",
            "time_per_token": "a token after the first",
            "end_to_end_seconds": "arrival to last token",
        }.items()
    },
    "inter_token_*": "seconds between two successive tokens of a request: percentiles over all such pairs",
    "kv_cache_bytes_per_rank": "bytes of a rank's cache",
    "kv_tokens_total": "tokens that the caches of a DCP group hold",
    "num_fit_mean": "requests of average size that the cache holds at their full lengths",
    "num_fit_largest": "requests of the largest size that it holds",
    "max_num_running": "most requests that ran at the same time",
    "num_lost": "requests that a server did not answer with all their tokens",
    "num_preemptions": "requests sent back for want of blocks",
    "num_cached_tokens": "prompt tokens that earlier requests had computed",
    # benchmarks/agreement.py
    "num_prompts": "prompts of the comparison",
    "accuracy": "share of prompts whose answer is right",
    "tokens_as_*": "share of greedy tokens equal to those of what the name says",
    "logits_from_*": "largest difference of logits to those of what the name says",
    "unsharded_bf16_*": "the same of the unsharded model in bfloat16: the yardstick",
}


OPTIONS = (  # options of engine and load, which rows have by their own names
    *("cp_kv_cache_interleave_size", "dcp_q_replicate", "dcp_project_before_merge", "index_hadamard", "enforce_eager"),
    *("enable_expert_parallel", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs", "num_requests"),
    *("input_len", "input_lens", "output_len", "output_lens", "seed", "speculative_method", "num_speculative_tokens"),
)


def unknown_fields(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the fields of rows that are not in the vocabulary."""
    names = {name for row in rows for name in row}
    return {name for name in names if not any(fnmatchcase(name, pattern) for pattern in (*FIELDS, *OPTIONS))}


def finite(number: float) -> float | None:
    """Return a number as JSON can hold it: None for infinities and NaN."""
    return number if math.isfinite(number) else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def add_commit_argument(parser: argparse.ArgumentParser) -> None:
    """Add --commit, for `write_results`."""
    parser.add_argument("--commit", help="commit to record in the result; default: git's HEAD")


def write_results(
    path: Path,
    rows: Sequence[Row],
    num_ranks: int,
    device: torch.device,
    commit: str | None = None,
    findings: Mapping[str, Any] | None = None,
) -> None:
    """Write rows with the commit (git's HEAD if None), the machine and the versions that they were measured with.

    Args:
        findings: Results beyond the rows, after the rows in the file.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    write_rows(path, rows, f"{num_ranks} x {name}", versions(), commit, findings)


def write_rows(
    path: Path,
    rows: Sequence[Row],
    machine: str,
    versions: Mapping[str, str | None],
    commit: str | None = None,
    findings: Mapping[str, Any] | None = None,
) -> None:
    """Write rows that another machine may have measured (`write_results`)."""
    assert not unknown_fields(rows), unknown_fields(rows)
    content = {"commit": commit or _head(), "machine": machine, "versions": versions, "rows": list(rows)}
    write_json(path, {**content, **(findings or {})})


def _head() -> str:
    """Return git's HEAD in the package's directory; "unknown" if that is no checkout."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str | None]:
    """Return the versions that numbers depend on: torch, the packages that it works with, NCCL on GPUs."""
    packages: dict[str, str | None] = {
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "triton": installed("triton"),
    }
    if torch.cuda.is_available():
        packages["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        packages["nvls"] = os.environ.get("NCCL_NVLS_ENABLE")
    return packages


def installed(package: str) -> str | None:
    """Return a package's version; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
