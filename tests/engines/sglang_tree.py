"""SGLang without CUDA: its wheel unpacked into a cache outside the checkout, beside the packages that it imports."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

VERSION = "0.5.23"
# torch, transformers and what they need come from the environment that runs the tests.
PACKAGES = [
    "aiohappyeyeballs==2.7.1",
    "aiohttp==3.14.5",
    "aiosignal==1.4.0",
    "attrs==26.1.0",
    "certifi==2026.10.18",
    "charset-normalizer==3.5.2",
    "dill==0.4.1",
    "distro==1.9.0",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "frozenlist==1.8.0",
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "interegular==0.3.3",
    "jiter==0.19.0",
    "msgspec==0.22.0",
    "multidict==7.2.1",
    "openai==2.8.0",
    "orjson==3.13.0",
    "partial-json-parser==0.2.1.1.post7",
    "prometheus_client==0.26.0",
    "propcache==0.5.4",
    "py-spy==0.4.3",
    "pybase64==1.5.1",
    "python-multipart==0.0.34",
    "pyzmq==27.3.0",
    "requests==2.34.2",
    "setproctitle==1.3.8",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "urllib3==2.8.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
    "xxhash==4.1.0",
    "yarl==1.25.1",
    "zstandard==0.25.0",
]
STUBS = (
    "torchvision,torchaudio,sgl_kernel,tvm_ffi,datasets,IPython,gguf,soundfile,sentencepiece,tiktoken,"
    "compressed_tensors,outlines,xgrammar,opentelemetry"
)
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
ONLY = ["--no-deps", "--only-binary=:all:"]


def sglang_path(release: str = VERSION) -> list[str]:
    """Return the folders that hold SGLang and its packages, fetched where they are not there; skip the test where they
    cannot be had.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dcpmla" / "engines"
    tree = root / f"sglang-{release}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not tree.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        unfinished = root / f"{tree.name}.{os.getpid()}"
        try:
            _fetch(unfinished, release)
            unfinished.rename(tree)
        except subprocess.CalledProcessError as error:
            why = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"sglang {release} cannot be had from pip here: {why}")
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return [str(tree), str(tree / "packages")]


def _fetch(tree: Path, release: str) -> None:
    tree.mkdir()
    _run(*PIP, "download", *ONLY, "--dest", str(tree), f"sglang=={release}")
    (wheel,) = tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
    wheel.unlink()
    _run(*PIP, "install", *ONLY, "--target", str(tree / "packages"), *PACKAGES)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
