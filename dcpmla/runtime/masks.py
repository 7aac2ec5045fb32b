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
_ALL = np.uint32(0xFFFFFFFF)


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
        choices, row, draft = list[_Choices](), 0, 0
        tokens = [] if drafts is None else drafts.wait()
        for piece in ready:
            follower = None if piece.request.params.grammar is None else self._grammars.follower(piece.request)
            if follower is not None:
                choices.append(_Choices(row, piece.request, follower, tokens[draft : draft + piece.num_drafts]))
            row += 1 + piece.num_drafts
            draft += piece.num_drafts
        if not choices:
            return Masked(logits, [])
        bits = self._fill(choices)
        failed = [own.row for own in choices if own.follower.error]
        at = np.concatenate([np.arange(own.row, own.row + 1 + len(own.drafts)) for own in choices])
        return Masked(_masked(logits, at, bits), failed)

    def _fill(self, choices: Sequence["_Choices"]) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        """Return the masks of all choices [n, words]. Those after a draft that the grammar forbids have no meaning."""
        num_rows = sum(1 + len(own.drafts) for own in choices)
        bits = np.full((num_rows, self._grammars.num_words), _ALL, dtype=np.uint32)
        jobs, nums_free, start = list[tuple["LLMatcher", int, list[int]]](), list[int](), 0
        for own in choices:
            known = own.drafts[: own.drafts.index(NO_DRAFT)] if NO_DRAFT in own.drafts else own.drafts
            num_free = own.follower.num_free(own.request.token_ids, own.drafts)
            if own.follower.matcher is not None and not own.follower.error and num_free <= len(own.drafts):
                jobs.append((own.follower.matcher, start + num_free, known[num_free:]))
            nums_free.append(num_free)
            start += 1 + len(own.drafts)
        self._run(jobs, bits)
        start = 0
        for own, num_free in zip(choices, nums_free, strict=True):
            own.follower.check()
            for index in range(1 + len(own.drafts)):
                own.follower.finish(
                    bits[start + index], own.request.params.stop_token_ids, index < num_free, own.request.is_short
                )
            start += 1 + len(own.drafts)
        return bits

    def _run(self, jobs: Sequence[tuple["LLMatcher", int, list[int]]], bits: "np.ndarray[Any, Any]") -> None:
        """Fill each matcher's masks, in threads: one at its row, and one more for each draft."""
        if not jobs:
            return
        from llguidance import LLExecutor  # the extra structured brings it

        self._executor = self._executor or LLExecutor(_num_threads())
        target = bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits)
        if plain := [(matcher, row) for matcher, row, drafts in jobs if not drafts]:
            self._executor.unsafe_compute_mask_ptr(plain, *target)
        if drafted := [job for job in jobs if job[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)


class _Choices(NamedTuple):
    """The choices of a request in a step: one, and one after each of its drafts.

    Attributes:
        row: Row of the first choice in the logits.
    """

    row: int
    request: Request
    follower: Follower
    drafts: list[int]


def _masked(logits: Tensor, rows: "np.ndarray[Any, np.dtype[np.int64]]", bits: "np.ndarray[Any, Any]") -> Tensor:
    """Return a copy of logits [n, vocab], minus infinity where the masks [len(rows), words] of rows have no bit."""
    vocab_size, masked = logits.shape[-1], logits.clone()
    at, words = upload([rows, bits.view(np.int32)], logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    for part, own in zip(at.split(_MAX_ROWS), words.split(_MAX_ROWS), strict=True):
        allowed = (own[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size] != 0
        masked.index_copy_(0, part, logits.index_select(0, part).where(allowed, -torch.inf))
    return masked


def _num_threads() -> int:
    """Return the number of threads that fill masks."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))
