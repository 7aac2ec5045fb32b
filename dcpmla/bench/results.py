"""Benchmark files: `{"commit", "machine", "versions", "rows"}`, so that a number can be traced to what made it."""

import argparse
import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dcpmla.cli.output import write_json


def add_commit_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", help="recorded in the result; default: git's HEAD")


def write_results(
    path: Path,
    rows: Sequence[dict[str, Any]],
    num_ranks: int,
    device: torch.device,
    commit: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write rows with the commit (git's HEAD if None), the machine and the versions that they were measured with.

    Args:
        more: what stands behind the rows: findings that are none of them.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    content = {
        "commit": commit or _head(),
        "machine": f"{num_ranks} x {name}",
        "versions": versions(),
        "rows": list(rows),
    }
    write_json(path, {**content, **(more or {})})


def _head() -> str:
    """Git's HEAD where the package lies; "unknown" where that is no checkout."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str | None]:
    """What numbers hang on: torch and what it works with; NCCL where there are GPUs."""
    found: dict[str, str | None] = {
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "triton": installed("triton"),
    }
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["nvls"] = os.environ.get("NCCL_NVLS_ENABLE")
    return found


def installed(package: str) -> str | None:
    """Its version; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
