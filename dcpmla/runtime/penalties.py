"""Changes of logits before a token is chosen: biases, no early end, penalties of previous tokens, min-p.

Sources: repetition penalty: CTRL (Keskar et al., 2019); presence and frequency penalties: OpenAI's API; min-p: Nguyen
et al., 2024.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload

_MAX_ROWS = 64  # rows at once: [rows, vocab] of counts stays small compared with the logits of a large batch
_IN_PROMPT, _NEW = 1, 2  # an entry is 2 x (how often a token is new) + (whether the prompt has it)


class Penalties:
    """Penalties of requests, whose tokens are counted on the device.

    A step uploads only the tokens that became known on the host since the step before it. A request has a row of the
    counts until it finishes, preempted or not. Row 0 stays empty and serves requests without penalties.

    Args:
        eos_token_ids: End-of-sequence tokens, which are not chosen before `SamplingParams.min_tokens`.
    """

    def __init__(self, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._eos_token_ids = eos_token_ids
        self._counts = torch.empty(0)  # [rows, vocab] int32, allocated when a request needs it
        self._free: list[int] = []  # rows without a request
        self._rows: dict[Request, int] = {}
        self._num_counted: dict[Request, int] = {}  # request -> new tokens that its row includes

    def shape_logits(self, logits: Tensor, requests: Sequence[Request], previous: InFlightStep | None) -> Tensor:
        """Return the logits to choose tokens from: the same tensor if no request changes them, else a copy.

        Args:
            logits: Logits [n, vocab] float32.
            requests: Requests of the rows [n].
            previous: The step under way, whose tokens the host does not know yet.
        """
        rows = [row for row, request in enumerate(requests) if request.params.shapes_logits or request.is_short]
        if not rows:
            return logits
        self._update([request for request in requests if request.params.has_penalties], logits)
        shaped = logits.clone()
        for start in range(0, len(rows), _MAX_ROWS):
            part = rows[start : start + _MAX_ROWS]
            own = [requests[row] for row in part]
            in_flight = [row for row, request in enumerate(own) if previous and request.num_in_flight]
            sources = [previous.rows[own[row]] for row in in_flight] if previous else []
            columns = part, [self._rows.get(request, 0) for request in own], in_flight, sources
            at, counted, at_new, sources_there = upload([_indices(column) for column in columns], logits.device)
            counts = self._counts.index_select(0, counted)
            if previous is not None and in_flight:
                tokens = previous.newest.index_select(0, sources_there)
                counts.index_put_((at_new, tokens), counts.new_full((), _NEW), accumulate=True)
            scores = self._add_biases(logits.index_select(0, at), own)
            shaped.index_copy_(0, at, _shape(scores, own, (counts >> 1).to(scores.dtype), counts > 0))
        return shaped

    def _add_biases(self, scores: Tensor, requests: Sequence[Request]) -> Tensor:
        """Add the biases of requests to their scores [n, vocab], and -inf to tokens that would end one too early."""
        vocab_size, entries, numbers = scores.shape[-1], list[Any](), list[Any]()
        for row, request in enumerate(requests):
            ids, biases = request.params.biases
            entries.append(ids + row * vocab_size)
            numbers.append(biases)
            if request.is_short and request.params.grammar is None:  # masks of grammars know what else may follow
                ends = self._eos_token_ids.union(request.params.stop_token_ids)
                entries.append(_indices([row * vocab_size + token for token in ends if token < vocab_size]))
                numbers.append(np.full(len(entries[-1]), -math.inf, dtype=np.float32))
        if any(map(len, entries)):
            entries_there, numbers_there = upload([np.concatenate(entries), np.concatenate(numbers)], scores.device)
            scores.view(-1).index_add_(0, entries_there, numbers_there.to(scores.dtype))
        return scores

    def _update(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Count all known tokens of requests with penalties."""
        joining = [request for request in requests if request not in self._rows]
        if joining or not len(self._counts):
            self._add_rows(joining, logits)
        vocab_size, new = logits.shape[-1], list[int]()
        for request in requests:
            start = self._rows[request] * vocab_size
            new += [start + token for token in request.token_ids[self._num_counted[request] :]]
            self._num_counted[request] = len(request.token_ids)
        (entries,) = upload([_indices(new)], logits.device)
        counts = self._counts.view(-1)
        counts.index_put_((entries,), counts.new_full((), _NEW), accumulate=True)

    def _add_rows(self, joining: Sequence[Request], logits: Tensor) -> None:
        """Set the rows of joining requests to the tokens of their prompts. Finished requests give up theirs first."""
        for request in [request for request in self._rows if request.finish_reason]:
            self._free.append(self._rows.pop(request))
            del self._num_counted[request]
        num_rows, vocab_size = 1 + len(self._rows) + len(joining), logits.shape[-1]
        if num_rows > (num_before := len(self._counts)):
            grown = logits.new_zeros(max(num_rows, 2 * num_before), vocab_size, dtype=torch.int32)
            grown[:num_before] = self._counts.view(num_before, vocab_size)
            self._free += range(max(1, num_before), len(grown))
            self._counts = grown
        entries = [np.empty(0, dtype=np.int64)]
        for request in joining:
            self._rows[request], self._num_counted[request] = self._free.pop(), 0
            entries.append(_indices(request.prompt_token_ids) + self._rows[request] * vocab_size)
        rows = [self._rows[request] for request in joining]
        rows_there, entries_there = upload([_indices(rows), np.concatenate(entries)], logits.device)
        self._counts.index_fill_(0, rows_there, 0)
        self._counts.view(-1).index_fill_(0, entries_there, _IN_PROMPT)


def _indices(numbers: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def _shape(scores: Tensor, requests: Sequence[Request], counts: Tensor, seen: Tensor) -> Tensor:
    """Return penalized scores, with -inf for tokens that min-p leaves out."""
    params = [request.params for request in requests]
    columns = [
        (own.repetition_penalty, own.frequency_penalty, own.presence_penalty, _lowest(own.temperature, own.min_p))
        for own in params
    ]
    (numbers,) = upload([np.array(columns, dtype=np.float32)], scores.device)
    repetition, frequency, presence, lowest = numbers.split(1, dim=-1)
    scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores = scores - frequency * counts - presence * (counts > 0)
    return scores.where(scores - scores.amax(-1, keepdim=True) >= lowest, -torch.inf)


def _lowest(temperature: float, min_p: float) -> float:
    """Return the lowest allowed difference of a token's logit from the best one."""
    return temperature * math.log(min_p) if min_p else -math.inf
