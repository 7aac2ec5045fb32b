"""A trained module that drafts over a model's hidden states, as the engine runs it (`DraftModel`)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.graph import Step, StepGraph
from dcpmla.runtime.modules import ModuleDrafter

Prepare = Callable[[StepMetadata], StepMetadata]  # function that returns a step with what some layers need


class GraphStep(NamedTuple):
    """A step that a drafter runs by graphs of its own.

    Attributes:
        step, input_like: Arguments of `StepGraph`.
        query_len: Tokens of a request.
        is_block: Whether requests always have query_len tokens, which may pass the longest sequence.
    """

    step: Step
    input_like: Tensor
    query_len: int
    is_block: bool = False


class TrainedDrafts(Protocol):
    """A trained module that drafts over a loaded model.

    Attributes:
        module: The module, an nn.Module.
    """

    module: Any

    def keep(self, num_tokens: int) -> None:
        """Keep the hidden states that the module needs of the model's steps, which have at most num_tokens tokens."""

    def profile(self, num_tokens: int) -> None:
        """Run dummy tokens without a cache (`ShardedModel.profile`). Collective over the TP group."""

    def graph_steps(self, num_drafts: int) -> list[GraphStep]:
        """Return the steps whose graphs a drafter of num_drafts runs."""

    def new_drafter(self, num_drafts: int, cache: Cache, mesh: DCPMesh, graphs: Sequence[StepGraph]) -> Drafter:
        """Return a drafter over a cache and the graphs of `graph_steps`."""


class DraftModule(Protocol):
    """A layer that drafts, an nn.Module. Called with rows [T, width], a cache and a step, it returns hidden states.

    Attributes:
        embedding: Embedding of tokens [vocab, hidden].
        width: Columns of the hidden states that it needs of the model.
    """

    embedding: Tensor
    width: int

    def project(self, hidden_states: Tensor) -> Tensor:
        """Return the module's own kind of hidden states for the model's [T, width]."""

    def collapse(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [n, ...] as the head takes them."""

    def __call__(self, rows: Tensor, cache: Cache | None, step: StepMetadata | None) -> Tensor: ...


class DraftHead(Protocol):
    """A head that names the best token of hidden states."""

    def best(self, x: Tensor) -> Tensor: ...


class DraftModel:
    """A trained module that drafts, and the hidden states that the model's last step has left for it.

    Args:
        module: The module, whose attention is the last layer of the model's cache.
        sources: Modules of the model. The hidden states that they return, or the second of two tensors, are kept side
            by side.
        head: Head of the drafts.
        prepare: Function that returns a step with what the module's layer needs.
    Attributes:
        module: The module.
        hidden_rows: [N, width] hidden states of the model's last step; empty before `keep`.
    """

    def __init__(
        self,
        module: DraftModule,
        sources: Sequence[nn.Module],
        head: DraftHead,
        prepare: Prepare,
    ) -> None:
        self.module: Any = module
        self._sources, self._head, self._prepare = sources, head, prepare
        self.device, self.dtype = module.embedding.device, module.embedding.dtype
        self.hidden_rows = torch.empty(0, device=self.device)

    def keep(self, num_tokens: int) -> None:
        """Keep hidden states of steps of at most num_tokens tokens."""
        self.hidden_rows = torch.zeros(num_tokens, self.module.width, dtype=self.dtype, device=self.device)
        for source, rows in zip(self._sources, self.hidden_rows.chunk(len(self._sources), 1), strict=True):
            source.register_forward_hook(partial(_keep, rows))

    @torch.inference_mode()
    def rows(self, token_ids: Tensor) -> Tensor:
        """Return the inputs of `predict` for the model's last step.

        Args:
            token_ids: [T] int64, the token after each of the step's first T.
        """
        return self._join(token_ids, self.module.project(self.hidden_rows[: len(token_ids)]))

    @torch.inference_mode()
    def predict(self, rows: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor:
        """Run the module over its inputs [T, width]: return hidden states [T, ...]. Collective over the TP group."""
        hidden_states: Tensor = self.module(rows, cache, self._prepare(metadata))
        return hidden_states

    @torch.inference_mode()
    def draft(self, hidden_states: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor:
        """Draft tokens one by one, for a `StepGraph`: each request's first from a hidden state of the module, each
        other from the module's output for the previous draft. Collective over the TP group.

        Args:
            hidden_states: [n k, ...], k rows per request; the first is the module's at the last token that it has
                computed, the others are ignored.
            metadata: Step of n requests with k tokens each, that last one and k - 1 drafts.
        Returns:
            [n k] int64, request after request.
        """
        assert metadata.decode is not None
        num_drafts = metadata.decode.max_query_len
        hidden_states = hidden_states[::num_drafts].clone(memory_format=torch.contiguous_format)
        drafts = [self._best(hidden_states)]
        for index in range(1, num_drafts):
            rows = self._join(drafts[-1], hidden_states)
            hidden_states = self.predict(rows, metadata.nth_token(index), cache)
            drafts.append(self._best(hidden_states))
        return torch.stack(drafts, 1).flatten()

    @torch.inference_mode()
    def profile(self, num_tokens: int) -> None:
        """Run dummy tokens without a cache (`ShardedModel.profile`)."""
        self.module(self.rows(torch.zeros(num_tokens, dtype=torch.int64, device=self.device)), None, None)

    def graph_steps(self, num_drafts: int) -> list[GraphStep]:
        """Return the steps over the model's tokens, and over the module's own drafts."""
        row = self.rows(torch.zeros(1, dtype=torch.int64, device=self.device))[0]
        hidden_state = torch.zeros_like(self.module.project(self.hidden_rows[:1])[0])
        return [
            GraphStep(self.predict, torch.zeros_like(row), 1 + num_drafts),
            GraphStep(self.draft, hidden_state, num_drafts),
        ]

    def new_drafter(self, num_drafts: int, cache: Cache, mesh: DCPMesh, graphs: Sequence[StepGraph]) -> Drafter:
        """Return a drafter over a cache and the graphs of `graph_steps`."""
        return ModuleDrafter(num_drafts, self, cache, mesh, *graphs)

    def _join(self, token_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Return rows of embeddings of tokens [T], then hidden states [T, ...] of the positions before them."""
        return torch.cat([F.embedding(token_ids, self.module.embedding), hidden_states], -1)

    def _best(self, hidden_states: Tensor) -> Tensor:
        return self._head.best(self.module.collapse(hidden_states))


def _keep(rows: Tensor, source: nn.Module, inputs: Any, output: Any) -> None:
    """Copy what a module has returned, as its forward hook."""
    hidden_states = output[1] if isinstance(output, tuple) else output
    rows[: len(hidden_states)].copy_(hidden_states)
