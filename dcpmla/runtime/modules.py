"""Drafts by a trained module (MTP, EAGLE3) under the model's TP and DCP, over a layer of the model's cache."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import Cache
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.drafts import Drafter, Drafts, agree_on_drafts
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload


class DraftingModule(Protocol):
    """A module over hidden states that the model's last step has left; `dcpmla.integrations.draft_model.DraftModel`."""

    device: torch.device

    def rows(self, token_ids: Tensor) -> Tensor: ...

    def predict(self, rows: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor: ...


class ModuleDrafter(Drafter):
    """Drafts of a module: the first runs over all tokens of the previous step, rejected drafts included, and each
    later one over the draft before it.

    If requests have not drafted for a while, or their blocks came from earlier ones, the module's cache has gaps: fewer
    drafts are accepted, but no token is wrong.

    Args:
        graph: Graph of `module.predict`, for the tokens per request of a step with drafts.
        chain: Graph of `DraftModel.draft`, for the number of drafts per request.
    """

    reads_tokens = False

    def __init__(
        self,
        num_speculative_tokens: int,
        module: DraftingModule,
        cache: Cache,
        mesh: DCPMesh,
        graph: StepGraph,
        chain: StepGraph,
    ) -> None:
        super().__init__(num_speculative_tokens)
        self._module, self._cache, self._mesh = module, cache, mesh
        self._graph, self._chain = graph, chain

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        """Draft with the module. Collective over the TP group; all ranks use the first rank's drafts."""
        rows = {} if previous is None else previous.rows
        nums = [num if request in rows else 0 for request, num in wanted]
        drafting = [(request, num) for (request, _), num in zip(wanted, nums, strict=True) if num]
        is_served = bool(drafting) and self._chain.decode_size(len(drafting), max(nums)) is not None
        if previous is None or not (is_served or previous.is_prefill):
            return Drafts.of([[]] * len(nums))
        at = previous.sampled_rows
        hidden_states = self._predict(previous, at)
        if not is_served:
            return Drafts.of([[]] * len(nums))
        (places,) = upload([np.repeat([rows[each] for each, _ in drafting], [num for _, num in drafting])], at.device)
        newest = at if previous.verified is None else at.index_select(0, previous.verified.newest_at)
        first = hidden_states.index_select(0, newest.index_select(0, places))
        num_rejected = previous.num_rejected([each for each, _ in drafting]) if previous.is_under_way else None
        token_ids = self._chain.run(first, _requests_of(drafting), num_rejected=num_rejected)
        return Drafts(nums, agree_on_drafts(token_ids, self._mesh))

    def follow(self, by: StepGraph | StepMetadata) -> None:
        """Run the module over a step (`Drafter.follow`)."""
        self._run(by, torch.zeros(_metadata(by).num_tokens, dtype=torch.int64, device=self._module.device))

    def complete(self, step: InFlightStep) -> None:
        """Write the module's rows of a step (`Drafter.complete`)."""
        self._predict(step, step.sampled_rows)

    def close(self) -> None:
        """Free the graphs."""
        self._graph.release()
        self._chain.release()

    def _predict(self, previous: InFlightStep, at: Tensor) -> Tensor:
        """Run the module over the previous step in the same layout; return hidden states in the model's row order.

        Args:
            at: [n] rows of the tokens that new ones follow.
        """
        token_ids = at.new_zeros(_metadata(previous.by).num_tokens)
        if previous.is_prefill:
            (following,) = upload([np.array(_following(previous), dtype=np.int64)], self._module.device)
            rows = previous.token_rows
            targets = slice(len(following)) if rows is None else rows  # in a decode graph's padded step
            token_ids[targets] = following
        return self._run(previous.by, token_ids.index_copy(0, at, previous.message.tokens))

    def _run(self, by: StepGraph | StepMetadata, token_ids: Tensor) -> Tensor:
        """Run the module over tokens in the layout of a step; return hidden states in the model's row order."""
        inputs = self._module.rows(token_ids)
        hidden_states = self._graph.follow(inputs, by) if isinstance(by, StepGraph) else None
        return self._module.predict(inputs, _metadata(by), self._cache) if hidden_states is None else hidden_states


def _metadata(by: StepGraph | StepMetadata) -> StepMetadata:
    """Return the layout of a step that has run."""
    return by.latest_metadata if isinstance(by, StepGraph) else by


def _requests_of(drafting: Sequence[tuple[Request, int]]) -> StepRequests:
    """Return the requests of the draft steps: each starts at the last token computed, whose draft is known, and goes on
    with the drafts except the last one.
    """
    return StepRequests(
        [num for _, num in drafting],
        [request.num_tokens + request.num_tried - 2 + num for request, num in drafting],
        [request.block_ids for request, _ in drafting],
        [request.state for request, _ in drafting],
    )


def _following(previous: InFlightStep) -> list[int]:
    """Return the token after each token of a step, 0 for unknown ones."""
    token_ids: list[int] = []
    for (request, num_tokens, _), position in zip(previous.pieces, previous.positions, strict=True):
        known = request.tokens(position + 1, position + num_tokens + 1)
        token_ids += known + [0] * (num_tokens - len(known))
    return token_ids
