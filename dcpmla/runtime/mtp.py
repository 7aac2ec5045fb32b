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

    def guess(self, hidden_states: Tensor) -> Tensor: ...


class MtpDrafter(Drafter):
    """Drafts of the MTP module: the first over all tokens of the step before, each other over the draft before it.

    Where requests have not drafted for a while, or their blocks came from earlier ones, its cache has gaps: that costs
    drafts, and no token is wrong for it.

    Args:
        graph: of `model.predict`; None runs it eagerly.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        model: MtpModel,
        cache: LatentCache,
        dcp: DCPConfig,
        mesh: DCPMesh,
        graph: DecodeGraph | None = None,
    ) -> None:
        super().__init__(num_speculative_tokens, graph)
        self._model, self._cache, self._dcp, self._mesh = model, cache, dcp, mesh
        self._workspace = decode_workspace(model.device)

    def draft(self, wanted: Sequence[tuple[Request, int]], computed: Sequence[Computed]) -> Drafts:
        """Guess with the module. Collective over the TP group, whose first rank's drafts all take."""
        parts = sorted(computed, key=lambda part: part.num_tokens)  # decodes first
        last_rows = np.cumsum([part.num_tokens for part in parts]) - 1
        last = {part.request: row for part, row in zip(parts, last_rows, strict=True)}
        nums = [num if request in last else 0 for request, num in wanted]
        if not parts:
            return Drafts(nums, torch.empty(0, dtype=torch.int64, device=self._model.device))
        hidden_states = self._predict_computed(parts)
        drafting = [(request, num) for (request, _), num in zip(wanted, nums, strict=True) if num]
        if not drafting:
            return Drafts(nums, torch.empty(0, dtype=torch.int64, device=self._model.device))
        by_num = sorted(drafting, key=lambda pair: -pair[1])
        (rows,) = upload([np.array([last[request] for request, _ in by_num])], self._model.device)
        token_ids = self._guess_on(by_num, hidden_states.index_select(0, rows))
        if self._mesh.tp_size > 1:
            with named("agreeing on drafts", self._mesh.tp_group):
                dist.broadcast(token_ids, group=self._mesh.tp_group, group_src=0)
        return Drafts(nums, token_ids.index_select(0, self._in_order(drafting, by_num)))

    def _predict_computed(self, parts: Sequence[Computed]) -> Tensor:
        """Run the module over the last step's tokens: return its hidden states [T, hidden]."""
        token_ids = [token for part in parts for token in _following(part)]
        rows = np.concatenate([np.arange(part.row, part.row + part.num_tokens) for part in parts])
        tokens_there, rows_there = upload([np.array(token_ids, dtype=np.int64), rows], self._model.device)
        hidden_states = self._model.hidden_rows.index_select(0, rows_there)
        ends = [part.position + part.num_tokens for part in parts]
        return self._predict(
            tokens_there, hidden_states, [part.request for part in parts], [part.num_tokens for part in parts], ends
        )

    def _guess_on(self, by_num: Sequence[tuple[Request, int]], hidden_states: Tensor) -> Tensor:
        """Return the drafts of requests, those of most drafts first: the first of each [n], the second of those that
        want two, and so on.

        Args:
            hidden_states: [n, hidden] the module's, at each request's last token but one.
        """
        drafts = [self._model.guess(hidden_states)]
        for index in range(1, by_num[0][1]):
            requests = [request for request, num in by_num if num > index]
            inputs = drafts[-1][: len(requests)], hidden_states[: len(requests)]
            seq_lens = [request.num_known_tokens - 1 + index for request in requests]
            hidden_states = self._predict(*inputs, requests, [1] * len(requests), seq_lens)
            drafts.append(self._model.guess(hidden_states))
        return torch.cat(drafts)

    def _in_order(self, drafting: Sequence[tuple[Request, int]], by_num: Sequence[tuple[Request, int]]) -> Tensor:
        """Return where the drafts of each request are in what `_guess_on` gave, request after request."""
        counts = [sum(num > index for _, num in by_num) for index in range(by_num[0][1])]
        starts = np.cumsum([0, *counts])
        row_of = {request: row for row, (request, _) in enumerate(by_num)}
        order = [starts[index] + row_of[request] for request, num in drafting for index in range(num)]
        return upload([np.array(order)], self._model.device)[0]

    def _predict(
        self,
        token_ids: Tensor,
        hidden_states: Tensor,
        requests: Sequence[Request],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
    ) -> Tensor:
        """Run the module over tokens [T] and the hidden states [T, hidden] of the positions before them."""
        most = 1 + self.num_speculative_tokens
        graph = self.graph
        if graph is not None and not (max(query_lens) <= most and graph.takes(len(requests), max(query_lens))):
            graph = None
        metadata = StepMetadata.build(
            query_lens,
            seq_lens,
            [request.block_ids for request in requests],
            self._dcp,
            self._mesh.dcp_rank,
            self._model.device if graph is None else "cpu",
            max_decode_query_len=most,
            workspace=self._workspace,
            **self._cache.sizes.step_layout([None] * len(requests)),
        )
        rows = self._model.join(token_ids, hidden_states)
        if graph is None:
            return self._model.predict(rows, metadata, self._cache)
        return graph.run(rows, metadata, self._cache)


def _following(part: Computed) -> list[int]:
    """Return the tokens that follow a request's in the step before."""
    return part.request.tokens(part.position + 1, part.position + part.num_tokens + 1)
