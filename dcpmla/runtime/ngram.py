"""Drafts by prompt lookup on the device: the tokens that followed an earlier occurrence of the last tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcpmla.runtime.drafts import NO_DRAFT, Drafter, Drafts
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload, upload_once

_SHORTEST, _LONGEST = 3, 8  # tokens that a match must have, and that are compared at most
_ID_BITS = 21  # bits per token id
_TRIGRAM_MASK = (1 << _SHORTEST * _ID_BITS) - 1


class NgramDrafter(Drafter):
    """Drafts from a request's own tokens, of its prompt and new ones; no weights. For texts that repeat the prompt:
    code, quotations, answers from documents.

    Source: Saxena, Prompt Lookup Decoding.
    """

    reads_tokens = False

    def __init__(self, num_speculative_tokens: int, device: torch.device) -> None:
        super().__init__(num_speculative_tokens)
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()
        self._texts_there = Texts.empty(0, 0, device)  # a row for each request that drafts
        self._nothing = torch.zeros(1, dtype=torch.int64, device=device)

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        """Guess that the longest match of the last tokens, the latest of the longest, goes on as it did."""
        nums = [num for _, num in wanted]
        drafting = [request for request, num in wanted if num]
        if not drafting:
            return Drafts(nums, torch.zeros(0, dtype=torch.int64))
        texts = [self._text(request) for request in drafting]
        self._reserve(texts, max(request.max_seq_len for request in drafting) + 1 + self.num_speculative_tokens)
        self._write(drafting, texts)
        orders = tuple(_order(request, text, previous) for request, text in zip(drafting, texts, strict=True))
        orders_there = upload_once(orders, self._nothing.device)
        sampled = num_accepted = self._nothing
        if previous is not None:
            sampled = previous.message.tokens
            num_accepted = num_accepted if previous.verified is None else previous.verified.num_accepted
        found = lookup(self._texts_there, orders_there, sampled, num_accepted, self.num_speculative_tokens).flatten()
        wants = [num for num in nums if num]
        if min(wants) < self.num_speculative_tokens:
            at = [row * self.num_speculative_tokens + index for row, num in enumerate(wants) for index in range(num)]
            found = found.index_select(0, upload([np.array(at)], found.device)[0])
        return Drafts(nums, found)

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return requests whose known tokens have a match. A token under way is ignored: the match likely continues."""
        return [request for request in requests if request.num_new_tokens and self._has_match(request)]

    def _text(self, request: Request) -> "_Text":
        if request not in self._texts:
            self._texts[request] = _Text(request.prompt_token_ids)
        return self._texts[request]

    def _has_match(self, request: Request) -> bool:
        text = self._text(request)
        if text.num_seen < request.num_known_tokens:
            text.extend(request.tokens(text.num_seen, request.num_known_tokens))
        return text.has_match

    def _write(self, drafting: Sequence[Request], texts: Sequence["_Text"]) -> None:
        """Write the known tokens of requests that the device does not have."""
        for text in texts:
            if text.under_way is not None:
                num_accepted, row = text.under_way
                text.num_written += 1 + num_accepted[row]
                text.under_way = None
        lacking = [
            (_tokens_from(text.num_written, request), text)
            for request, text in zip(drafting, texts, strict=True)
            if text.num_written < request.num_known_tokens
        ]
        if not lacking:
            return
        there = upload([tokens for tokens, _ in lacking], self._nothing.device)
        for (tokens, text), part in zip(lacking, there, strict=True):
            end = text.num_written + len(tokens)
            self._texts_there.token_ids[text.row, text.num_written : end] = part
            self._texts_there.lengths[text.row] = text.num_written = end

    def _reserve(self, texts: Sequence["_Text"], width: int) -> None:
        """Reserve a row of `width` tokens for each text."""
        num_rows, num_columns = self._texts_there.token_ids.shape
        if width <= num_columns and all(text.row >= 0 for text in texts):
            return
        used = {text.row for request, text in self._texts.items() if not request.finish_reason}
        free = (row for row in range(len(used) + len(texts)) if row not in used)
        for text in texts:
            if text.row < 0:
                text.row = next(free)
        shape = max(num_rows, 1 + max(text.row for text in texts)), max(num_columns, width)
        if shape != (num_rows, num_columns):
            larger = Texts.empty(*shape, self._nothing.device)
            larger.token_ids[:num_rows, :num_columns] = self._texts_there.token_ids
            larger.lengths[:num_rows] = self._texts_there.lengths
            self._texts_there = larger


class Texts(NamedTuple):
    """The known tokens of requests on the device.

    Attributes:
        token_ids: [rows, width] int32.
        lengths: [rows] int64, number of tokens in each row.
        best, arrived: [rows] int64 and int32, state of a running lookup; -1 and 0 otherwise.
    """

    token_ids: Tensor
    lengths: Tensor
    best: Tensor
    arrived: Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> Self:
        """Return texts of no tokens."""
        token_ids = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(token_ids, lengths, torch.full_like(lengths, -1), torch.zeros_like(lengths, dtype=torch.int32))


class _Text:
    """The index of a request's known tokens, and their location on the device.

    Attributes:
        num_seen: Number of tokens in the index.
        has_match: Whether the last three indexed tokens occurred before.
        row, num_written: Row in the device's texts, -1 for none, and number of tokens written to it.
        under_way: `InFlightStep.num_accepted` and the request's row of a step whose tokens were written while it was
            under way. The step itself would keep the request alive.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.row, self.num_written = -1, 0
        self.under_way: tuple[list[int], int] | None = None
        # A trigram is three tokens as one number. Those of a prompt are sorted, because a set of a million takes ten
        # times the seconds and the memory.
        token_ids = np.asarray(prompt, dtype=np.int64)
        trigrams = token_ids[:-2] << 2 * _ID_BITS | token_ids[1:-1] << _ID_BITS | token_ids[2:]
        self.has_match = len(trigrams) > 0 and bool((trigrams[:-1] == trigrams[-1]).any())
        self._prompt_trigrams = np.sort(trigrams).data
        self._trigrams: set[int] = set()  # that end in new tokens
        self.num_seen, self._trigram = len(prompt), 0  # the last tokens, of which the next trigram needs two
        for token in prompt[-2:]:
            self._trigram = self._trigram << _ID_BITS | token

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append new tokens, at least one."""
        for token in token_ids:
            self._trigram = (self._trigram << _ID_BITS | token) & _TRIGRAM_MASK
            self.num_seen += 1
            if self.num_seen >= _SHORTEST:
                self.has_match = self._trigram in self._trigrams or self._is_in_prompt(self._trigram)
                self._trigrams.add(self._trigram)

    def _is_in_prompt(self, trigram: int) -> bool:
        at = bisect_left(self._prompt_trigrams, trigram)
        return at < len(self._prompt_trigrams) and self._prompt_trigrams[at] == trigram


def _tokens_from(start: int, request: Request) -> npt.NDArray[np.int32]:
    """Return a request's known tokens from a position on."""
    prompt = request.prompt_token_ids
    parts = prompt[start:], request.token_ids[max(0, start - len(prompt)) :]
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def _order(request: Request, text: _Text, previous: InFlightStep | None) -> tuple[int, ...]:
    """Return a request's numbers for `lookup`, which writes its tokens under way."""
    if previous is None or not request.num_in_flight:
        return text.row, 0, 0, -1
    row = previous.rows[request]
    text.under_way = previous.num_accepted, row
    return text.row, previous.starts[row], 1 + request.num_tried, -1 if previous.verified is None else row


def lookup(texts: Texts, orders: Tensor, sampled: Tensor, num_accepted: Tensor, num_wanted: int) -> Tensor:
    """Append tokens under way to texts, and look up the continuations of the last ones: on a GPU by a kernel, which
    documents arguments and results.
    """
    if orders.is_cuda:
        from dcpmla.runtime.kernels import lookup as kernels  # triton exists on Linux only

        return kernels.lookup(texts, orders, sampled, num_accepted, num_wanted, _SHORTEST, _LONGEST)
    found = []
    for row, start, num_sampled, verified in orders.tolist():
        token_ids, length = texts.token_ids[row], int(texts.lengths[row])
        token_ids[length : length + num_sampled] = sampled[start : start + num_sampled]
        length += (num_sampled > 0) + (int(num_accepted[verified]) if verified >= 0 else 0)
        texts.lengths[row] = length
        found.append(find_following(token_ids[:length], num_wanted))
    return torch.stack(found)


def find_following(text: Tensor, num_wanted: int) -> Tensor:
    """Look up the tokens that followed an earlier occurrence of a text's last tokens: the longest match, and the latest
    among equal ones. A continuation that reaches the end repeats.

    Args:
        text: [length] integers, at least one.
    Returns:
        [num_wanted] int64; `NO_DRAFT` without a match of 3 tokens.
    """
    windows = torch.nn.functional.pad(text.long(), (_LONGEST - 1, 0), value=NO_DRAFT).unfold(0, _LONGEST, 1)
    is_same = ((windows[:-1] == windows[-1]) & (windows[-1] >= 0)).flip(-1)  # the last token first
    num_same = is_same.cumprod(-1).sum(-1)
    longest = int(num_same.max()) if len(num_same) else 0
    if longest < _SHORTEST:
        return torch.full((num_wanted,), NO_DRAFT)
    end = int((num_same == longest).nonzero()[-1])
    return text.long()[end + 1 + torch.arange(num_wanted) % (len(text) - 1 - end)]
