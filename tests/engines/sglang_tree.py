"""SGLang without CUDA: its wheel unpacked, beside the packages that it imports and this project does not; and models
and prompts for it.
"""

import json
import os
import sys
import zipfile
from functools import partial
from pathlib import Path

import torch

from tests.engines.trees import cache, once, packages, pip
from tests.support.launchers import ROOT, python_path
from tests.support.sources import metadata

OLDEST, VERSION = "0.5.22", "0.5.23"
CPU = ROOT / "tests" / "engines" / "sglang_cpu"
# What a CPU never calls: empty modules in its place (`sglang_cpu/sitecustomize.py`).
STUBS = (
    "torchvision,torchaudio,sgl_kernel,tvm_ffi,datasets,IPython,gguf,soundfile,sentencepiece,tiktoken,"
    "compressed_tensors,outlines,xgrammar,opentelemetry"
)

DRAFTS = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def sglang_variables(site: Path, version: str = VERSION) -> dict[str, str]:
    """Return the environment of a release of SGLang on a CPU; `site` takes what pip would install of plug-ins."""
    _write_entry_points(site)
    cores = sorted(os.sched_getaffinity(0))
    return {
        "PYTHONPATH": python_path(site, CPU, *sglang_path(version), ROOT),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "SGLANG_TEST_STUBS": STUBS,
        "HF_HUB_OFFLINE": "1",
    }


def _write_entry_points(site: Path) -> None:
    """Write our entry points, and those of the tests' plug-in."""
    declared = metadata()["entry-points"]["sglang.srt.plugins"]
    of_tests = {"tests": "tests.engines.sglang_cpu.plugin:register"}
    for name, points in (("dcpmla", declared), ("dcpmla_tests", of_tests)):
        folder = site / f"{name}-0.0.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.0\n")
        lines = "".join(f"{key} = {value}\n" for key, value in points.items())
        (folder / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{lines}")


def sglang_path(version: str = VERSION) -> list[str]:
    """Return the folders that hold SGLang and its packages; skip the test where they cannot be had."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"  # its wheels hold libraries for one each
    return [str(once(cache() / f"sglang-{version}-{python}", partial(_unpack, version))), str(packages("sglang"))]


def _unpack(version: str, folder: Path) -> None:
    pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"sglang=={version}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()


def for_sglang(model: Path) -> Path:
    """Add to a saved model's config what SGLang asks of it and transformers does not save; return its directory."""
    config = model / "config.json"
    asked = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    config.write_text(json.dumps(json.loads(config.read_text()) | asked))
    return model


def prompts_of(*lens: int) -> list[list[int]]:
    """Return prompts of these lengths, of random tokens below 190."""
    generator = torch.Generator().manual_seed(sum(lens))
    return [torch.randint(1, 190, (length,), generator=generator).tolist() for length in lens]
