"""Steps with pieces of prompts as CUDA graphs, padded to numbers of tokens (`MixedGraph`)."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention.build import StepBuilder
from dcpmla.attention.step import Cut, StepMetadata, StepRequests
from dcpmla.cache.plan import Cache
from dcpmla.fields import check_fields, whole
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.capture import GraphSet, Track
from dcpmla.runtime.mixed_inputs import MixedInputs
from dcpmla.runtime.mixed_sizes import MixedLimits, MixedSize, find_size, most_absorbed, token_sizes


class MixedModel(Protocol):
    """A model whose steps are captured; `dcpmla.integrations.sharded_model.ShardedModel` is one."""

    device: torch.device
    dtype: torch.dtype

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor: ...

    def prepare(self, metadata: StepMetadata) -> StepMetadata: ...


class MixedGraph:
    """Steps with pieces of prompts, up to the last hidden states, as CUDA graphs in one memory pool.

    A step whose pieces all attend with absorbed queries is one graph: its kernels read all lengths on the GPU. So is,
    with dcp.deterministic, a step whose other pieces have no context. In other steps MHA is left out: graphs compute
    the rest of each layer for all tokens, the attention of dense MLA's decodes among it, and between two graphs MHA is
    launched with the step's own numbers.

    Args:
        model: Model of the steps.
        cache: Cache that steps read and write; its tensors must keep their addresses.
        steps: Builder of steps over the cache.
        mesh: Groups of this rank.
        max_num_tokens: Limit of a step's tokens.
        max_num_seqs: Limit of a step's requests.
        max_model_len: Longest sequence, which bounds the block table.
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
    Raises:
        ValueError: A limit is below 1.

    Attributes:
        sizes: Sizes of graphs, ascending.
        max_whole_tokens: Tokens of the largest step that is one graph; 0 if there is none.
    """

    def __init__(
        self,
        model: MixedModel,
        cache: Cache,
        steps: StepBuilder,
        mesh: DCPMesh,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        tokens_per_request: int,
    ) -> None:
        limits = {"max_num_tokens": max_num_tokens, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        check_fields(dict.fromkeys(limits, whole(1)), limits)
        self._model, self._cache, self._max_num_seqs = model, cache, max_num_seqs
        width = tokens_per_request if steps.absorbs_pieces else 0
        self._tokens = token_sizes(max_num_tokens, width, steps.dcp)
        self.sizes = sorted(MixedSize(size, kind) for kind, sizes in self._tokens.items() for size in sizes)
        self.max_whole_tokens = max(self._tokens[True], default=0)
        num_blocks = -(-max_model_len // cache.sizes.block_tokens)
        num_tokens = max(size.num_tokens for size in self.sizes)
        num_absorbed = min(self.max_whole_tokens, most_absorbed(width, steps.dcp))
        sizes = num_tokens, num_absorbed, max_num_seqs, num_blocks, max_model_len, tokens_per_request
        # A GPU attends in float32 by torch code, which reads the requests' rows on the host.
        has_prompts = steps.dcp.deterministic and (model.device.type == "cpu" or model.dtype.itemsize == 2)
        self._inputs = MixedInputs(MixedLimits(*sizes, has_prompts), steps, cache.sizes.num_blocks, model.device)
        self._graphs = GraphSet(self._compute, "graph", mesh, model.device)
        self._out: Tensor | None = None

    @property
    def is_captured(self) -> bool:
        """Return whether `run` replays."""
        return self._graphs.is_captured

    @property
    def num_full_sizes(self) -> int:
        """Return how many sizes take about as much memory as the largest one: sizes with a graph between all cuts."""
        return len(self._tokens[False])

    def size(self, num_tokens: Sequence[int], contexts: Sequence[int], num_absorbed: int) -> MixedSize | None:
        """Return the size that a step is padded to, a whole one if one can hold the step; None if it is too large.

        Args:
            num_tokens: Number of new tokens of each request.
            contexts: Number of cached tokens of each request.
            num_absorbed: Number of requests that attend with absorbed queries, the first ones.
        """
        if len(num_tokens) > self._max_num_seqs:
            return None
        whole = find_size(self._tokens, sum(num_tokens), True)
        if whole and self._inputs.takes(whole, sum(num_tokens[:num_absorbed]), contexts[num_absorbed:]):
            return whole
        return find_size(self._tokens, sum(num_tokens), False)

    @torch.inference_mode()
    def run_whole(
        self, size: MixedSize, token_ids: Tensor, requests: StepRequests, num_absorbed: int
    ) -> tuple[Tensor, StepMetadata]:
        """Run a step of one graph. Collective over the TP group.

        Args:
            token_ids: Tokens of the step [n], int64, on the device or the CPU.
            requests: Requests of the step.
            num_absorbed: Number of requests that attend with absorbed queries, the first ones.
        Returns:
            The hidden states [n, width] and the padded step's metadata, in static memory: valid until the next run.
        Raises:
            ValueError: The requests are invalid, have more tokens than the size, or blocks that the cache lacks.
        """
        self._inputs.fill_whole(size, token_ids, requests, num_absorbed)
        self._graphs.run(size)
        assert self._out is not None
        return self._out[: len(token_ids)], self._inputs.step(size)

    @torch.inference_mode()
    def run(
        self, size: MixedSize, token_ids: Tensor, step: StepMetadata, requests: StepRequests, num_absorbed: int
    ) -> Tensor:
        """Run a step with MHA, which is launched between graphs. Collective over the TP group.

        Args:
            token_ids: Tokens of the step [n], int64 on the device.
            step: Metadata of the step, without what its layers share.
            requests: Requests of the step.
            num_absorbed: Number of requests that attend with absorbed queries, the first ones.
        Returns:
            The hidden states [n, width] in static memory, valid until the next run.
        Raises:
            ValueError: The step has blocks that the cache lacks.
        """
        if self._inputs.fill(size, token_ids, step, requests, num_absorbed):
            step = replace(step, decode=None)
        self._graphs.run(size, self._model.prepare(step))
        assert self._out is not None
        return self._out[: step.num_tokens]

    def capture(self, num_sizes: int | None = None, track: Track = iter) -> None:
        """Capture the graphs, the largest first. Collective over the TP group.

        Args:
            num_sizes: Number of sizes to capture, the largest ones; None for all.
            track: Function that yields the sizes and shows the progress (`GraphSet.capture`).
        Raises:
            CannotCapture: A step cannot be captured on some rank.
            RuntimeError: A step fails, or breaks a capture off (`GraphSet.capture`).
        """
        self._graphs.capture(self.sizes[::-1][:num_sizes], lambda sizes: self._cleared(track(sizes)))

    def _cleared(self, sizes: Iterable[Hashable]) -> Iterator[Hashable]:
        """Yield sizes, each when its inputs are padding."""
        for size in sizes:
            assert isinstance(size, MixedSize)
            self._inputs.clear(size)
            yield size

    def release(self) -> None:
        """Free the graphs (`GraphSet.release`)."""
        self._graphs.release()

    @torch.inference_mode()
    def _compute(self, size: MixedSize, cut: Cut | None) -> None:
        out = self._model.hidden(self._inputs.token_ids(size), self._inputs.step(size, cut), self._cache)
        if self._out is None:
            num_rows = self.sizes[-1].num_tokens
            with torch.inference_mode(False):  # the caller may use it outside of inference mode
                self._out = torch.empty(num_rows, *out.shape[1:], dtype=out.dtype, device=out.device)
        self._out[: size.num_tokens].copy_(out)
