"""Captures without a GPU: a computation is recorded operator by operator and replayed over the same memory, as a CUDA
graph would. So Python's decisions stay as they were, and memory is read again.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcpmla.attention.output.rows import OutputRows
from dcpmla.runtime.capture import GraphSet
from dcpmla.runtime.graph import StepGraph


class Recording(TorchDispatchMode):
    """The operators of a computation, with the memory that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self, _: Any) -> None:
        """Run them again, each with its results where they were."""
        for func, args, kwargs, out in self.calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def capture(graph: StepGraph) -> None:
    """`capture` without a GPU. NumPy lays tokens out on a CPU, so that is called in replays, not recorded."""
    _capture(graph._graphs, graph._cleared(graph.sizes[::-1]))
    for size, parts in graph._graphs._parts.items():
        parts.insert(0, lambda _, size=size: graph._inputs.lay_out(size))


def _leave_out(part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Zero the output of a part: caches of 8 bits on CPUs refuse NaN, which memory that nothing wrote may hold."""
    for argument in arguments:
        if isinstance(argument, OutputRows):
            argument.seek(0)
            argument.pad()


def _capture(graphs: GraphSet, sizes: Iterable[Hashable]) -> None:
    for size in sizes:
        graphs._compute(size, _leave_out)
        parts: list[Callable[[Any], None]] = []
        recordings: list[Recording] = []

        def begin(parts: list[Any] = parts, recordings: list[Recording] = recordings) -> None:
            recordings.append(Recording())
            recordings[-1].__enter__()
            parts.append(recordings[-1].replay)

        def defer(
            part: Callable[..., None],
            arguments: tuple[Any, ...],
            parts: list[Any] = parts,
            recordings: list[Recording] = recordings,
            begin: Callable[[], None] = begin,
        ) -> None:
            recordings[-1].__exit__(None, None, None)
            parts.append(partial(part, *arguments))
            _leave_out(part, arguments)
            begin()

        begin()
        graphs._compute(size, defer)
        recordings[-1].__exit__(None, None, None)
        graphs._parts[size] = parts
