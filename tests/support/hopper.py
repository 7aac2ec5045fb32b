"""Compilation for Hopper, without a GPU; unchanged kernels come from Triton's cache on disk."""

import contextlib
import hashlib
import io
from functools import cache
from pathlib import Path
from typing import Any

import dcpmla

_LOG = "ptxas.log"


def compile_source(source: Any, options: dict[str, Any] | None = None) -> Any:
    """Compile a kernel's source without line numbers, which take a sixth of the time and affect no instruction."""
    import triton
    from triton.backends.compiler import GPUTarget

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_with_log(source: Any, options: dict[str, Any]) -> tuple[Any, str]:
    """Compile a kernel, unless the package is as it was at the last time; return it with its assembler's log.

    The log lies beside the kernel in Triton's cache.
    """
    import triton
    from triton.runtime.cache import get_cache_manager

    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = compile_source(source, options)
        files = get_cache_manager(compiled.hash)
        path = files.get_file(_LOG)
        digest, _, kept = Path(path).read_text().partition("\n") if path else ("", "", "")
        if not log.getvalue() and digest != _digest():
            triton.knobs.compilation.always_compile = True
            compiled = compile_source(source, options)
    if log.getvalue():
        files.put(f"{_digest()}\n{log.getvalue()}", _LOG)
    return compiled, log.getvalue() or kept


@cache
def _digest() -> str:
    """Digest the package's code: Triton's key of a kernel lacks constants that it reads from another module."""
    paths = sorted(Path(dcpmla.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
