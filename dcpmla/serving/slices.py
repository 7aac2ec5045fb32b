"""JSON text of answers in slices, so that the event loop runs between them."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dcpmla.serving.errors import ApiError

MAX_ENTRIES = 1 << 20  # log probabilities of an answer
SLICE = 1 << 16  # characters
_NUM_NUMBERS = 1 << 12  # integers of a list that are written at once


class Each:
    """A list of an answer whose items are made when they are written.

    Args:
        make: Function of a small item of the list, called once for each source, in their order.
    """

    def __init__(self, make: Callable[[Any], object], sources: Sequence[Any]) -> None:
        self._make, self._sources = make, sources

    def __iter__(self) -> Iterator[object]:
        return map(self._make, self._sources)


def slices(value: object) -> Iterator[str]:
    """Yield the JSON text of a value in slices of about `SLICE` characters."""
    texts: list[str] = []
    length = 0
    for text in _texts(value):
        texts.append(text)
        length += len(text)
        if length >= SLICE:
            yield "".join(texts)
            texts, length = [], 0
    if texts:
        yield "".join(texts)


def check_entries(num_prompt: int, prompt_logprobs: int | None, num_new: int, logprobs: int | None) -> int:
    """Return the number of log probabilities of an answer.

    Args:
        num_prompt: Number of prompt tokens that the answer has log probabilities of, over all choices.
        prompt_logprobs: Alternatives of each prompt token, None without log probabilities.
        num_new: Maximum number of new tokens that are collected, over all choices.
        logprobs: Alternatives of each of them, None without log probabilities.
    Raises:
        ApiError: They are more than one answer may have.
    """
    of_prompt = 0 if prompt_logprobs is None else num_prompt * (1 + prompt_logprobs)
    of_new = 0 if logprobs is None else num_new * (1 + logprobs)
    if of_prompt + of_new > MAX_ENTRIES:
        words = (
            f"prompt_logprobs and echo ask for {of_prompt:,} log probabilities, logprobs with max_tokens and n for "
            f"{of_new:,} (tokens x (1 + alternatives)); together at most {MAX_ENTRIES:,} are served"
        )
        raise ApiError(400, words, param="prompt_logprobs" if of_prompt > of_new else "logprobs")
    return of_prompt + of_new


def _texts(value: object) -> Iterator[str]:
    """Yield the JSON text of a value in small pieces, without recursion."""
    pending: list[Iterator[Any]] = [iter([value])]
    while pending:
        found = next(pending[-1], pending)
        if found is pending:
            pending.pop()
        elif isinstance(found, _Text):
            yield found
        elif isinstance(found, dict):
            pending.append(_entries(((f"{_dumps(key)}:", each) for key, each in found.items()), "{}"))
        elif isinstance(found, list) and len(found) > _NUM_NUMBERS and isinstance(found[0], int):
            parts = [found[start : start + _NUM_NUMBERS] for start in range(0, len(found), _NUM_NUMBERS)]
            pending.append(_items(_Text(_dumps(part)[1:-1]) for part in parts))
        elif isinstance(found, list):
            pending.append(_items(found))
        elif isinstance(found, Each):
            pending.append(_items(_Text(_dumps(item)) for item in found))
        elif isinstance(found, str) and len(found) > SLICE:
            yield '"'
            yield from (_dumps(found[start : start + SLICE])[1:-1] for start in range(0, len(found), SLICE))
            yield '"'
        else:
            yield _dumps(found)


class _Text(str):
    """JSON text."""


def _items(values: Iterable[Any]) -> Iterator[Any]:
    return _entries((("", each) for each in values), "[]")


def _entries(values: Iterable[tuple[str, Any]], brackets: str) -> Iterator[Any]:
    """Yield values in brackets, each after its key."""
    before = brackets[0]
    for key, each in values:
        yield _Text(before + key)
        yield each
        before = ","
    yield _Text(brackets[1] if before == "," else brackets)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
