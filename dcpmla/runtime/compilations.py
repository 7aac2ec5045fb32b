"""A watch over Triton's compiler: a kernel that is compiled while requests wait stalls them, so each is named."""

import logging
from collections.abc import Sequence
from typing import Any

_log = logging.getLogger(__name__)


def watch() -> Sequence[str]:
    """Name from now on the kernels that this process compiles, or loads from Triton's cache: each in a warning, with
    what it is specialized for, and in the list that is returned. It ends an earlier watch.
    """
    from triton import knobs  # triton exists on Linux only

    names: list[str] = []

    def on_compiled(*, fn: Any, repr: str, **_: object) -> None:
        names.append(f"{fn.module}.{fn.name}")
        _log.warning("compiled after the warm-up, while requests waited: %s.%s; please report it", fn.module, repr)

    knobs.runtime.jit_post_compile_hook = on_compiled
    return names


def end_watch() -> None:
    """Stop naming kernels: those of an engine that is being loaded are compiled in time."""
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = None
