"""A step under way: launched on the device, its tokens not on the host yet; the next step may already read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.runtime.acceptance import Verified
from dcpmla.runtime.agreement import Message, News
from dcpmla.runtime.batch import Batch, Piece
from dcpmla.runtime.host_copy import HostCopy
from dcpmla.runtime.logprobs import Logprobs, PromptRows
from dcpmla.runtime.request import Request
from dcpmla.upload import upload

if TYPE_CHECKING:
    from dcpmla.runtime.graph import StepGraph


@dataclass(frozen=True)
class StepInputs:
    """The tokens that a step computes, and the requests that get new tokens from it.

    Attributes:
        token_ids: [T] int64 on the device; on the CPU if the host knows every token and all rows need logits.
        ready: Pieces of requests whose tokens are all computed after this step.
        starts: First of the new tokens that each ready piece may get, one and one more after each draft, and their
            number n.
        logits_at: [n] int64 on the device, rows of their last tokens and of all drafts; None if these are all rows.
        positions: Position of each piece's first token; empty in a step that continues the previous one.
    """

    token_ids: Tensor
    ready: list[Piece]
    starts: Sequence[int]
    logits_at: Tensor | None
    positions: Sequence[int] = ()

    @classmethod
    def of(
        cls, batch: Batch, previous: "InFlightStep | None", drafts: Tensor | None, device: torch.device
    ) -> "StepInputs":
        """Take a batch's tokens from the requests, or from the previous step's results on the device.

        Args:
            previous: The step under way.
            drafts: [N] int64, piece after piece, on the CPU where the host knows them.
        """
        there = [] if previous is None else [previous.newest]  # tokens that the host does not know
        num_there = sum(map(len, there))
        if previous is not None and (drafts is None or drafts.is_cuda) and batch.goes_on(previous.rows):
            if drafts is None:
                return cls(previous.newest, batch.pieces, range(num_there + 1), None)
            columns = [tokens.view(num_there, -1) for tokens in (previous.newest, drafts)]
            joined = torch.cat(columns, 1).flatten().clamp_(min=0)
            return cls(joined, batch.pieces, range(0, len(joined) + 1, len(joined) // num_there), None)
        known_drafts: list[int] = []
        if drafts is not None and drafts.is_cuda:
            there.append(drafts)
        elif drafts is not None:
            known_drafts = drafts.clamp(min=0).tolist()
        token_ids: list[int] = []
        logits_rows: list[int] = []
        unknown: list[int] = []  # rows of tokens that the host does not know
        sources: list[int] = []  # their indices in `there`
        ready = []
        positions = [piece.request.num_computed_tokens for piece in batch.pieces]
        for piece in batch.pieces:
            request, num_tokens, num_drafts = piece
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens - num_drafts
            if end > request.num_known_tokens:  # a decode: its one token is being sampled
                assert previous is not None
                unknown.append(len(token_ids))
                sources.append(previous.rows[request])
                token_ids.append(0)
            else:
                token_ids += request.tokens(start, end)
            if known_drafts:
                token_ids += known_drafts[:num_drafts]
                del known_drafts[:num_drafts]
            else:
                sources += range(num_there, num_there + num_drafts)
                unknown += range(len(token_ids), len(token_ids) + num_drafts)
                token_ids += [0] * num_drafts
                num_there += num_drafts
            if end - start == request.num_pending_tokens:
                ready.append(piece)
                logits_rows += range(len(token_ids) - 1 - num_drafts, len(token_ids))
        starts = [*accumulate((1 + piece.num_drafts for piece in ready), initial=0)]
        rows = [] if len(logits_rows) == len(token_ids) else [logits_rows]
        rows += [unknown, sources] if unknown else []
        numbers = [np.array(column, dtype=np.int64) for column in (token_ids, *rows)]
        known, *rows_there = upload(numbers, device if rows else "cpu")
        if unknown:
            *rows_there, unknown_rows, source_rows = rows_there
            known.index_copy_(0, unknown_rows, torch.cat(there).clamp_(min=0).index_select(0, source_rows))
        return cls(known, ready, starts, rows_there[0] if rows_there else None, positions)

    def on(self, device: torch.device) -> Tensor:
        """Return the tokens on the device."""
        return upload([self.token_ids.numpy()], device)[0] if self.token_ids.is_cpu else self.token_ids


@dataclass(frozen=True)
class ComputedStep:
    """A step that the device computes, before its tokens are chosen.

    Attributes:
        drafts, host_drafts: Drafts to verify, and their copy on the host where masks depend on it.
        has_grammars: Whether any of its requests follows a grammar.
        prompts: Tokens of prompts that it scores.
        by: Metadata of the model, or the graphs, which keep their own until their next run.
        rows: [T] int64 on the device, row of each token; None for the first T rows.
        logits: [n + p, vocab] float32, of the tokens that new ones follow, then of the prompts' scored tokens.
        started: Seconds on the host's clock (`time.perf_counter`).
    """

    batch: Batch
    inputs: StepInputs
    drafts: Tensor | None
    host_drafts: HostCopy | None
    has_grammars: bool
    prompts: PromptRows
    by: "StepMetadata | StepGraph"
    rows: Tensor | None
    logits: Tensor
    started: float

    @property
    def needs_tokens(self) -> bool:
        """Return whether the choice of its tokens depends on the previous step's tokens on the host."""
        is_unknown = (request.params.grammar and request.num_in_flight for request, *_ in self.inputs.ready)
        return self.has_grammars and any(is_unknown)


class InFlightStep:
    """A step under way. It does not keep the step's logits on the device.

    Args:
        step: The computed step; the ready pieces' requests get new tokens: one, and one more after each draft.
        message: Message that all ranks share.
        verified: Outcome of the drafts; None without any.
        logprobs: Log probabilities that requests keep.

    Attributes:
        by, token_rows, started: See `ComputedStep`, whose `rows` are these `token_rows`.
        rows: Row of each request in `newest`.
        newest: Last new token of each request [n] int64 on the device.
        ready, starts, positions: See `StepInputs`.
        is_under_way: True until the step has been waited for.
        drafts, num_accepted: Drafts, and accepted ones of each request in `rows`, on the host; valid after the wait.
        logits: [tokens, vocab] on the host, of requests that keep theirs; valid after the wait.
    """

    def __init__(self, step: ComputedStep, message: Message, verified: Verified | None, logprobs: Logprobs) -> None:
        batch, inputs = step.batch, step.inputs
        self.pieces, self.is_prefill, self.num_tokens = batch.pieces, batch.has_prompts, batch.num_tokens
        self.ready, self.starts, self.positions = inputs.ready, inputs.starts, inputs.positions
        self.by, self.token_rows, self._logits_at, self.started = step.by, step.rows, inputs.logits_at, step.started
        self.message, self.logprobs, self.verified = message, logprobs, verified
        self.newest = message.tokens if verified is None else verified.newest
        self.num_drafts = batch.num_drafts
        self.is_under_way = True
        self.drafts, self.num_accepted = list[int](), [0] * len(self.ready)
        self.rows = {piece.request: row for row, piece in enumerate(self.ready)}
        # Copies follow the device's work, into pinned memory on a GPU, so the host does not wait here.
        self.logits = {
            piece.request: step.logits[row : row + 1 + piece.num_drafts].to("cpu", non_blocking=True, copy=True)
            for piece, row in zip(self.ready, self.starts, strict=False)
            if piece.request.keep_logits
        }
        self._on_host = HostCopy(message.memory)
        self._count(1)

    def wait(self) -> list[int]:
        """Wait for the step, and return the words of its message, whose tokens the host knows from now on."""
        words, num_words = self._on_host.wait(), len(self.message.words)
        self.is_under_way = False
        self._count(-1)
        if self.num_drafts:
            self.num_accepted[:], self.drafts = words[num_words : -self.num_drafts], words[-self.num_drafts :]
        return words[:num_words]

    def _count(self, factor: int) -> None:
        """Count the new tokens and drafts of its requests as in flight; with a factor of -1 no longer."""
        for request, _, num_drafts in self.ready:
            request.num_in_flight += factor
            if num_drafts:
                request.num_tried += factor * num_drafts

    def results(self, tokens: Sequence[int]) -> Iterator[tuple[Piece, Sequence[int], Sequence[int]]]:
        """Yield each request with its drafts, and its new tokens: those sampled up to the first rejected draft.

        Args:
            tokens: [n] of the message.
        """
        for index, (piece, row, num) in enumerate(zip(self.ready, self.starts, self.num_accepted, strict=False)):
            drafts_at = row - index  # each request before has one token more than drafts
            yield piece, self.drafts[drafts_at : drafts_at + piece.num_drafts], tokens[row : row + 1 + num]

    @property
    def sampled_rows(self) -> Tensor:
        """Return which rows of the model the new tokens [n] follow, [n] int64 on the device."""
        rows, logits_at = self.token_rows, self._logits_at
        if rows is None:
            return torch.arange(self.starts[-1], device=self.newest.device) if logits_at is None else logits_at
        return rows if logits_at is None else rows.index_select(0, logits_at)

    def num_rejected(self, requests: Sequence[Request]) -> Tensor | None:
        """Return the number of each request's rejected drafts, [n] int64 on the device; None without drafts."""
        if self.verified is None:
            return None
        rows = [self.rows.get(request, len(self.rows)) for request in requests]
        if rows == list(range(len(self.rows))):
            return self.verified.num_rejected
        (there,) = upload([np.array(rows)], self.newest.device)
        return torch.nn.functional.pad(self.verified.num_rejected, (0, 1))[there]


class StepEvents(NamedTuple):
    """The outcome of a call of `Engine.step`.

    Attributes:
        changed: Requests with new tokens, in the order of the batch. A request that failed is among them.
        finished: Requests that ended, by themselves or with an error.
        news: News that all ranks now have (`Engine.post`), to apply before the next step.
        wanted: Requests that were admitted for another job to prefill (`Handoffs.pull`).
    """

    changed: list[Request]
    finished: list[Request]
    news: News = News()
    wanted: Sequence[Request] = ()
