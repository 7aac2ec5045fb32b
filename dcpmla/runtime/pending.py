"""A step under way: launched on the device, its tokens not on the host yet; the next step may already read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.agreement import Message
from dcpmla.runtime.logprobs import Logprobs
from dcpmla.runtime.request import Request
from dcpmla.runtime.scheduler import Step
from dcpmla.upload import upload


@dataclass(frozen=True)
class StepInputs:
    """The tokens that a step computes, and who gets a new one from it.

    Attributes:
        token_ids: [T] int64 on the device.
        ready: [n] requests that have all their tokens computed with it.
        logits_at: [n] int64 on the device, rows of their last tokens; None where these are all rows.
    """

    token_ids: Tensor
    ready: list[Request]
    logits_at: Tensor | None

    @classmethod
    def of(cls, step: Step, previous: "PendingStep | None", device: torch.device) -> "StepInputs":
        """Take a step's tokens from the requests, or from where the step under way will have written them, and count
        them as computed.
        """
        token_ids: list[int] = []
        last_rows: list[int] = []
        unknown: list[int] = []  # rows whose tokens the host does not know
        sources: list[int] = []  # and their rows among the tokens of the step under way
        ready = []
        for request, num_tokens in step.pieces:
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
            if end > request.num_known_tokens:  # a decode: its one token is being sampled
                assert previous is not None
                unknown.append(len(token_ids))
                sources.append(previous.rows[request])
                token_ids.append(0)
            else:
                token_ids += request.tokens(start, end)
            request.num_computed_tokens = end
            if not request.num_pending_tokens:
                ready.append(request)
                last_rows.append(len(token_ids) - 1)
        num_tokens = len(token_ids)
        if previous is not None and sources == list(range(num_tokens)) == list(range(len(previous.rows))):
            return cls(previous.message.tokens, ready, None)  # as most steps: the same requests go on
        numbers = [np.asarray(rows, dtype=np.int64) for rows in (token_ids, last_rows, unknown, sources)]
        known, logits_at, unknown_rows, source_rows = upload(numbers, device)
        if unknown:
            assert previous is not None
            known.index_copy_(0, unknown_rows, previous.message.tokens.index_select(0, source_rows))
        return cls(known, ready, None if len(ready) == num_tokens else logits_at)


class PendingStep:
    """A step under way.

    Args:
        ready: [n] requests that it samples a token for.
        message: what the ranks agree on, its tokens those of the requests.
        called: requests whose callbacks the message's flags are of.
        logits: [n, vocab] float32, which the tokens are chosen from; rows of requests that keep theirs are copied.
        logprobs: those that requests keep.
        is_prefill, num_tokens: for `Stats.count_step`.

    Attributes:
        rows: of the requests among the tokens.
        logits: [vocab] on the host, of requests that keep theirs; good once the step has been waited for.
        started: seconds on the host's clock (`time.perf_counter`).
    """

    def __init__(
        self,
        ready: Sequence[Request],
        message: Message,
        called: Sequence[Request],
        logits: Tensor,
        logprobs: Logprobs,
        is_prefill: bool,
        num_tokens: int,
        started: float,
    ) -> None:
        self.message, self.called, self.logprobs, self.is_prefill = message, called, logprobs, is_prefill
        self.num_tokens, self.started = num_tokens, started
        self.rows = {request: row for row, request in enumerate(ready)}
        for request in ready:
            request.num_in_flight += 1
        # Copied in the order of the device's work, into pinned memory on a GPU: nobody waits here.
        self._on_host = message.words.to("cpu", non_blocking=True)
        self.logits = {
            request: logits[row].to("cpu", non_blocking=True, copy=True)
            for request, row in self.rows.items()
            if request.keep_logits
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
