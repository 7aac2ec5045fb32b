"""Libraries of expert peers: archives in the directory of peers, whose kernels nvcc or Triton compiles at first use."""

import importlib
import os
import re
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language

from benchmarks.peers import import_file

_TOOLKIT = "/usr/local/cuda"


def load_deep_gemm(directory: Path) -> Any:
    """Return the package `deep_gemm`: DeepGEMM as vLLM vendors it."""
    _put_on_path(_unpack(directory / "deep_gemm.tar.xz"))
    _set_where_unset(CUDA_HOME=_toolkit(), DG_JIT_CACHE_DIR=_folder() / "deep_gemm-cache")
    return importlib.import_module("deep_gemm")


def load_humming(directory: Path) -> Any:
    """Return the package `humming`, with the modules that are called."""
    _put_on_path(_unpack(directory / "humming.tar.xz"))
    # NVRTC, its default, runs in a process of its own, and there does not find its other library on every machine.
    _set_where_unset(CUDA_HOME=_toolkit(), HUMMING_COMPILER="nvcc")
    _set_where_unset(HUMMING_CACHE_DIR=_folder() / "humming-cache", HUMMING_TMP_DIR=_folder() / "humming-locks")
    _set_where_unset(HUMMING_DISABLE_PARALLEL_BUILD=1)  # at import, of programs that the wheel has
    for module in ("forward", "schema", "transform", "tune"):
        importlib.import_module(f"humming.{module}")
    return importlib.import_module("humming")


def load_vllm(directory: Path) -> Any:
    """Return vLLM's file with its Triton kernel and launcher, without the rest of vLLM."""
    path = _unpack(directory / "vllm_moe.tar.xz") / "fused_moe.py"
    with _stubs(re.findall(r"^(?:from|import) (vllm[\w.]*)", path.read_text(), re.MULTILINE)):
        module = import_file(path)
    module.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=None)
    module.get_device_name_as_file_name = lambda: torch.cuda.get_device_name().replace(" ", "_")
    module.enable_swap_ab = lambda rows, columns: rows < 64 <= columns  # this and the next: as in vLLM on Hopper
    module.resolve_moe_use_td = lambda: False
    return module


class _Stub(ModuleType):
    """A false value that replaces imports a kernel does not need; calls and attributes return another one."""

    def __getattr__(self, name: str) -> "_Stub":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(name)

    def __call__(self, *_: Any, **__: Any) -> "_Stub":
        return self

    def __or__(self, _: Any) -> "_Stub":
        return self

    def __bool__(self) -> bool:
        return False


@contextmanager
def _stubs(names: list[str]) -> Iterator[None]:
    """Put stubs for modules, and the packages that they are in, where imports find them."""
    modules: dict[str, _Stub] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            stub = modules.setdefault(".".join(parts[:length]), _Stub(name))
            if length > 1:
                setattr(modules[".".join(parts[: length - 1])], parts[length - 1], stub)
    vars(modules["vllm.triton_utils"]).update(tl=triton.language, triton=triton)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _unpack(archive: Path) -> Path:
    """Return the folder with an archive's files, unpacked once."""
    if not archive.is_file():
        raise ValueError(f"--peers is {archive.parent}, which has no {archive.name}")
    folder = _folder() / f"{archive.name.partition('.')[0]}-{sha256(archive.read_bytes()).hexdigest()[:16]}"
    if not folder.is_dir():
        with tarfile.open(archive) as file, tempfile.TemporaryDirectory(dir=folder.parent) as part:
            file.extractall(Path(part) / "all", filter="data")
            (Path(part) / "all").rename(folder)
    return folder


def _folder() -> Path:
    """Return this user's folder for libraries, whose code is imported from it.

    Raises:
        ValueError: The folder is a file or a link, another user's, or open to other users.
    """
    folder = Path(tempfile.gettempdir()) / f"dcpmla-peers-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"--peers: {folder} has mode {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}; it must "
            f"be a directory of user {os.geteuid()}, closed to others (drwx------): remove it, or set TMPDIR"
        )
    return folder


def _put_on_path(folder: Path) -> None:
    """Make packages importable; installed ones come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _set_where_unset(**variables: object) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def _toolkit() -> Path:
    """Return CUDA's folder. An nvcc on PATH may be a script outside of it, so it is asked last."""
    nvcc = shutil.which("nvcc")
    return Path(_TOOLKIT) if nvcc is None or Path(_TOOLKIT).is_dir() else Path(nvcc).resolve().parent.parent
