"""The decode step as CUDA graphs: one for each of a list of batch sizes, replayed after the step's numbers have been
copied into static memory.
"""

import traceback
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.step import StepMetadata
from dcpmla.cache.compressed import AnyCache
from dcpmla.parallel.collectives import is_failed_collective, named
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.padding import PaddedStep

DecodeStep = Callable[[Tensor, StepMetadata, AnyCache], Tensor]
_TORCH = str(Path(torch.__file__).parent)


class CannotCapture(RuntimeError):
    """The reason why no CUDA graph can hold a step."""


class DecodeGraph:
    """A decode step, one token a request, captured per batch size and replayed for batches padded to the next one.

    A replay gives bit for bit what `run_eagerly` gives: the same step on the same padded rows, without a graph. (Matrix
    products pick their kernels by the number of rows, so the step on the bare rows may differ in the last bits.) Rows
    of padding write nothing to the cache and attend to nothing. Runs follow each other on one stream: all of them use
    the same memory.

    Args:
        step: step(inputs [N, ...], metadata, cache) -> [N, ...], N tokens of N decodes: a model, or a stack of
            `MLAAttention` layers. It may not look at results from the host, and its collectives must be the same on all
            ranks.
        input_like: [...], shape, dtype and device of one request's input: a token id, or a row of hidden states.
        cache: written and read by the step; its tensors must keep their addresses.
        mesh: groups of this rank.
        max_num_seqs: requests of the largest batch.
        max_model_len: longest sequence, which bounds the block table.
    Raises:
        ValueError: max_num_seqs or max_model_len below 1.

    Attributes:
        batch_sizes: ascending: 1, 2, 4, then each multiple of 8 to 256 and of 16 beyond, and max_num_seqs (the sizes
            that vLLM captures).
        is_captured: whether `run` replays.
    """

    def __init__(
        self,
        step: DecodeStep,
        input_like: Tensor,
        cache: AnyCache,
        mesh: DCPMesh,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self._step, self._cache, self._mesh, self._device = step, cache, mesh, input_like.device
        self._addresses = _addresses(cache)
        self._padded = PaddedStep(input_like, max_num_seqs, max_model_len, cache.sizes, mesh.dcp_rank)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._out: Tensor | None = None  # of the largest batch, [max_num_seqs, ...]
        self.batch_sizes = batch_sizes(max_num_seqs)

    @property
    def is_captured(self) -> bool:
        """True once `capture` has succeeded: `run` replays."""
        return bool(self._graphs)

    def batch_size(self, num_reqs: int) -> int:
        """Return the batch size that so many requests are padded to.

        Raises:
            ValueError: more than the largest batch has, or none.
        """
        if not 1 <= num_reqs <= self.batch_sizes[-1]:
            raise ValueError(
                f"num_reqs is {num_reqs}; the decode graph is for 1 to {self.batch_sizes[-1]} requests (max_num_seqs)"
            )
        return self.batch_sizes[bisect_left(self.batch_sizes, num_reqs)]

    def run(self, inputs: Tensor, metadata: StepMetadata, cache: AnyCache) -> Tensor:
        """Run a decode step: a replay, or before `capture` the padded step itself. Collective over the TP group.

        Args:
            inputs: [n, ...], n = metadata.num_tokens.
            metadata: of n decodes of one token each.
            cache: the one it was made for.
        Returns:
            [n, ...] in static memory: good until the next run.
        Raises:
            ValueError: more requests or longer ones than it was made for, prefills, another cache, blocks that the
                cache does not have, other shapes, dtypes or devices.
        """
        batch_size = self._fill(inputs, metadata, cache)
        if batch_size not in self._graphs:
            return self._compute(batch_size)[: metadata.num_tokens]
        assert self._out is not None
        with named(f"decode graph of {batch_size} requests", self._mesh.tp_group):
            self._graphs[batch_size].replay()
        return self._out[: metadata.num_tokens]

    def run_eagerly(self, inputs: Tensor, metadata: StepMetadata, cache: AnyCache) -> Tensor:
        """Run a decode step without its graphs: a replay equals it bit for bit."""
        return self._compute(self._fill(inputs, metadata, cache))[: metadata.num_tokens]

    def capture(self) -> None:
        """Capture all batch sizes, the largest first: one memory pool serves them all. Collective over the TP group.

        Raises:
            ValueError: the device is no GPU.
            CannotCapture: on every rank, when some rank's step waits for the GPU, or has no memory left for a graph.
            RuntimeError: the step fails without a graph too; or it breaks a capture off, after which torch's allocator
                cannot go on.
        """
        if self._device.type != "cuda":
            raise ValueError(f"input_like is on {self._device}; only steps on a GPU can be captured")
        self.release()
        self._padded.clear()  # rows of padding leave the cache alone
        try:
            with torch.cuda.device(self._device):
                self._capture_all(torch.cuda.Stream(), torch.cuda.graph_pool_handle())
        except CannotCapture:
            # Whoever keeps the error keeps this object by its frames, and graphs would hold up NCCL's end.
            self.release()
            raise

    def release(self) -> None:
        """Free what was captured; `run` computes eagerly from then on.

        To be called before the process groups are destroyed: NCCL waits there until no graph holds operations of the
        group.
        """
        self._graphs = {}

    def _fill(self, inputs: Tensor, metadata: StepMetadata, cache: AnyCache) -> int:
        if _addresses(cache) != self._addresses:
            raise ValueError(
                "cache is another one than the decode graph was made for; give that one, or make a graph for this one"
            )
        metadata.check_blocks(cache.sizes.num_blocks)
        batch_size = self.batch_size(metadata.num_tokens)
        self._padded.fill(inputs, metadata, batch_size)
        return batch_size

    @torch.inference_mode()
    def _compute(self, batch_size: int) -> Tensor:
        out = self._step(*self._padded.rows(batch_size), self._cache)
        if self._out is None:
            with torch.inference_mode(False):  # the caller may use it outside of inference mode
                self._out = torch.empty(self.batch_sizes[-1], *out.shape[1:], dtype=out.dtype, device=out.device)
        if tuple(out.shape) != (batch_size, *self._out.shape[1:]):
            raise ValueError(
                f"step returned shape {tuple(out.shape)}; expected {(batch_size, *self._out.shape[1:])}, a row a "
                f"request"
            )
        return self._out[:batch_size].copy_(out)

    def _capture_all(self, stream: torch.cuda.Stream, pool: Any) -> None:
        largest = self.batch_sizes[-1]
        self._warm_up(largest, stream)
        self._agree(self._host_sync(largest, stream))
        for size in reversed(self.batch_sizes):
            self._warm_up(size, stream)
            self._graphs[size] = torch.cuda.CUDAGraph()
            self._agree(self._capture(self._graphs[size], size, stream, pool))

    def _warm_up(self, batch_size: int, stream: torch.cuda.Stream) -> None:
        """Make the first call, whose compiling, loading and allocating may not be part of a graph."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(batch_size)
        torch.cuda.synchronize()

    def _host_sync(self, batch_size: int, stream: torch.cuda.Stream) -> str:
        """Return where the step waits for the GPU, "" for nowhere: found here, for a capture would break off there."""
        try:
            with torch.cuda.stream(stream), error_on_host_sync():
                self._compute(batch_size)
        except RuntimeError as error:
            if is_failed_collective(error):
                raise
            return _reason(error)
        finally:
            torch.cuda.synchronize()
        return ""

    def _capture(self, graph: torch.cuda.CUDAGraph, batch_size: int, stream: torch.cuda.Stream, pool: Any) -> str:
        """Capture a size; return where it ran out of memory, or "": other errors leave no orderly end."""
        try:
            # The outer context gives the old stream back even if the capture breaks off. What other threads do, NCCL's
            # and the watchdog's, does not touch the capture: hence thread_local.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self._compute(batch_size)
        except torch.OutOfMemoryError as error:
            return _reason(error)
        except RuntimeError as error:
            raise RuntimeError(
                f"the decode graph of {batch_size} requests broke off (--enforce-eager goes without graphs): "
                f"{_reason(error)}"
            ) from error
        return ""

    def _agree(self, reason: str) -> None:
        """Raise on every rank if some rank has a reason to; the first such rank's is given."""
        reasons = [""] * self._mesh.tp_size
        with named("agreeing on decode graphs", self._mesh.tp_group):
            dist.all_gather_object(reasons, reason, group=self._mesh.tp_group)
        for rank, found in enumerate(reasons):
            if found:
                raise CannotCapture(f"{found}, on rank {rank}")


def _addresses(cache: AnyCache) -> list[int]:
    return [tensor.data_ptr() for tensor in cache.tensors]


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes to capture, ascending, the last one max_num_seqs. Source: vLLM's cudagraph_capture_sizes."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@contextmanager
def error_on_host_sync() -> Iterator[None]:
    """Have whatever waits for the GPU raise a RuntimeError: a graph cannot hold it, and a capture that breaks off
    spoils torch's allocator.
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
    """Return what went wrong first, in a line, and the last line of code outside of torch that it came through."""
    if isinstance(error.__context__, RuntimeError):  # a capture that breaks off raises once more when it ends
        error = error.__context__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    words = str(error).partition("\n")[0].partition(" GPU ")[0].rstrip(".")  # less torch's account of the memory
    return (words or type(error).__name__) + where
