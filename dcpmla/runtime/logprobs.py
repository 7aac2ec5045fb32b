"""Log probabilities of chosen and prompt tokens, and of the best tokens at the same position.

They are the model's own, before temperature, penalties and other changes of the logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.batch import Batch, Piece
from dcpmla.runtime.draws import log_sums, ranks_of
from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.runtime.sampling import NOT_FINITE
from dcpmla.upload import upload

_ID_BITS = 31  # bits per token id
_MAX_ROWS = 64  # rows at once: temporary tensors stay small compared with the logits of a large batch


class PromptRows(NamedTuple):
    """The prompts' tokens that a step scores: their successors are known.

    Attributes:
        counts: Number of tokens of each request.
        rows: Rows of the tokens in the step's batch.
        targets: Ids of the tokens after them.
    """

    counts: list[tuple[Request, int]]
    rows: list[int]
    targets: list[int]

    @classmethod
    def of(cls, batch: Batch) -> "PromptRows":
        """Find the tokens of a batch, before they count as computed (`Batch.advance`)."""
        found, row = cls([], [], []), 0
        for request, num_tokens, _ in batch.pieces if batch.num_scored else ():
            start = max(request.num_computed_tokens, request.num_scored_tokens)
            end = min(request.num_computed_tokens + num_tokens, len(request.prompt_token_ids) - 1)
            if request.is_scored and start < end:
                first = row - request.num_computed_tokens
                found.counts.append((request, end - start))
                found.rows.extend(range(first + start, first + end))
                found.targets.extend(request.prompt_token_ids[start + 1 : end + 1])
            row += num_tokens
        return found

    def reject_not_finite(
        self, tokens: Tensor, logits: Tensor, ready: Sequence[Piece], starts: Sequence[int]
    ) -> Tensor:
        """Replace the first token of a request by NOT_FINITE if logits of its prompt were NaN or infinite.

        Args:
            tokens: New tokens [n] int64, on the device.
            logits: Logits [n + p, vocab] float32, of the tokens that new ones follow, then of the prompts' tokens.
            ready, starts: Pieces of the requests that get tokens, and the first one of each (`StepInputs`).
        """
        start = len(tokens)
        for request, count in self.counts:
            best = logits[start : start + count].amax()
            is_finite = best - best == 0
            known = request.has_finite_scores
            request.has_finite_scores = is_finite if known is None else known & is_finite
            start += count
        for row, (request, *_) in zip(starts, ready, strict=False):
            if request.has_finite_scores is not None:
                tokens[row] = tokens[row].where(request.has_finite_scores, NOT_FINITE)
                request.has_finite_scores = None
        return tokens

    def join(self, logits_at: Tensor | None) -> Tensor | None:
        """Return rows logits_at [n], followed by the prompts' rows, on the device; None for all rows."""
        if logits_at is None or not self.rows:
            return logits_at
        return torch.cat([logits_at, *upload([np.asarray(self.rows)], logits_at.device)])


class Logprobs:
    """A step's log probabilities, on their way to the host if this rank keeps them.

    Args:
        logits: Logits [n + p, vocab] float32, of the tokens that new ones follow, then of the prompts' tokens.
        ready, starts: Pieces of the requests that get tokens, the first one of each, and their number n (`StepInputs`).
        tokens: Tokens int64 on the device, first the new ones [n].
        prompts: Tokens of prompts [p].
    """

    def __init__(
        self, logits: Tensor, ready: Sequence[Piece], starts: Sequence[int], tokens: Tensor, prompts: PromptRows
    ) -> None:
        self._new = {
            request: row
            for row, (request, *_) in zip(starts, ready, strict=False)
            if request.params.logprobs is not None and request.keep_logprobs
        }
        self._counts = [(request, count) for request, count in prompts.counts if request.keep_logprobs]
        num_new, rows, targets_of_rows, start = len(self._new), [*self._new.values()], list[int](), 0
        for request, count in prompts.counts:
            if request.keep_logprobs:
                rows += range(starts[-1] + start, starts[-1] + start + count)
                targets_of_rows += prompts.targets[start : start + count]
            start += count
        wanted = [request.params.logprobs or 0 for request in self._new]
        wanted += [request.params.prompt_logprobs or 0 for request, _ in self._counts]
        self._num_top, self._parts = max(wanted, default=0), list[tuple[Tensor, ...]]()
        if not wanted:
            return
        at, targets = upload([np.asarray(rows), np.asarray(targets_of_rows, dtype=np.int64)], logits.device)
        targets = torch.cat([tokens.index_select(0, at[:num_new]), targets])
        for part, target in zip(at.split(_MAX_ROWS), targets.split(_MAX_ROWS), strict=True):
            scored = _score(logits.index_select(0, part), target, self._num_top)
            self._parts.append(tuple(tensor.to("cpu", non_blocking=True) for tensor in scored))

    def give(self) -> None:
        """Append each request's log probabilities, once the step is complete."""
        if not self._parts:
            return
        ids, values = (torch.cat(tensors).tolist() for tensors in zip(*self._parts, strict=True))
        entries = zip(ids, values, strict=True)
        for request, (own_ids, own_values) in zip(self._new, entries, strict=False):
            if not request.finish_reason:
                request.logprobs.append(_entry(own_ids, own_values, request.params.logprobs or 0))
        for request, count in self._counts:
            for _, (own_ids, own_values) in zip(range(count), entries, strict=False):
                entry = _entry(own_ids, own_values, request.params.prompt_logprobs or 0)
                request.prompt_logprobs.append(entry)


def _score(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return token ids [n, 1 + num_top], targets first, then the best, the lowest of equal ones first; and their log
    probabilities, alike. A row's results do not depend on the other rows.
    """
    ids = targets[:, None]
    if num_top:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        keys = (ranks_of(logits) << _ID_BITS) + columns  # topk leaves the order of equal numbers open
        ids = torch.cat([ids, keys.topk(min(num_top, logits.shape[-1]), largest=False).indices], dim=-1)
    return ids, logits.gather(-1, ids) - log_sums(logits)


def _entry(ids: Sequence[int], values: Sequence[float], num_top: int) -> TokenLogprobs:
    return TokenLogprobs(ids[0], values[0], tuple(zip(ids[1 : 1 + num_top], values[1 : 1 + num_top], strict=True)))
