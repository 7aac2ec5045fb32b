"""A step under way: launched on the device, its tokens not on the host yet; the next step may already read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.agreement import Message
from dcpmla.runtime.drafts import Computed
from dcpmla.runtime.logprobs import Logprobs
from dcpmla.runtime.request import Request
from dcpmla.runtime.scheduler import Piece, Step
from dcpmla.upload import upload


@dataclass(frozen=True)
class StepInputs:
    """The tokens that a step computes, and who gets new ones from it.

    Attributes:
        token_ids: [T] int64 on the device; on the CPU where the host knows them all, and wants all rows' logits.
        ready: the pieces of requests that have all their tokens computed with it.
        logits_at: [n] int64 on the device, rows of their last tokens and of all drafts; None where these are all rows.
    """

    token_ids: Tensor
    ready: list[Piece]
    logits_at: Tensor | None

    @classmethod
    def of(
        cls, step: Step, previous: "PendingStep | None", drafts: Tensor | None, device: torch.device
    ) -> "StepInputs":
        """Take a step's tokens from the requests, or from where the device will have written them, and count them as
        computed, all but drafts.

        Args:
            previous: the step under way, whose tokens a step without drafts may take.
            drafts: [N] int64, piece after piece, on the CPU where the host knows them.
        """
        known_drafts = [] if drafts is None or drafts.is_cuda else drafts.tolist()
        token_ids: list[int] = []
        logits_rows: list[int] = []
        unknown: list[int] = []  # rows whose tokens the host does not know
        sources: list[int] = []  # and their rows among drafts, or among what the step under way samples
        ready = []
        for piece in step.pieces:
            request, num_tokens, num_drafts = piece
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens - num_drafts
            if end > request.num_known_tokens:  # a decode: its one token is being sampled
                assert previous is not None
                unknown.append(len(token_ids))
                sources.append(previous.rows[request])
                token_ids.append(0)
            else:
                token_ids += request.tokens(start, end)
            if drafts is not None and drafts.is_cuda:
                sources += range(len(unknown), len(unknown) + num_drafts)
                unknown += range(len(token_ids), len(token_ids) + num_drafts)
                token_ids += [0] * num_drafts
            else:
                token_ids += known_drafts[:num_drafts]
                del known_drafts[:num_drafts]
            request.num_computed_tokens = end
            if not request.num_pending_tokens:
                ready.append(piece)
                logits_rows += range(len(token_ids) - 1 - num_drafts, len(token_ids))
        num_tokens = len(token_ids)
        if previous is not None and sources == list(range(num_tokens)) == list(range(len(previous.rows))):
            return cls(previous.message.tokens, ready, None)  # as most steps: the same requests go on
        rows = [] if len(logits_rows) == num_tokens else [logits_rows]
        rows += [unknown, sources] if unknown else []
        numbers = [np.array(column, dtype=np.int64) for column in (token_ids, *rows)]
        known, *rows_there = upload(numbers, device if rows else "cpu")
        if unknown:
            *rows_there, unknown_rows, source_rows = rows_there
            sampled = drafts if previous is None else previous.message.tokens
            assert sampled is not None
            known.index_copy_(0, unknown_rows, sampled.index_select(0, source_rows))
        return cls(known, ready, rows_there[0] if rows_there else None)

    def on(self, device: torch.device) -> Tensor:
        """Return the tokens on the device."""
        return upload([self.token_ids.numpy()], device)[0] if self.token_ids.is_cpu else self.token_ids


class PendingStep:
    """A step under way.

    Args:
        pieces: all of it.
        row_lens: rows of each piece in the model's hidden states: its tokens, and where a graph pads it more.
        ready: those of requests that it samples tokens for, one and one after each draft.
        message: what the ranks agree on.
        drafts: which the step verifies, piece after piece; None for none.
        called: requests whose callbacks the message's flags are of.
        logits: [n, vocab] float32, which the tokens are chosen from; rows of requests that keep theirs are copied.
        logprobs: those that requests keep.
        is_prefill: for `Stats.count_step`.

    Attributes:
        rows: of the requests' first tokens among the message's.
        logits: [tokens, vocab] on the host, of requests that keep theirs; good once the step has been waited for.
        started: seconds on the host's clock (`time.perf_counter`).
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        row_lens: Sequence[int],
        ready: Sequence[Piece],
        message: Message,
        drafts: Tensor | None,
        called: Sequence[Request],
        logits: Tensor,
        logprobs: Logprobs,
        is_prefill: bool,
        started: float,
    ) -> None:
        self.pieces, self.row_lens, self.ready = pieces, row_lens, ready
        self.message, self.called, self.logprobs = message, called, logprobs
        self.is_prefill, self.started = is_prefill, started
        self.num_drafts = 0 if drafts is None else len(drafts)
        self._positions = [piece.request.num_computed_tokens - piece.num_tokens + piece.num_drafts for piece in pieces]
        starts = accumulate((1 + piece.num_drafts for piece in ready), initial=0)
        self.rows = {piece.request: row for piece, row in zip(ready, starts, strict=False)}
        for request in self.rows:
            request.num_in_flight += 1
        # Copied in the order of the device's work, into pinned memory on a GPU: nobody waits here.
        self._on_host = message.words.to("cpu", non_blocking=True)
        self._drafts = None if drafts is None else drafts.to("cpu", non_blocking=True)
        self.logits = {
            piece.request: logits[row : row + 1 + piece.num_drafts].to("cpu", non_blocking=True, copy=True)
            for piece, row in zip(ready, self.rows.values(), strict=True)
            if piece.request.keep_logits
        }
        self._done = torch.cuda.Event() if message.words.is_cuda else None  # the CPU is done already
        if self._done is not None:
            self._done.record()

    def wait(self) -> list[int]:
        """Wait for the step, and return the words of its message, whose tokens the host knows from now on."""
        if self._done is not None:
            self._done.synchronize()
        for request in self.rows:
            request.num_in_flight -= 1
        words: list[int] = self._on_host.tolist()
        return words

    def results(self, tokens: Sequence[int]) -> Iterator[tuple[Piece, Sequence[int], Sequence[int]]]:
        """Yield each request with its drafts, and the tokens sampled before each of them and after the last.

        Args:
            tokens: [n] of the message.
        """
        drafts, at = [] if self._drafts is None else self._drafts.tolist(), 0
        for piece, row in zip(self.ready, self.rows.values(), strict=True):
            end = at + piece.num_drafts
            yield piece, drafts[at:end], tokens[row : row + 1 + piece.num_drafts]
            at = end

    def computed(self) -> list[Computed]:
        """Return the tokens that the running requests keep of it, once they have its new ones, and before the next
        step.
        """
        starts = accumulate(self.row_lens, initial=0)
        return [
            Computed(request, row, position, request.num_computed_tokens - position)
            for (request, _, _), row, position in zip(self.pieces, starts, self._positions, strict=False)
            if not request.finish_reason
        ]
