"""SGLang without CUDA: its wheel unpacked, beside the packages that it imports and this project does not."""

import sys
import zipfile
from functools import partial
from pathlib import Path

from tests.engines.trees import cache, once, packages, pip

VERSION = "0.5.23"
# What a CPU never calls: empty modules in its place (`sglang_cpu/sitecustomize.py`).
STUBS = (
    "torchvision,torchaudio,sgl_kernel,tvm_ffi,datasets,IPython,gguf,soundfile,sentencepiece,tiktoken,"
    "compressed_tensors,outlines,xgrammar,opentelemetry"
)


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
