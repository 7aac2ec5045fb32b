"""Compilation for Hopper, without a GPU; unchanged kernels come from Triton's cache on disk."""

import contextlib
import io
from pathlib import Path
from typing import Any

_LOG = "ptxas.log"


def compile_source(source: Any, options: dict[str, Any] | None = None) -> Any:
    """Compile a kernel's source without line numbers, which take a sixth of the time and affect no instruction."""
    import triton
    from triton.backends.compiler import GPUTarget

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_with_log(source: Any, options: dict[str, Any]) -> tuple[Any, str]:
    """Compile a kernel; return it with its assembler's log, which is kept beside it in the cache."""
    import triton
    from triton.runtime.cache import get_cache_manager

    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = compile_source(source, options)
        kept = get_cache_manager(compiled.hash)
        if not log.getvalue() and kept.get_file(_LOG) is None:  # compiled before, by `compile_source`
            triton.knobs.compilation.always_compile = True
            compiled = compile_source(source, options)
    if log.getvalue():
        kept.put(log.getvalue(), _LOG)
    return compiled, Path(kept.get_file(_LOG)).read_text()
