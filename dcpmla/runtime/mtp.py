"""Drafts by the model's own MTP module, which runs under the model's TP and DCP, over a layer of its cache."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.step import StepMetadata
from dcpmla.cache.compressed import AnyCache
from dcpmla.cache.latent import LatentCache
from dcpmla.config import DCPConfig
from dcpmla.parallel.collectives import named
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.drafts import Computed, Drafter, Drafts
from dcpmla.runtime.graph import DecodeGraph
from dcpmla.runtime.request import Request
from dcpmla.upload import upload


class MtpModel(Protocol):
    """A model with an MTP module; `dcpmla.integrations.sharded_model.ShardedModel` is one.

    Attributes:
        hidden_rows: [N, hidden] hidden states of the last step, row for row of its tokens, which it keeps.
    """

    device: torch.device
    hidden_rows: Tensor

    def join(self, token_ids: Tensor, hidden_states: Tensor) -> Tensor: ...

    def predict(self, rows: Tensor, metadata: StepMetadata, cache: AnyCache) -> Tensor: ...


class MtpDrafter(Drafter):
    """Drafts of the MTP module: the first over all tokens of the step before, each other over the draft before it.

    Where requests have not drafted for a while, or their blocks came from earlier ones, its cache has gaps: that costs
    drafts, and no token is wrong for it.

    Args:
        graph: of `model.predict`, for as many tokens of a request as a step with drafts has.
        chain: of `ShardedModel.draft`, for as many as are drafted.
    """

    follows_prompts = True

    def __init__(
        self,
        num_speculative_tokens: int,
        model: MtpModel,
        cache: LatentCache,
        dcp: DCPConfig,
        mesh: DCPMesh,
        graph: DecodeGraph,
        chain: DecodeGraph,
    ) -> None:
        super().__init__(num_speculative_tokens)
        self._model, self._cache, self._dcp, self._mesh = model, cache, dcp, mesh
        self._graph, self._chain = graph, chain
        self._workspace = decode_workspace(model.device)

    def draft(self, wanted: Sequence[tuple[Request, int]], computed: Sequence[Computed]) -> Drafts:
        """Guess with the module. Collective over the TP group, whose first rank's drafts all take."""
        parts = sorted(computed, key=lambda part: part.num_tokens)  # decodes first
        last_rows = np.cumsum([part.num_tokens for part in parts]) - 1
        last = {part.request: row for part, row in zip(parts, last_rows, strict=True)}
        nums = [num if request in last else 0 for request, num in wanted]
        hidden_states = self._predict(parts) if parts else None
        drafting = [(request, num) for (request, _), num in zip(wanted, nums, strict=True) if num]
        if hidden_states is None or not drafting or not self._chain.takes(len(drafting), max(nums)):
            return Drafts.of([[]] * len(nums))
        requests, query_lens = zip(*drafting, strict=True)
        (rows,) = upload([np.repeat([last[request] for request in requests], query_lens)], self._model.device)
        # The first token is the last one computed, whose guess is there; the others are drafts, all but the last.
        seq_lens = [request.num_known_tokens - 2 + num for request, num in drafting]
        metadata = self._metadata(query_lens, seq_lens, requests, "cpu")
        token_ids = self._chain.run(hidden_states.index_select(0, rows), metadata, self._cache)
        if self._mesh.tp_size > 1:
            with named("agreeing on drafts", self._mesh.tp_group):
                dist.broadcast(token_ids, group=self._mesh.tp_group, group_src=0)
        return Drafts(nums, token_ids)

    def close(self) -> None:
        """Free the graphs."""
        self._graph.release()
        self._chain.release()

    def _predict(self, parts: Sequence[Computed]) -> Tensor:
        """Run the module over the last step's tokens: return its hidden states [T, hidden]."""
        token_ids = [token for part in parts for token in _following(part)]
        rows = np.concatenate([np.arange(part.row, part.row + part.num_tokens) for part in parts])
        tokens_there, rows_there = upload([np.array(token_ids, dtype=np.int64), rows], self._model.device)
        inputs = self._model.join(tokens_there, self._model.hidden_rows.index_select(0, rows_there))
        query_lens = [part.num_tokens for part in parts]
        seq_lens = [part.position + part.num_tokens for part in parts]
        requests = [part.request for part in parts]
        if self._graph.takes(len(parts), max(query_lens)):
            return self._graph.run(inputs, self._metadata(query_lens, seq_lens, requests, "cpu"), self._cache)
        metadata = self._metadata(query_lens, seq_lens, requests, self._model.device)
        return self._model.predict(inputs, metadata, self._cache)

    def _metadata(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        requests: Sequence[Request],
        device: torch.device | str,
    ) -> StepMetadata:
        return StepMetadata.build(
            query_lens,
            seq_lens,
            [request.block_ids for request in requests],
            self._dcp,
            self._mesh.dcp_rank,
            device,
            max_decode_query_len=1 + self.num_speculative_tokens,
            workspace=self._workspace,
            **self._cache.sizes.step_layout([None] * len(requests)),
        )


def _following(part: Computed) -> list[int]:
    """Return the tokens that follow a request's in the step before."""
    return part.request.tokens(part.position + 1, part.position + part.num_tokens + 1)
