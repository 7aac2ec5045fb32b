"""Result files, `{"commit", "machine", "versions", "rows"}`, and the one vocabulary of their rows."""

import argparse
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dcpmla.cli.output import write_json

Row = dict[str, Any]

# Every field of every row, by its name or pattern, in the order of the table in docs/benchmarks.md, which explains
# them: cases, results, loads that were served, comparisons of models. Times end in their unit.
_NAMES = """
    model num_parameters geometry operation part layer_kind kernel quantization weights mode tp dcp
    gpus_per_node exchange variant num_layers batch context query_len decodes route tokens heads topk
    num_selected row_width hidden_size width num_experts top_k num_shared query_dim latent_dim block_size slot_bytes
    causal
    dtype kv_cache_dtype decode_query_dtype index_cache_dtype num_sets
    is_chosen in_graph step_us device_us us_per_moe_layer num_kernels prefill_* median_us first_call_ms
    added_us_per_layer *_us tflops gb_per_s index_bytes index_gb_per_s bytes_read floor_share speedup_over_*
    scaling_efficiency error lse_error different tokens_per_second acceptance acceptance_length is_adaptive
    tokens_a_step selections hit_rate counted_hit_rate fetched_bytes num_hot_rows
    engine load call tag num_turns turn_len start import_seconds start_seconds num_compiled compilations repeat
    request_rate seconds *_per_second
    queue_seconds_* time_to_first_token_* time_per_token_* end_to_end_seconds_* inter_token_*
    kv_cache_bytes_per_rank kv_tokens_total num_fit_mean num_fit_largest max_num_running
    num_preemptions num_lost num_cached_tokens servers source scaled_time_to_first_token
    label concurrency num_gpus num_waiting num_new_tokens total_tokens_per_second_per_gpu gpu_hit_rate host_hit_rate
    ttft_bound is_within_bound num_conversations
    num_prompt_tokens num_prompts accuracy tokens_as_* logits_from_* unsharded_bf16_*
"""
FIELDS = _NAMES.split()

OPTIONS = (  # options of engine and load, which rows have by their own names
    *("cp_kv_cache_interleave_size", "dcp_q_replicate", "dcp_project_before_merge", "index_hadamard", "enforce_eager"),
    *("enable_expert_parallel", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs", "num_requests"),
    *("deterministic", "kv_hot_tokens", "kv_offloading_size", "kv_offloading_disk_size", "max_prefill_ms"),
    *("input_len", "input_lens", "output_len", "output_lens", "seed", "speculative_method", "num_speculative_tokens"),
)


def unknown_fields(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the fields of rows that are not in the vocabulary."""
    names = {name for row in rows for name in row}
    return {name for name in names if not any(fnmatchcase(name, pattern) for pattern in (*FIELDS, *OPTIONS))}


def finite(number: float) -> float | None:
    """Return a number as JSON can hold it: None for infinities and NaN."""
    return number if math.isfinite(number) else None


def error_fields(error: float, lse_error: float) -> Row:
    """Return the fields of a row on the errors of rows and of their LSE."""
    return {"error": finite(error), "lse_error": finite(lse_error)}


def left_out(name: str, error: Exception) -> str:
    """Return the line to print on something that is not measured, and why."""
    return f"left out: {name}: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"


@contextmanager
def leave_out(name: str, errors: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[None]:
    """Run a block, and if it fails, print that something is not measured.

    Args:
        errors: Errors by which it may fail; by default any, as others' code may raise anything.
    """
    try:
        yield
    except errors as error:
        print(left_out(name, error), flush=True)


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
