"""Steps as CUDA graphs, in several sizes, replayed after a step's numbers have been copied into static memory."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from dcpmla.attention.step.metadata import Defer, StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import Cache
from dcpmla.fields import check_fields, whole
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS
from dcpmla.runtime.capture import GraphSet, Track
from dcpmla.runtime.graph_inputs import GraphInputs
from dcpmla.runtime.graph_sizes import (
    DECODE_TOKENS,
    GraphLimits,
    GraphSize,
    decode_sizes,
    find_size,
    max_prompts,
    most_absorbed,
    token_sizes,
)
from dcpmla.runtime.model import Model

Step = Callable[[Tensor, StepMetadata, Cache], Tensor]


class StepGraph:
    """Steps as CUDA graphs in one memory pool: each is padded to the next size and replayed.

    A step of decodes is one graph (`decodes`). So is a step with pieces of prompts (`prompts`) if all attend with
    absorbed queries, because kernels read all lengths on the GPU, or with dcp.deterministic if the others have no
    context. In other steps MHA is left out: graphs compute the rest of each layer for all tokens, the attention of
    dense MLA's decodes among it, and between two graphs MHA is launched with the step's own numbers.

    A replay is bitwise equal to `run` before `capture`: the same step on the same padded rows. (Matrix products pick
    their kernels by the number of rows, so the step on the bare rows may differ in the last bits.) Rows of padding
    write nothing to the cache and attend to nothing. Runs share memory, so they must follow each other on one stream.

    Args:
        step: step(inputs [N, ...], metadata, cache) -> [N, ...], a row a token. It may not look at results from the
            host, and its collectives must be the same on all ranks.
        input_like: [...], shape, dtype and device of one token's input: its id, or a row of hidden states.
        cache: Cache that the step reads and writes; its tensors must keep their addresses.
        steps: Builder of steps over the cache (`Stack.step_builder`).
        mesh: Groups of this rank.
        sizes: Sizes of steps, at least one.
        limits: Limits of steps.
        prepare: Function that adds what layers share to a step whose MHA is launched between graphs.

    Attributes:
        sizes: Sizes of steps, ascending.
        latest_rows: Rows of the latest step's tokens, [n] int64 on the device; None for the first n rows.
    """

    def __init__(
        self,
        step: Step,
        input_like: Tensor,
        cache: Cache,
        steps: StepBuilder,
        mesh: DCPMesh,
        sizes: Iterable[GraphSize],
        limits: GraphLimits,
        prepare: Callable[[StepMetadata], StepMetadata] = lambda step: step,
    ) -> None:
        fields = {name: getattr(limits, name) for name in ("max_num_seqs", "max_model_len")}
        check_fields(dict.fromkeys(fields, whole(1)), fields)
        self._step, self._cache, self._steps, self._limits, self._prepare = step, cache, steps, limits, prepare
        self._device = input_like.device
        self.sizes = sorted(sizes, key=lambda size: size.num_tokens)
        self._inputs = GraphInputs(input_like, self.sizes, limits, cache.sizes, steps)
        self._graphs = GraphSet(self._compute, "graph", mesh, self._device)
        widths = dict.fromkeys(size.query_len for size in self.sizes)
        of_width = {width: [size for size in self.sizes if size.query_len == width] for width in widths}
        others = of_width.pop(0, [])
        self._decode_sizes, self._whole = of_width, [size for size in others if size.is_whole]
        self._parted = [size for size in others if not size.is_whole]
        self.latest_rows: Tensor | None = None
        self._latest: tuple[GraphSize, StepMetadata | None] = self.sizes[0], None
        self._out: Tensor | None = None  # [rows of the largest size, ...]

    @classmethod
    def decodes(
        cls,
        step: Step,
        input_like: Tensor,
        cache: Cache,
        steps: StepBuilder,
        mesh: DCPMesh,
        max_num_seqs: int,
        max_model_len: int,
        max_query_len: int = 1,
        is_block: bool = False,
    ) -> Self:
        """Return the graphs of decode steps, with one token per request, or max_query_len if tokens are drafted.

        Args:
            step, input_like, cache, steps, mesh: Arguments of `StepGraph`; the step may be a model, or a stack of
                `MLAAttention` layers.
            max_num_seqs: Requests of the largest size.
            max_model_len: Longest sequence, which bounds the block table.
            max_query_len: Tokens of a request with all its drafts; 1 without drafts.
            is_block: Whether requests always have max_query_len tokens.
        Raises:
            ValueError: max_num_seqs, max_model_len or max_query_len is below 1.
        """
        check_fields({"max_query_len": whole(1)}, {"max_query_len": max_query_len})
        sizes = [] if is_block and max_query_len > 1 else decode_sizes(max_num_seqs)
        if max_query_len > 1:
            sizes += decode_sizes(min(max_num_seqs, MAX_DRAFT_ROWS // max_query_len), max_query_len)
        return cls(step, input_like, cache, steps, mesh, sizes, GraphLimits(max_num_seqs, max_model_len))

    @classmethod
    def prompts(
        cls,
        model: Model,
        cache: Cache,
        steps: StepBuilder,
        mesh: DCPMesh,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        tokens_per_request: int,
    ) -> Self:
        """Return the graphs of steps with pieces of prompts, up to the last hidden states.

        Args:
            model: Model of the steps.
            cache, steps, mesh: Arguments of `StepGraph`.
            max_num_tokens, max_num_seqs: Limits of a step's tokens and requests.
            max_model_len: Longest sequence, which bounds the block table.
            tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
        Raises:
            ValueError: A limit is below 1.
        """
        check_fields({"max_num_tokens": whole(1)}, {"max_num_tokens": max_num_tokens})
        dcp, traits = steps.layout.dcp, steps.layout.traits
        width = tokens_per_request if traits.absorbs_pieces else 0
        tokens = token_sizes(max_num_tokens, width, dcp)
        num_absorbed = min(max(tokens[True], default=0), most_absorbed(width, dcp))
        limits = GraphLimits(
            max_num_seqs,
            max_model_len,
            segment_len=tokens_per_request,
            num_absorbed_tokens=num_absorbed,
            num_static_decodes=min(DECODE_TOKENS, num_absorbed) if traits.has_static_decodes else 0,
            # A GPU attends in float32 by torch code, which reads the requests' rows on the host.
            has_prompts=dcp.deterministic and (model.device.type == "cpu" or model.dtype.itemsize == 2),
        )
        sizes = [GraphSize(num, is_whole) for is_whole, nums in tokens.items() for num in nums]
        token = torch.zeros((), dtype=torch.int64, device=model.device)
        return cls(model.hidden, token, cache, steps, mesh, sizes, limits, model.prepare)

    @property
    def is_captured(self) -> bool:
        """Return whether `capture` has succeeded: `run` replays."""
        return self._graphs.is_captured

    @property
    def latest_metadata(self) -> StepMetadata:
        """Return the latest step's metadata, before it is prepared; valid until the next run."""
        size, step = self._latest
        return self._inputs.step(size)[1] if step is None else step

    @property
    def num_full_sizes(self) -> int:
        """Return how many sizes take about as much memory as the largest one: those with a graph between all parts, or
        all if there are none.
        """
        return len(self._parted or self.sizes)

    @property
    def max_whole_tokens(self) -> int:
        """Return the tokens of the largest step with pieces of prompts that is one graph; 0 if there is none."""
        return self._whole[-1].num_tokens if self._whole else 0

    def decode_size(self, num_reqs: int, query_len: int = 1) -> GraphSize | None:
        """Return the size to which decodes of at most query_len tokens each are padded; None if there is none."""
        width = next((width for width in self._decode_sizes if 1 < width >= query_len), 0) if query_len > 1 else 1
        return find_size(self._decode_sizes.get(width, ()), num_reqs * width) if num_reqs and width else None

    def prompt_size(self, num_tokens: Sequence[int], contexts: Sequence[int], num_decodes: int) -> GraphSize | None:
        """Return the size to which a step with prompts is padded, a whole one if it can hold the step; None for none.

        Args:
            num_tokens: Number of new tokens of each request.
            contexts: Number of cached tokens of each request.
            num_decodes: Number of requests that attend with absorbed queries, the first ones.
        """
        if len(num_tokens) > self._limits.max_num_seqs:
            return None
        total, others = sum(num_tokens), contexts[num_decodes:]
        whole = find_size(self._whole, total)
        if whole is not None and sum(num_tokens[:num_decodes]) <= self._limits.room(whole):
            is_allowed = self._limits.has_prompts and len(others) <= max_prompts(whole.num_tokens) and not any(others)
            if not others or is_allowed:
                return whole
        return find_size(self._parted, total)

    @torch.inference_mode()
    def run(
        self,
        inputs: Tensor,
        requests: StepRequests,
        size: GraphSize | None = None,
        num_rejected: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Run a step: a replay, or before `capture` the padded step itself. Collective over the TP group.

        Args:
            inputs: [n, ...], inputs of all new tokens, request after request.
            requests: Requests of n new tokens; their numbers go to the GPU in one transfer.
            size: Size that the step is padded to, one that holds it; None finds one for decodes.
            num_rejected: [num_reqs] int64 on the device, positions to move each request of a decode step back by; None
                for 0.
            workspace: Memory of decodes that are launched between graphs (`StepBuilder.build`).
        Returns:
            [n, ...], which may be static memory: valid until the next run.
        Raises:
            ValueError: The step has more or longer requests, or more tokens per request, than the graph was made for,
                blocks outside the cache, inconsistent lengths, or other shapes, dtypes or devices.
        """
        if size is None:
            size, requests = self._decodes(requests)
        if size.is_whole:
            self._fill(size, inputs, requests, num_rejected)
            out = self._replay(size)
            return out[: len(inputs)] if self.latest_rows is None else out.index_select(0, self.latest_rows)
        num_decode_tokens, room = sum(requests.query_lens[: requests.num_decodes]), self._limits.room(size)
        has_room = num_decode_tokens <= room or not room
        self._fill(size, inputs, requests if has_room else requests._replace(num_decodes=0), None)
        self._inputs.lay_out(size)
        if has_room:
            step = self._inputs.replay(size, requests, workspace)
        else:
            step = self._steps.build(requests, requests.segment_len, requests.num_decodes, workspace)
        self._latest = size, step
        self._graphs.run(size, self._prepare(replace(step, decode=None) if room and has_room else step))
        assert self._out is not None
        return self._out[: len(inputs)]

    def follow(self, inputs: Tensor, leader: "StepGraph") -> Tensor | None:
        """Run over the latest step of other graphs over the same cache. Collective over the TP group.

        Args:
            inputs: [rows, ...], a row for each of the padded step's.
        Returns:
            [rows, ...], as `run` does; None where it has no such size.
        """
        size, _ = leader._latest
        if size not in self.sizes:
            return None
        self._inputs.take(inputs, leader._inputs, size)
        return self._replay(size)

    def capture(self, num_sizes: int | None = None, track: Track = iter) -> None:
        """Capture sizes, the largest first: one memory pool serves them all. Collective over the TP group.

        Args:
            num_sizes: Number of sizes to capture, the largest ones; None for all.
            track: Function that yields the sizes and shows the progress (`GraphSet.capture`).
        Raises:
            ValueError: The device is not a GPU.
            CannotCapture: Some rank's step waits for the GPU, or has no memory left for a graph; raised on every rank.
            RuntimeError: The step fails, or breaks a capture off (`GraphSet.capture`).
        """
        if self._device.type != "cuda":
            raise ValueError(f"input_like is on {self._device}; only steps on a GPU can be captured")
        self._graphs.capture(self.sizes[::-1][:num_sizes], lambda sizes: self._cleared(track(sizes)))

    def rehearse(self) -> None:
        """Compute each size over padding, without graphs. Collective over the TP group."""
        for size in self._cleared(self.sizes):
            self._graphs.compute(size)

    def release(self) -> None:
        """Free the graphs (`GraphSet.release`); `run` computes eagerly from then on."""
        self._graphs.release()

    def _decodes(self, requests: StepRequests) -> tuple[GraphSize, StepRequests]:
        """Return the size of a decode step, and its requests as decodes; raise ValueError if there is no such size."""
        num_reqs, longest = len(requests.query_lens), max(requests.query_lens, default=0)
        size = self.decode_size(num_reqs, longest)
        if size is None:
            largest = {width: sizes[-1].num_tokens // width for width, sizes in self._decode_sizes.items()}
            limits = " or ".join(f"1 to {num} requests of {width}" for width, num in largest.items())
            raise ValueError(
                f"the step has {num_reqs} requests of at most {longest} tokens; the graph of decodes is for {limits} "
                f"(max_num_seqs)"
            )
        return size, requests._replace(num_decodes=num_reqs)

    def _fill(self, size: GraphSize, inputs: Tensor, requests: StepRequests, num_rejected: Tensor | None) -> None:
        self.latest_rows = self._inputs.fill(size, inputs, requests, num_rejected)
        self._latest = size, None

    def _replay(self, size: GraphSize) -> Tensor:
        self._graphs.run(size)
        assert self._out is not None
        return self._out[: size.num_tokens]

    def _cleared(self, sizes: Iterable[Hashable]) -> Iterator[Hashable]:
        """Yield sizes, each when its inputs are padding, which leaves the cache alone."""
        for size in sizes:
            assert isinstance(size, GraphSize)
            self._inputs.clear(size)
            yield size

    @torch.inference_mode()
    def _compute(self, size: GraphSize, defer: Defer | None = None) -> None:
        if size.is_whole:
            self._inputs.lay_out(size)
        out = self._step(*self._inputs.step(size, None if size.is_whole else defer), self._cache)
        if self._out is None:
            num_rows = self.sizes[-1].num_tokens
            with torch.inference_mode(False):  # the caller may use it outside of inference mode
                self._out = torch.empty(num_rows, *out.shape[1:], dtype=out.dtype, device=out.device)
        if tuple(out.shape) != (size.num_tokens, *self._out.shape[1:]):
            raise ValueError(
                f"step returned shape {tuple(out.shape)}; expected {(size.num_tokens, *self._out.shape[1:])}, a row a "
                f"token"
            )
        self._out[: size.num_tokens].copy_(out)
