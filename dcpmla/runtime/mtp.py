"""Drafts by the model's own MTP module, which runs under the model's TP and DCP, over a layer of its cache."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.step import StepMetadata, StepRequests
from dcpmla.cache.plan import Cache
from dcpmla.parallel.collectives import named
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.drafts import Drafter, Drafts
from dcpmla.runtime.graph import DecodeGraph
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload


class MtpModel(Protocol):
    """A model with an MTP module; `dcpmla.integrations.sharded_model.ShardedModel` is one.

    Attributes:
        hidden_rows: [N, width] hidden states of the last step, row for row of its tokens, which it keeps.
    """

    device: torch.device
    hidden_rows: Tensor

    def join(self, token_ids: Tensor, hidden_states: Tensor) -> Tensor: ...

    def predict(self, rows: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor: ...


class MtpDrafter(Drafter):
    """Drafts of the MTP module: the first over all tokens of the step before, rejected drafts among them, each other
    over the draft before it.

    Where requests have not drafted for a while, or their blocks came from earlier ones, its cache has gaps: that costs
    drafts, and no token is wrong for it.

    Args:
        graph: of `model.predict`, for as many tokens of a request as a step with drafts has.
        chain: of `ShardedModel.draft`, for as many as are drafted.
    """

    reads_tokens = False

    def __init__(
        self,
        num_speculative_tokens: int,
        model: MtpModel,
        cache: Cache,
        mesh: DCPMesh,
        graph: DecodeGraph,
        chain: DecodeGraph,
    ) -> None:
        super().__init__(num_speculative_tokens)
        self._model, self._cache, self._mesh = model, cache, mesh
        self._graph, self._chain = graph, chain

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        """Guess with the module. Collective over the TP group, whose first rank's drafts all take."""
        rows = {} if previous is None else previous.rows
        nums = [num if request in rows else 0 for request, num in wanted]
        drafting = [(request, num) for (request, _), num in zip(wanted, nums, strict=True) if num]
        is_served = bool(drafting) and self._chain.takes(len(drafting), max(nums))
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
        token_ids = self._chain.run(first, _requests_of(drafting), self._cache, num_rejected)
        if self._mesh.tp_size > 1:
            with named("agreeing on drafts", self._mesh.tp_group):
                dist.broadcast(token_ids, group=self._mesh.tp_group, group_src=0)
        return Drafts(nums, token_ids)

    def close(self) -> None:
        """Free the graphs."""
        self._graph.release()
        self._chain.release()

    def _predict(self, previous: InFlightStep, at: Tensor) -> Tensor:
        """Run the module over a step, laid out as it was: return its hidden states, a row for each of the model's.

        Args:
            at: [n] rows of the tokens that new ones follow.
        """
        by = previous.computed.by
        metadata = by.latest_metadata if isinstance(by, DecodeGraph) else by
        token_ids = at.new_zeros(metadata.num_tokens)
        if previous.is_prefill:
            (following,) = upload([np.array(_following(previous), dtype=np.int64)], self._model.device)
            rows = previous.computed.rows
            where = slice(len(following)) if rows is None else rows  # in a decode graph's padded step
            token_ids[where] = following
        token_ids = token_ids.index_copy(0, at, previous.message.tokens)
        inputs = self._model.join(token_ids, self._model.hidden_rows[: metadata.num_tokens])
        hidden_states = self._graph.follow(inputs, by) if isinstance(by, DecodeGraph) else None
        return self._model.predict(inputs, metadata, self._cache) if hidden_states is None else hidden_states


def _requests_of(drafting: Sequence[tuple[Request, int]]) -> StepRequests:
    """Return the requests of the drafts' steps: the first token of each is its last one computed, whose guess is there,
    the others are drafts, all but the last.
    """
    return StepRequests(
        [num for _, num in drafting],
        [request.num_tokens + request.num_tried - 2 + num for request, num in drafting],
        [request.block_ids for request, _ in drafting],
        [request.state for request, _ in drafting],
    )


def _following(previous: InFlightStep) -> list[int]:
    """Return the tokens that follow a step's, 0 for those that are not known."""
    token_ids: list[int] = []
    for (request, num_tokens, _), position in zip(previous.pieces, previous.positions, strict=True):
        known = request.tokens(position + 1, position + num_tokens + 1)
        token_ids += known + [0] * (num_tokens - len(known))
    return token_ids
