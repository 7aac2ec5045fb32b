"""The decode step as CUDA graphs: one for each of a list of batch sizes, replayed after the step's numbers have been
copied into static memory.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from dcpmla.attention.build import StepBuilder
from dcpmla.attention.step import Cut, StepMetadata, StepRequests
from dcpmla.cache.plan import Cache
from dcpmla.fields import check_fields, whole
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS
from dcpmla.runtime.capture import GraphSet, Track
from dcpmla.runtime.graph_inputs import GraphInputs, GraphSize

DecodeStep = Callable[[Tensor, StepMetadata, Cache], Tensor]


class DecodeGraph:
    """A decode step, captured per batch size and replayed for steps padded to the next size, with one token per
    request, or max_query_len if tokens are drafted.

    A replay is bitwise equal to `run_eagerly`: the same step on the same padded rows, without a graph. (Matrix
    products pick their kernels by the number of rows, so the step on the bare rows may differ in the last bits.) Rows
    of padding write nothing to the cache and attend to nothing. Runs must follow each other on one stream because they
    share memory.

    Args:
        step: step(inputs [N, ...], metadata, cache) -> [N, ...], N tokens of decodes: a model, or a stack of
            `MLAAttention` layers. It may not look at results from the host, and its collectives must be the same on all
            ranks.
        input_like: [...], shape, dtype and device of one token's input: its id, or a row of hidden states.
        cache: Cache that the step reads and writes; its tensors must keep their addresses.
        steps: Builder of steps over the cache (`AttentionKind.step_builder`).
        mesh: Groups of this rank.
        max_num_seqs: Requests of the largest batch.
        max_model_len: Longest sequence, which bounds the block table.
        max_query_len: Tokens of a request with all its drafts; 1 without drafts.
    Raises:
        ValueError: max_num_seqs, max_model_len or max_query_len is below 1.

    Attributes:
        batch_sizes: Requests of the batches of one token each, ascending: 1, 2, 4, then each multiple of 8 to 256 and
            of 16 beyond, and max_num_seqs (the sizes that vLLM captures).
        wide_sizes: Requests of the batches of max_query_len tokens each, the same up to `MAX_DRAFT_ROWS` tokens; empty
            without drafts.
        is_captured: Whether `run` replays.
    """

    def __init__(
        self,
        step: DecodeStep,
        input_like: Tensor,
        cache: Cache,
        steps: StepBuilder,
        mesh: DCPMesh,
        max_num_seqs: int,
        max_model_len: int,
        max_query_len: int = 1,
    ) -> None:
        limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "max_query_len": max_query_len}
        check_fields(dict.fromkeys(limits, whole(1)), limits)
        self._step, self._cache, self._mesh, self._device = step, cache, mesh, input_like.device
        self._addresses = _addresses(cache)
        self.batch_sizes, self.wide_sizes = batch_sizes(max_num_seqs), tuple[int, ...]()
        limit = min(max_num_seqs, MAX_DRAFT_ROWS // max_query_len)
        if max_query_len > 1 and limit:
            self.wide_sizes = batch_sizes(limit)
        self._max_query_len = max_query_len
        self._batches = [GraphSize(size) for size in self.batch_sizes]
        self._batches += [GraphSize(size, max_query_len) for size in self.wide_sizes]
        self._batches.sort(key=lambda batch: batch.num_rows)
        self._padded = GraphInputs(input_like, self._batches, max_model_len, cache.sizes, steps)
        self._graphs = GraphSet(self._compute, "decode graph", mesh, self._device)
        self._latest: tuple[GraphSize, Tensor | None] = self._batches[0], None
        self._out: Tensor | None = None  # [rows of the largest batch, ...]

    @property
    def num_full_sizes(self) -> int:
        """Return the number of batches, which take about as much memory each."""
        return len(self._batches)

    @property
    def is_captured(self) -> bool:
        """True once `capture` has succeeded: `run` replays."""
        return self._graphs.is_captured

    def takes(self, num_reqs: int, query_len: int = 1) -> bool:
        """Return whether it has a batch for num_reqs requests of at most query_len tokens each."""
        sizes = self.batch_sizes if query_len == 1 else self.wide_sizes
        return bool(sizes) and 1 <= num_reqs <= sizes[-1] and query_len <= self._max_query_len

    def batch(self, num_reqs: int, query_len: int = 1) -> GraphSize:
        """Return the batch to which num_reqs requests of at most query_len tokens each are padded.

        Raises:
            ValueError: All batches are smaller, or num_reqs is 0.
        """
        if not self.takes(num_reqs, query_len):
            wide = f", or {self._max_query_len} tokens each of 1 to {self.wide_sizes[-1]}" if self.wide_sizes else ""
            raise ValueError(
                f"the step has {num_reqs} requests of at most {query_len} tokens each; the decode graph is for one "
                f"token each of 1 to {self.batch_sizes[-1]} requests (max_num_seqs){wide}"
            )
        if query_len == 1:
            return GraphSize(self.batch_sizes[bisect_left(self.batch_sizes, num_reqs)])
        return GraphSize(self.wide_sizes[bisect_left(self.wide_sizes, num_reqs)], self._max_query_len)

    @property
    def latest_rows(self) -> Tensor | None:
        """Return the rows of the latest step's tokens, [n] int64 on the device; None for the first n rows."""
        return self._latest[1]

    @property
    def latest_metadata(self) -> StepMetadata:
        """Return the latest step's metadata, in static memory."""
        return self._padded.rows(self._latest[0])[1]

    def run(self, inputs: Tensor, requests: StepRequests, cache: Cache, num_rejected: Tensor | None = None) -> Tensor:
        """Run a decode step: a replay, or before `capture` the padded step itself. Collective over the TP group.

        Args:
            inputs: [n, ...], inputs of all new tokens, request after request.
            requests: Requests of n new tokens; their numbers go to the GPU in one transfer.
            cache: Cache that the graph was made for.
            num_rejected: [num_reqs] int64 on the device, positions to move each request back by; None for 0.
        Returns:
            [n, ...], which may be static memory: valid until the next run.
        Raises:
            ValueError: The step has more or longer requests, or more tokens per request, than the graph was made for,
                another cache, blocks outside it, inconsistent lengths, or other shapes, dtypes or devices.
        """
        batch, rows = self._fill(inputs, requests, cache, num_rejected)
        out = self._replay(batch)
        return out[: len(inputs)] if rows is None else out.index_select(0, rows)

    def follow(self, inputs: Tensor, leader: "DecodeGraph") -> Tensor | None:
        """Run over the latest step of another decode graph over the same cache. Collective over the TP group.

        Args:
            inputs: [rows, ...], a row for each of the padded step's.
        Returns:
            [rows, ...], as `run` does; None where it has no such batch.
        """
        batch, _ = leader._latest
        if batch not in self._batches:
            return None
        self._padded.take(inputs, leader._padded, batch)
        return self._replay(batch)

    def run_eagerly(self, inputs: Tensor, requests: StepRequests, cache: Cache) -> Tensor:
        """Run a decode step without its graphs: a replay equals it bit for bit."""
        batch, rows = self._fill(inputs, requests, cache)
        self._compute(batch)
        assert self._out is not None
        out = self._out[: batch.num_rows]
        return out[: len(inputs)] if rows is None else out.index_select(0, rows)

    def capture(self, num_sizes: int | None = None, track: Track = iter) -> None:
        """Capture batch sizes, the largest first: one memory pool serves them all. Collective over the TP group.

        Args:
            num_sizes: Number of sizes to capture, the largest ones; None for all.
            track: Function that yields the sizes and shows the progress (`GraphSet.capture`).
        Raises:
            ValueError: The device is not a GPU.
            CannotCapture: Some rank's step waits for the GPU, or has no memory left for a graph; raised on every rank.
            RuntimeError: The step fails, or interrupts a capture (`GraphSet.capture`).
        """
        if self._device.type != "cuda":
            raise ValueError(f"input_like is on {self._device}; only steps on a GPU can be captured")
        self._padded.clear()  # rows of padding leave the cache alone
        self._graphs.capture(self._batches[::-1][:num_sizes], track)

    def release(self) -> None:
        """Free the graphs (`GraphSet.release`); `run` computes eagerly from then on."""
        self._graphs.release()

    def _replay(self, batch: GraphSize) -> Tensor:
        self._graphs.run(batch)
        assert self._out is not None
        return self._out[: batch.num_rows]

    def _fill(
        self, inputs: Tensor, requests: StepRequests, cache: Cache, num_rejected: Tensor | None = None
    ) -> tuple[GraphSize, Tensor | None]:
        """Fill the static memory; return the batch, and the tokens' rows in it where these are not the first."""
        if _addresses(cache) != self._addresses:
            raise ValueError(
                "cache is another one than the decode graph was made for; give that one, or make a graph for this one"
            )
        batch = self.batch(len(requests.query_lens), max(requests.query_lens, default=0))
        self._latest = batch, self._padded.fill(inputs, requests, batch, num_rejected)
        return self._latest

    @torch.inference_mode()
    def _compute(self, batch: GraphSize, _: Cut | None = None) -> None:
        self._padded.lay_out(batch)
        out, num_rows = self._step(*self._padded.rows(batch), self._cache), batch.num_rows
        if self._out is None:
            max_rows = self._batches[-1].num_rows
            with torch.inference_mode(False):  # the caller may use it outside of inference mode
                self._out = torch.empty(max_rows, *out.shape[1:], dtype=out.dtype, device=out.device)
        if tuple(out.shape) != (num_rows, *self._out.shape[1:]):
            raise ValueError(
                f"step returned shape {tuple(out.shape)}; expected {(num_rows, *self._out.shape[1:])}, a row a token"
            )
        self._out[:num_rows].copy_(out)


def _addresses(cache: Cache) -> list[int]:
    return [tensor.data_ptr() for tensor in cache.tensors]


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes to capture, ascending, the last one max_num_seqs. Source: vLLM's cudagraph_capture_sizes."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
