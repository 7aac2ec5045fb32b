"""Pieces of prompts, tokenized once: most of a conversation's next turn was in the turns before it."""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from sys import getsizeof
from typing import Any

from dcpmla.serving.control_tokens import pattern_of

_KEPT_BYTES = 1 << 28  # A conversation of a million tokens has about ten million.
_MOST_PIECES = 1 << 16  # of a text
_NORMALIZERS = {"Sequence", "NFC"}
_PRE_TOKENIZERS = {"Sequence", "Split", "ByteLevel", "Digits", "Punctuation"}


class Borders:
    """The control tokens at which a tokenizer certainly ends one token of a text and begins the next.

    The library `tokenizers` searches a text for added tokens first, before it normalizes or divides anything: for the
    leftmost, and of several there for the longest. It encodes each part between added tokens by itself. So the tokens
    of a text are the tokens of its parts, unless a step depends on a part's position, as Metaspace does. Tokenizers
    with other steps than the byte-level BPE of most models have no borders here.

    Args:
        tokenizer: Tokenizer of transformers; None without one.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._pattern: re.Pattern[str] | None = None
        if backend is None or not _divides_by_itself(backend):
            return
        added = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
        if added and not any(token.single_word or token.lstrip or token.rstrip for token in added):
            self._pattern = re.compile(f"({pattern_of([token.content for token in added])})")

    def split(self, text: str) -> list[str]:
        """Return a text in pieces, each control token one of its own; together they have the tokens of the text."""
        if self._pattern is None:
            return [text]
        return [piece for piece in self._pattern.split(text, _MOST_PIECES) if piece]


def _divides_by_itself(backend: Any) -> bool:
    """Return whether a tokenizer of `tokenizers` encodes each part of a text as if it were alone."""
    steps = [*_types(backend.normalizer)], [*_types(backend.pre_tokenizer)]
    return (
        type(backend.model).__name__ == "BPE"
        and not backend.model.dropout
        and not backend.encode_special_tokens
        and set(steps[0]) <= _NORMALIZERS
        and set(steps[1]) <= _PRE_TOKENIZERS
    )


def _types(step: Any) -> Iterable[str]:
    """Yield the types of a normalizer or pre-tokenizer and of its parts."""
    pending = [] if step is None else [json.loads(step.__getstate__())]
    while pending:
        state = pending.pop()
        yield state["type"]
        pending += state.get("pretokenizers", []) + state.get("normalizers", [])


class KnownPieces:
    """The tokens of pieces of text, of those used last.

    Args:
        num_bytes: Limit of their memory.
    """

    def __init__(self, num_bytes: int = _KEPT_BYTES) -> None:
        self._limit, self._num_bytes = num_bytes, 0
        self._tokens: OrderedDict[str, array[int]] = OrderedDict()  # the least recently used first

    def find(self, pieces: Iterable[str]) -> "dict[str, array[int]]":
        """Return the tokens of the pieces that are known."""
        found = {piece: self._tokens[piece] for piece in pieces if piece in self._tokens}
        for piece in found:
            self._tokens.move_to_end(piece)
        return found

    def add(self, piece: str, token_ids: Sequence[int]) -> "array[int]":
        """Keep the tokens of a piece, and return them."""
        tokens = array("i", token_ids)
        if piece not in self._tokens:
            self._tokens[piece] = tokens
            self._num_bytes += getsizeof(piece) + getsizeof(tokens)
        while self._num_bytes > self._limit:
            oldest = self._tokens.popitem(last=False)
            self._num_bytes -= sum(map(getsizeof, oldest))
        return tokens
