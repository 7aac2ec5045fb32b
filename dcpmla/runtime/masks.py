"""Masks of the tokens that grammars allow, made on the first rank's host while the device computes the step."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.batch import Piece
from dcpmla.runtime.drafts import NO_DRAFT
from dcpmla.runtime.grammars import Follower, Grammars
from dcpmla.runtime.host_copy import HostCopy
from dcpmla.runtime.request import Request
from dcpmla.upload import upload

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

NO_TOKEN = -2  # instead of a token, where a grammar cannot be followed
_MAX_ROWS = 64  # rows at once: temporary tensors stay small compared with the logits of a large batch
_MOST_THREADS = 8  # that fill masks
_ALL = np.uint32(0xFFFFFFFF)
# A matcher, the row of its first mask, and the drafts after which it makes others.
_Job = tuple["LLMatcher", int, list[int]]


class Masked(NamedTuple):
    """Logits under the masks of grammars.

    Attributes:
        logits: [n, vocab] float32, minus infinity for tokens that a grammar forbids.
        failed: Rows whose grammar cannot be followed.
    """

    logits: Tensor
    failed: list[int]

    def reject(self, tokens: Tensor) -> Tensor:
        """Return tokens [n] int64, NO_TOKEN in the failed rows."""
        if not self.failed:
            return tokens
        return tokens.index_fill(0, upload([np.array(self.failed)], tokens.device)[0], NO_TOKEN)


class Masks:
    """Masks of the choices of a step. Other ranks than the first make none: their tokens are replaced by its tokens."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._executor: LLExecutor | None = None

    def apply(self, logits: Tensor, ready: Sequence[Piece], drafts: HostCopy | None) -> Masked:
        """Return a step's logits under the masks of its grammars: the same tensor without any.

        Args:
            logits: [n, vocab] float32, a row for each ready piece and after each of its drafts.
            ready: Pieces whose requests' tokens before this step are all known.
            drafts: The step's drafts, of all pieces, copied before the model computes it.
        """
        choices, num_rows, row, draft = list[_Choices](), 0, 0, 0
        tokens = [] if drafts is None else drafts.wait()
        for request, _, num_drafts in ready:
            follower = None if request.params.grammar is None else self._grammars.follower(request)
            if follower is not None:
                own = tokens[draft : draft + num_drafts]
                num_free = follower.num_free(request.token_ids, own)
                choices.append(_Choices(row, num_rows, request, follower, own, num_free))
                num_rows += 1 + num_drafts
            row += 1 + num_drafts
            draft += num_drafts
        if not choices:
            return Masked(logits, [])
        bits = self._fill(choices, num_rows)
        failed = [own.row for own in choices if own.follower.error]
        at = np.concatenate([np.arange(own.row, own.row + 1 + len(own.drafts)) for own in choices])
        return Masked(mask_rows(logits, at, bits), failed)

    def _fill(self, choices: Sequence["_Choices"], num_rows: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        """Return the masks of all choices [n, words]. Those after a draft that the grammar forbids have no meaning."""
        bits, jobs = np.full((num_rows, self._grammars.num_words), _ALL, dtype=np.uint32), list[_Job]()
        for _, start, _, follower, drafts, num_free in choices:
            known = drafts[: drafts.index(NO_DRAFT)] if NO_DRAFT in drafts else drafts
            if follower.matcher is not None and not follower.error and num_free <= len(drafts):
                jobs.append((follower.matcher, start + num_free, known[num_free:]))
        self._run(jobs, bits)
        for _, start, request, follower, drafts, num_free in choices:
            follower.check()
            for index in range(1 + len(drafts)):
                is_free = index < num_free
                follower.finish(bits[start + index], request.params.stop_token_ids, is_free, request.is_short)
        return bits

    def _run(self, jobs: Sequence["_Job"], bits: "np.ndarray[Any, Any]") -> None:
        """Fill each matcher's masks, in threads: one at its row, and one more for each draft."""
        if not jobs:
            return
        from llguidance import LLExecutor  # the extra structured brings it

        self._executor = self._executor or LLExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))
        target = bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits)
        if plain := [(matcher, row) for matcher, row, drafts in jobs if not drafts]:
            self._executor.unsafe_compute_mask_ptr(plain, *target)
        if drafted := [job for job in jobs if job[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)


class _Choices(NamedTuple):
    """The choices of a request in a step: one, and one after each of its drafts.

    Attributes:
        row, start: Row of the first choice in the logits, and in the masks.
        num_free: Number of choices before the grammar begins.
    """

    row: int
    start: int
    request: Request
    follower: Follower
    drafts: list[int]
    num_free: int


def mask_rows(logits: Tensor, rows: "np.ndarray[Any, np.dtype[np.int64]]", bits: "np.ndarray[Any, Any]") -> Tensor:
    """Return a copy of logits [n, vocab], minus infinity where the masks [len(rows), words] of rows have no bit."""
    vocab_size, masked = logits.shape[-1], logits.clone()
    at, words = upload([rows, bits.view(np.int32)], logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    for part, own in zip(at.split(_MAX_ROWS), words.split(_MAX_ROWS), strict=True):
        allowed = (own[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size] != 0
        masked.index_copy_(0, part, logits.index_select(0, part).where(allowed, -torch.inf))
    return masked
