"""CUDA graphs of one computation in several sizes, in one memory pool (`GraphSet`)."""

import gc
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.step.metadata import Defer
from dcpmla.parallel.collectives import gather_values, is_failed_collective, named
from dcpmla.parallel.mesh import DCPMesh

# Function of a size and of what interrupts the capture; None where nothing may.
Compute = Callable[[Any, Defer | None], None]
# Function that yields the sizes to capture, in order, and shows the progress.
Track = Callable[[Sequence[Hashable]], Iterable[Hashable]]
_TORCH = str(Path(torch.__file__).parent)


class CannotCapture(RuntimeError):
    """The reason why no CUDA graph can hold a step."""


class GraphSet:
    """CUDA graphs of one computation in several sizes, in one memory pool.

    A computation may interrupt its graph (`Defer`) for a part whose launches differ from run to run. Each run calls the
    part between two graphs, with the run's own argument.

    Args:
        compute: Computation over static memory. It may not look at results from the host, and its collectives must be
            the same on all ranks.
        name: Name of the computation in messages.
        mesh: Groups of this rank.
        device: GPU of the graphs.
    """

    def __init__(self, compute: Compute, name: str, mesh: DCPMesh, device: torch.device) -> None:
        self._compute, self._name, self._mesh, self._device = compute, name, mesh, device
        self._parts: dict[Hashable, list[Callable[[Any], None]]] = {}

    @property
    def is_captured(self) -> bool:
        """Return whether any size is captured."""
        return bool(self._parts)

    def run(self, size: Hashable, argument: Any = None) -> None:
        """Replay the graphs of a size, or compute it if it is not captured. Collective over the TP group.

        Args:
            argument: Last argument of the parts between graphs; None for a computation without such parts.
        """
        if size not in self._parts:
            self._compute(size, None if argument is None else lambda part, arguments: part(*arguments, argument))
            return
        for part in self._parts[size]:
            part(argument)

    def compute(self, size: Hashable) -> None:
        """Compute a size without what goes between its graphs. Collective over the TP group."""
        self._compute(size, _skip)

    def capture(self, sizes: Sequence[Hashable], track: Track = iter) -> None:
        """Capture sizes, the largest first. Collective over the TP group.

        Args:
            track: Function that is called with the sizes, and yields each before its capture.
        Raises:
            CannotCapture: On every rank, when some rank's computation waits for the GPU, or has no memory left.
            RuntimeError: The computation fails without a graph too, or it breaks a capture off, after which torch's
                allocator cannot go on.
        """
        self.release()
        gc.collect()  # no old graph may be freed during a capture
        gc.disable()
        try:
            with torch.cuda.device(self._device):
                stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
                for size in track(sizes):
                    self._warm_up(size, stream)
                    if size == sizes[0]:  # All sizes run the same code, so one shows whether it waits for the GPU.
                        self._agree(self._host_sync(size, stream))
                    self._agree(self._capture(size, stream, pool))
        except CannotCapture:
            # The error's frames keep this object alive, and graphs would hold up NCCL's end.
            self.release()
            raise
        finally:
            gc.enable()

    def release(self) -> None:
        """Free the graphs. To be called before the process groups are destroyed: NCCL waits there until no graph holds
        operations of the group.
        """
        self._parts = {}

    def _warm_up(self, size: Hashable, stream: torch.cuda.Stream) -> None:
        """Compute once, because a graph may not hold compiling, loading and first allocations."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.compute(size)
        torch.cuda.synchronize()

    def _host_sync(self, size: Hashable, stream: torch.cuda.Stream) -> str:
        """Return the line of code that waits for the GPU, "" for none: a capture would break off there."""
        try:
            with torch.cuda.stream(stream), error_on_host_sync():
                self.compute(size)
        except RuntimeError as error:
            if is_failed_collective(error):
                raise
            return _reason(error)
        finally:
            torch.cuda.synchronize()
        return ""

    def _capture(self, size: Hashable, stream: torch.cuda.Stream, pool: Any) -> str:
        """Capture a size; return the line of code that ran out of memory, "" for none."""
        recorder = _Recorder(partial(self._replay, size), pool)
        try:
            with torch.cuda.stream(stream), recorder.recording():
                self._compute(size, recorder.defer)
        except torch.OutOfMemoryError as error:
            return _reason(error)
        except RuntimeError as error:  # other errors leave no orderly end
            raise RuntimeError(
                f"the {self._name} of {size} broke off (--enforce-eager goes without graphs): {_reason(error)}"
            ) from error
        self._parts[size] = recorder.parts
        return ""

    def _replay(self, size: Hashable, graph: torch.cuda.CUDAGraph, _: Any) -> None:
        with named(f"{self._name} of {size}", self._mesh.tp_group):
            graph.replay()

    def _agree(self, reason: str) -> None:
        """Raise CannotCapture on every rank if some rank has a reason."""
        reasons = gather_values(reason, self._mesh.tp_group, "agreeing on CUDA graphs")
        for rank, text in enumerate(reasons):
            if text:
                raise CannotCapture(f"{text}, on rank {rank}")


class _Recorder:
    """A capture in progress.

    Attributes:
        parts: Functions of a run's argument: replays of graphs, and the parts between them.
    """

    def __init__(self, replay: Callable[[torch.cuda.CUDAGraph, Any], None], pool: Any) -> None:
        self._replay, self._pool = replay, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self.parts: list[Callable[[Any], None]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture what the block launches."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def defer(self, part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """End the graph, keep a part, and begin the next graph."""
        self._end()
        self.parts.append(partial(part, *map(borrow, arguments)))
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's and the watchdog's, do not disturb a capture of this thread.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        assert self._graph is not None
        self._graph.capture_end()
        self.parts.append(partial(self._replay, self._graph))


def _skip(part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Leave a part out."""


def borrow(value: Any) -> Any:
    """Return a value whose GPU tensors share memory with the given ones, but do not keep it allocated.

    A graph's memory is free for the graphs after it once its tensors are gone, and replays follow the same order. Parts
    between graphs must not keep the tensors of all layers alive.
    """
    if isinstance(value, Tensor):
        return _alias(value) if value.is_cuda else value
    if hasattr(value, "map_tensors"):
        return value.map_tensors(borrow)
    if isinstance(value, tuple):
        parts = map(borrow, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: borrow(getattr(value, field.name)) for field in fields(value)})
    return value


class _Memory:
    """Memory of a GPU, for torch's import of others' arrays."""

    def __init__(self, address: int, num_bytes: int) -> None:
        data = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = data


def _alias(tensor: Tensor) -> Tensor:
    """Return the same elements without a share in their allocation."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    size, stride = tensor.shape, tensor.stride()
    num_elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    memory = _Memory(tensor.data_ptr(), num_elements * tensor.element_size())
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).as_strided(size, stride)


@contextmanager
def error_on_host_sync() -> Iterator[None]:
    """Make every wait for the GPU raise a RuntimeError: a graph cannot hold one, and an aborted capture leaves torch's
    allocator unusable.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _reason(error: BaseException) -> str:
    """Return the first error in a line, and the last line of code outside of torch that it came through."""
    if isinstance(error.__context__, RuntimeError):  # a capture that breaks off raises once more when it ends
        error = error.__context__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
    line = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    words = str(error).partition("\n")[0].partition(" GPU ")[0].rstrip(".")  # less torch's account of the memory
    return (words or type(error).__name__) + line
