"""Triton's compiler: compilations before an engine is ready, and a watch over later ones, which stall requests."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_NUMBERS = "dcpmla.attention.step.kernels"  # module of the kernel that writes positions, requests and lengths


@contextmanager
def rehearsal(rank: int, num_ranks: int, meet: Callable[[], object]) -> Iterator[set[object]]:
    """Compile the kernels that a block launches, and launch none but the one that writes a step's numbers: threads
    compile while the block goes on. New memory is zero, because no kernel writes what the block's other operations may
    read as indices. A step's numbers are written, because indices are computed from them.

    Triton's cache on disk has the kernels afterwards, so the ranks of a host share them out. One that cannot be
    compiled fails where it is launched. A kernel's key in the cache has a digest of the package's sources: Triton's own
    lacks constants of other modules, and depends on the order of the first launches (3.6), so that later starts would
    compile again.

    Args:
        rank, num_ranks: This rank among those that share a cache on disk, and their number.
        meet: Function that returns when all ranks are in it.
    Yields:
        The kernels that the block has asked for so far, each with its specialization.
    """
    from triton import AsyncCompileMode  # triton exists on Linux only
    from triton.runtime.jit import JITFunction

    class Mode(AsyncCompileMode):
        def submit(self, key: Any, compile_fn: Any, finalize_fn: Any, *others: Any) -> Any:
            kernel = super().submit(key, compile_fn, finalize_fn, *others)
            finalize_fn(kernel)  # or Triton 3.6 would digest the kernel's source at each further call
            return kernel

    asked: set[object] = set()
    run, sources = JITFunction.run, _digest_sources()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if kernel.hash is None:
            kernel.hash = hashlib.sha256(
                f"{sources} {kernel.fn.__module__}.{kernel.fn.__qualname__}".encode()
            ).hexdigest()
        if kernel.fn.__module__ == _NUMBERS:  # no mode is active in an empty context
            compiled = Context().run(run, kernel, *args, grid=grid, warmup=False, **options)
        else:
            compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        asked.add(compiled)
        return compiled

    with _SharedCompiler(rank, num_ranks) as threads, Mode(threads, ignore_errors=True):
        try:
            with (
                patch("triton.runtime.jit.JITFunction.run", compile_only),
                patch("torch.empty", _zeroed(torch.empty)),
                patch("torch.empty_like", _zeroed(torch.empty_like)),
                patch("torch.Tensor.new_empty", _zeroed(Tensor.new_empty)),
            ):
                yield asked
            threads.finish_own()
            meet()
        finally:
            threads.start_others()


def _zeroed(new: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: new(*args, **kwargs).zero_()


def _digest_sources() -> str:
    """Digest the package's code."""
    package = Path(__file__).parents[1]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))).hexdigest()


class _SharedCompiler(ThreadPoolExecutor):
    """Threads that compile every num_ranks-th kernel at once, and the others when other ranks have compiled them."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(max(1, len(os.sched_getaffinity(0)) // num_ranks), "compiler")
        self._rank, self._num_ranks = rank, num_ranks
        self._own: list[Future[Any]] = []
        self._others: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take a compilation; ranks ask for the same ones in the same order."""
        if (len(self._own) + len(self._others)) % self._num_ranks == self._rank:
            self._own.append(super().submit(fn, *args, **kwargs))
            return self._own[-1]
        self._others.append((Future(), lambda: fn(*args, **kwargs)))
        return self._others[-1][0]

    def finish_own(self) -> None:
        """Wait for this rank's share."""
        wait(self._own)

    def start_others(self) -> None:
        """Start the compilations of other ranks' kernels, which their share of the cache shortens."""
        for future, compile_kernel in self._others:
            super().submit(_fulfil, future, compile_kernel)


def _fulfil(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def watch() -> Sequence[str]:
    """Name the kernels that this process compiles, or loads from Triton's cache, from now on: each in a warning, with
    its specialization, and in the returned list. An earlier watch ends.
    """
    from triton import knobs  # triton exists on Linux only

    names: list[str] = []

    def on_compiled(*, fn: Any, repr: str, **_: object) -> None:
        names.append(f"{fn.module}.{fn.name}")
        _log.warning("compiled after the warm-up, while requests waited: %s.%s; please report it", fn.module, repr)

    knobs.runtime.jit_post_compile_hook = on_compiled
    return names


def end_watch() -> None:
    """Stop naming kernels, because an engine that is being loaded compiles them in time."""
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = None
