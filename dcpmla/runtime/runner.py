"""A step on the device: what it computes, by the model or its decode graph, and the tokens chosen from that."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.step import StepMetadata
from dcpmla.cache.compressed import AnyCache, CompressedCache
from dcpmla.config import DCPConfig
from dcpmla.runtime.graph import DecodeGraph
from dcpmla.runtime.logprobs import PromptRows
from dcpmla.runtime.penalties import shape_logits
from dcpmla.runtime.pending import Computed, PendingStep, StepInputs
from dcpmla.runtime.sampling import sample
from dcpmla.runtime.scheduler import Piece, Step


class Model(Protocol):
    """The model that the engine drives; `dcpmla.integrations.transformers.ShardedModel` is one."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    eos_token_ids: frozenset[int]

    def step(self, token_ids: Tensor, metadata: StepMetadata, cache: AnyCache, logits_at: Tensor | None) -> Tensor: ...

    @property
    def faults(self) -> Sequence[Tensor]: ...

    def check(self) -> None: ...


class StepRunner:
    """The model over its cache, one step after the other."""

    def __init__(self, model: Model, cache: AnyCache, dcp: DCPConfig, dcp_rank: int) -> None:
        self.model, self.cache, self.dcp, self.dcp_rank = model, cache, dcp, dcp_rank
        self._workspace = decode_workspace(model.device)
        # Layers take scales from the first prefill, before which nothing may be cached.
        self._lacks_scales = dcp.calculate_kv_scales

    def graph_of(self, step: Step, graph: DecodeGraph | None) -> DecodeGraph | None:
        """Return the decode graph, if the step is one for it."""
        if graph is None or self._lacks_scales:
            return None
        query_len = step.most_drafts + 1
        if any(piece.num_tokens > query_len for piece in step.pieces):
            return None
        return graph if graph.takes(len(step.pieces), query_len) else None

    def run(
        self,
        step: Step,
        previous: PendingStep | None,
        drafts: Tensor | None,
        graph: DecodeGraph | None,
        prompts: PromptRows,
    ) -> tuple[StepInputs, Computed, Tensor]:
        """Compute a step's tokens; return them, how they are laid out, and the logits of those that new ones follow,
        then of the prompts' tokens that are scored.

        Args:
            previous: the step under way, which may have its tokens on the device alone.
            drafts: tokens to verify (`Drafts.token_ids`).
            graph: to replay instead of calling the model.
        """
        for copy in step.copies:
            self.copy_state(*copy)
        metadata = StepMetadata.build(
            query_lens=[piece.num_tokens for piece in step.pieces],
            seq_lens=[
                request.num_computed_tokens + request.num_tried + num_tokens for request, num_tokens, _ in step.pieces
            ],
            block_tables=[piece.request.block_ids for piece in step.pieces],
            dcp=self.dcp,
            dcp_rank=self.dcp_rank,
            device=self.model.device if graph is None else "cpu",
            # Without scales nothing is a decode, not even a prompt of one token.
            max_decode_query_len=0 if self._lacks_scales else step.most_drafts + 1,
            workspace=self._workspace,
            **self.cache.sizes.step_layout([piece.request.state for piece in step.pieces]),
        )
        self._lacks_scales = False
        inputs = StepInputs.of(step, previous, drafts, self.model.device)
        logits_at = prompts.join(inputs.logits_at)
        if graph is None:
            logits = self.model.step(inputs.on(self.model.device), metadata, self.cache, logits_at)
            return inputs, Computed(metadata, None, inputs.logits_at), logits
        num_rejected = None if previous is None else previous.num_rejected([piece.request for piece in step.pieces])
        logits = graph.run(inputs.token_ids, metadata, self.cache, num_rejected)
        if logits_at is not None:
            logits = logits[logits_at]
        return inputs, Computed(graph, graph.latest_rows, inputs.logits_at), logits

    def copy_state(self, source: int, target: int) -> None:
        """Copy a request's state to where it is remembered, or back."""
        assert isinstance(self.cache, CompressedCache)  # only its plan has states
        self.cache.copy_state(source, target)


def choose_tokens(ready: Sequence[Piece], logits: Tensor, previous: PendingStep | None) -> Tensor:
    """Choose a token after each of the requests' last tokens and drafts, [n] int64 on the device."""
    requests = [piece.request for piece in ready for _ in range(1 + piece.num_drafts)]
    generators = [request.generator if request.params.temperature else None for request in requests]
    for piece in ready:
        if piece.num_drafts:
            piece.request.mark_draws()
    shaped = shape_logits(logits[: len(requests)], requests, previous)
    return sample(shaped, [request.params for request in requests], generators)
