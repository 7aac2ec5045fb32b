"""A step on the device: run by the model or its graphs, then the choice of tokens and the message on them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import Cache
from dcpmla.config import DCPConfig
from dcpmla.runtime.agreement import Agreement
from dcpmla.runtime.batch import Batch, Piece
from dcpmla.runtime.costs import PieceCosts
from dcpmla.runtime.grammars import Grammars
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.graph_sizes import GraphSize
from dcpmla.runtime.host_copy import HostCopy
from dcpmla.runtime.in_flight import ComputedStep, InFlightStep, StepInputs
from dcpmla.runtime.logprobs import Logprobs, PromptRows
from dcpmla.runtime.masks import Masks
from dcpmla.runtime.model import Model
from dcpmla.runtime.penalties import Penalties
from dcpmla.runtime.sampling import sample
from dcpmla.runtime.speculation import Speculation
from dcpmla.upload import upload

# Graphs of steps, and the size that a step is padded to.
Graph = tuple[StepGraph, GraphSize]


class StepRunner:
    """The model over its cache, one step after the other.

    Args:
        costs: Costs of pieces, with the width of the pieces that absorbed attention cuts requests into.
        grammars: Grammars of the requests.
    """

    def __init__(
        self, model: Model, cache: Cache, dcp: DCPConfig, dcp_rank: int, costs: PieceCosts, grammars: Grammars
    ) -> None:
        self._model, self._cache = model, cache
        self._penalties, self._grammars, self._masks = Penalties(model.eos_token_ids), grammars, Masks(grammars)
        self._steps = model.attention.step_builder(cache.sizes, dcp, dcp_rank, model.device)
        self._tokens_per_request = costs.tokens_per_request
        self._workspace = decode_workspace(model.device)
        # Layers take scales from the first prefill, before which nothing may be cached.
        self._scales_pending = dcp.calculate_kv_scales

    def graph_of(self, batch: Batch, decode: StepGraph | None, prompts: StepGraph | None) -> Graph | None:
        """Return the graphs that run a step, and the size that it is padded to; None if none can."""
        if self._scales_pending:
            return None
        num_reqs, query_len = len(batch.pieces), batch.most_drafts + 1
        is_decode = batch.num_absorbed == num_reqs and not batch.has_long_absorbed
        if decode is not None and is_decode and (size := decode.decode_size(num_reqs, query_len)):
            return decode, size
        if prompts is None:
            return None
        contexts = [piece.request.num_computed_tokens for piece in batch.pieces]
        size = prompts.prompt_size([piece.num_tokens for piece in batch.pieces], contexts, batch.num_absorbed)
        return None if size is None else (prompts, size)

    def start(
        self, batch: Batch, previous: InFlightStep | None, drafts: Tensor | None, graph: Graph | None, started: float
    ) -> ComputedStep:
        """Compute a step. Its tokens are chosen by `finish`. Collective over the TP group.

        Args:
            previous: Step in flight, whose tokens may only be on the device.
            drafts: Tokens to verify (`Drafts.token_ids`).
            graph: Graphs that run the step, and its size (`graph_of`); None for the model itself.
            started: Seconds on the host's clock.
        """
        has_grammars = any(piece.request.params.grammar is not None for piece in batch.pieces)
        host_drafts = HostCopy(drafts) if drafts is not None and has_grammars else None
        inputs, prompts = StepInputs.of(batch, previous, drafts, self._model.device), PromptRows.of(batch)
        logits_at = prompts.join(inputs.logits_at)
        for copy in batch.copies:
            self._cache.copy_state(*copy)
        requests = StepRequests(
            [piece.num_tokens for piece in batch.pieces],
            [request.num_computed_tokens + request.num_tried + num_tokens for request, num_tokens, _ in batch.pieces],
            [piece.request.block_ids for piece in batch.pieces],
            [piece.request.state for piece in batch.pieces],
            batch.num_absorbed,
            # A decode and its drafts, or a width that suits the kernels if pieces of prompts are longer.
            self._tokens_per_request if batch.has_long_absorbed else batch.most_drafts + 1,
        )
        by: StepMetadata | StepGraph
        if graph is None:
            # Without scales nothing is a decode, not even a prompt of one token.
            num_decodes = 0 if self._scales_pending else batch.num_absorbed
            by = self._steps.build(requests, requests.segment_len, num_decodes, self._workspace)
            rows = self._model.hidden(inputs.on(self._model.device), by, self._cache)
            self._scales_pending = False
        else:
            by, size = graph
            num_rejected = None
            if previous is not None and size.query_len:
                num_rejected = previous.num_rejected([piece.request for piece in batch.pieces])
            rows = by.run(inputs.token_ids, requests, size, num_rejected, self._workspace)
        rows = rows if logits_at is None else rows[logits_at]
        logits = rows if graph is not None and graph[1].query_len else self._model.logits(rows)
        token_rows = by.latest_rows if isinstance(by, StepGraph) else None
        return ComputedStep(batch, inputs, drafts, host_drafts, has_grammars, prompts, by, token_rows, logits, started)

    def finish(
        self, step: ComputedStep, previous: InFlightStep | None, speculation: Speculation, agreement: Agreement
    ) -> InFlightStep:
        """Choose the tokens of a step, and send the message on them. Collective over the TP group.

        Args:
            previous: Step in flight, None if its tokens have been taken since the start of this one.
            agreement: Messages of the ranks, one a step.
        """
        ready, starts, drafts, logits = step.inputs.ready, step.inputs.starts, step.drafts, step.logits
        tokens = self._choose_tokens(step, previous)
        if step.batch.has_prompts:  # the step of a prompt's last token is one
            tokens = step.prompts.reject_not_finite(tokens, logits, ready, starts)
        num_verified = 0 if drafts is None else len(ready) + len(drafts)
        num_compiled = self._grammars.num_compiled
        message = agreement.start(tokens, self._model.faults, speculation.step_time, num_verified, num_compiled)
        verified = speculation.verify(drafts, ready, message)
        logprobs = Logprobs(logits, ready, starts, message.tokens, step.prompts)
        return InFlightStep(step, message, verified, logprobs)

    def _choose_tokens(self, step: ComputedStep, previous: InFlightStep | None) -> Tensor:
        """Choose a token after each of the requests' last tokens and drafts, [n] int64 on the device."""
        ready, logits = step.inputs.ready, step.logits
        requests = [piece.request for piece in ready]
        if step.drafts is not None:
            requests = [piece.request for piece in ready for _ in range(1 + piece.num_drafts)]
        params, allowed, masked = [request.params for request in requests], logits[: len(requests)], None
        if step.has_grammars:
            masked = self._masks.apply(allowed, ready, step.host_drafts)
            allowed = masked.logits
        shaped = self._penalties.shape_logits(allowed, requests, previous)
        tokens = sample(shaped, params, _draw(ready, previous, logits.device))
        return tokens if masked is None else masked.reject(tokens)


def reads_between_graphs(batch: Batch, graph: Graph | None) -> bool:
    """Return whether attention to blocks that are loading is launched for each layer, not inside of a graph."""
    if graph is None:
        return True
    return not graph[1].is_whole and all(piece.request.loading is None for piece in batch.pieces[: batch.num_absorbed])


def _draw(ready: Sequence[Piece], previous: InFlightStep | None, device: torch.device) -> Sequence[float] | Tensor:
    """Return a random number for each token [n], 0 if it is not drawn, or none if no token is; float64 on the device if
    they depend on the number of drafts that the step in flight accepts.
    """
    if not any(piece.request.params.temperature for piece in ready):
        return []
    numbers: list[float] = []
    at: list[int] = []
    orders: list[int] = []  # each request's index in the step in flight; -1, the zero at the end, if irrelevant
    for request, _, num_drafts in ready:
        rows = range(len(numbers), len(numbers) + 1 + num_drafts)
        at += rows
        is_drawn = request.params.temperature > 0
        numbers += request.draw(len(rows)) if is_drawn else [0.0] * len(rows)
        orders += [previous.rows[request] if previous and is_drawn and request.num_tried else -1] * len(rows)
    if len(numbers) == len(at) or previous is None or previous.verified is None:
        return numbers
    numbers_there, at_there, orders_there = upload([np.array(column) for column in (numbers, at, orders)], device)
    num_accepted = torch.nn.functional.pad(previous.verified.num_accepted, (0, 1))
    return numbers_there.index_select(0, at_there + num_accepted[orders_there])
