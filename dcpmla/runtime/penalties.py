"""Logits as a request wants them before a token is chosen: penalties of tokens that were there already, and min-p.

Sources: repetition penalty: CTRL (Keskar et al., 2019); presence and frequency penalties: OpenAI's API; min-p: Nguyen
et al., 2024.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.pending import PendingStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload

_MAX_ROWS = 64  # at once: [rows, vocab] of counts stays small compared with the logits of a large batch


def shape_logits(logits: Tensor, requests: Sequence[Request], previous: PendingStep | None) -> Tensor:
    """Return the logits that tokens are chosen from: the same tensor where no request asks for anything, else a copy.

    Args:
        logits: [n, vocab] float32.
        requests: [n].
        previous: the step under way, whose tokens the host does not know yet.
    """
    rows = [row for row, request in enumerate(requests) if request.params.shapes_logits]
    if not rows:
        return logits
    shaped = logits.clone()
    for start in range(0, len(rows), _MAX_ROWS):
        part = rows[start : start + _MAX_ROWS]
        own = [requests[row] for row in part]
        (at,) = upload([np.asarray(part)], logits.device)
        scores = logits.index_select(0, at)
        counts = _count(own, previous, scores)
        shaped.index_copy_(0, at, _shape(scores, own, counts, (counts > 0) | _in_prompts(own, scores)))
    return shaped


def _count(requests: Sequence[Request], previous: PendingStep | None, scores: Tensor) -> Tensor:
    """Count each new token of each request: return [n, vocab] float32."""
    new = [(row, token, count) for row, request in enumerate(requests) for token, count in request.token_counts.items()]
    rows, tokens, amounts = upload(_columns(new, 3), scores.device)
    counts = torch.zeros_like(scores).index_put_((rows, tokens), amounts.to(scores.dtype))
    in_flight = [(row, previous.rows[own]) for row, own in enumerate(requests) if previous and own.num_in_flight]
    if previous is not None and in_flight:
        rows, sources = upload(_columns(in_flight, 2), scores.device)
        tokens = previous.newest.index_select(0, sources)
        counts.index_put_((rows, tokens), counts.new_ones(()), accumulate=True)
    return counts


def _in_prompts(requests: Sequence[Request], scores: Tensor) -> Tensor:
    """Tell which tokens each request's prompt has: return [n, vocab] bool."""
    prompts = [request.prompt_vocabulary for request in requests]
    rows = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
    at, tokens = upload([rows, np.concatenate(prompts)], scores.device)
    seen = torch.zeros_like(scores, dtype=torch.bool)
    return seen.index_put_((at, tokens), seen.new_ones(()))


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    return list(np.array(rows, dtype=np.int64).reshape(-1, width).T.copy())


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
    """Return how far below the best logit a token may be."""
    return temperature * math.log(min_p) if min_p else -math.inf
