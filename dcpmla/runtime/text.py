"""Text of token ids as they come, up to a stop string."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no character, or not yet
_CONTEXT = 8  # tokens kept before the new ones: at least the 4 that a character of 4 bytes may be cut into
_LONGEST = 4 * _CONTEXT  # tokens decoded at once


class Tokenizer(Protocol):
    """The part of a tokenizer that the runtime uses; each of transformers' has it."""

    def __call__(self, text: str) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """The text of a request, in pieces as its tokens come.

    The pieces together are the text of all tokens decoded at once without the special ones; or, once a stop string
    is complete, what comes before it. Of stop strings that become complete with the same character the longest counts.
    Work per token does not grow with the text.

    Args:
        stop: strings that end the text; no string is empty.

    Exact for tokenizers whose text, incomplete characters aside, is only ever added to. A byte-fallback vocabulary
    takes text back when a broken character follows a whole one, and so does clean_up_tokenization_spaces; what has been
    given out stays.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = _Decoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self._pieces: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return new text that is certain: whole characters that are part of no stop string, and nothing after one."""
        return self._give("".join(self._decoder.push(token) for token in token_ids), is_end=False)

    def finish(self) -> str:
        """Return what was held back, at the end of the request."""
        return self._give(self._decoder.finish(), is_end=True)

    def _give(self, new: str, is_end: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            num_given = min(ends)[1]
        else:
            num_given = len(text) if is_end else len(text) - self._num_held(text)
        self._held = text[num_given:]
        self._pieces.append(text[:num_given])
        return text[:num_given]

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=0))
        return next(
            (num for num in range(longest, 0, -1) if any(stop.startswith(text[-num:]) for stop in self._stop)), 0
        )


class _Decoder:
    """Incremental decoding over a short window of the last tokens.

    A token's text depends on those before it: a leading space is dropped at the start of a text, and a character
    may be cut into several tokens. So the window begins with tokens whose text has been given out already, and only
    what comes after that text is new.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_given = 0  # characters of it

    def push(self, token_id: int) -> str:
        """Return the text that the token makes certain."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._is_skipped(token_id):
            return ""  # or a run of them would fill the window
        self._window.append(token_id)
        self._text = text
        num_certain = len(text.rstrip(_REPLACEMENT))
        is_full, is_whole = len(self._window) == _LONGEST, num_certain == len(text)
        if is_full and not is_whole:
            num_certain = len(text) - 1  # these bytes never become characters; the last may still begin one
        new = text[self._num_given : num_certain]
        self._num_given = max(self._num_given, num_certain)
        if is_full or (is_whole and len(self._window) >= 2 * _CONTEXT):
            self._shorten()
        return new

    def finish(self) -> str:
        """Return the text that was not certain."""
        new, self._num_given = self._text[self._num_given :], len(self._text)
        return new

    def _shorten(self) -> None:
        """Keep the last tokens, from a boundary of characters on: one of four neighbouring cuts is one, where bytes are
        characters at all.
        """
        for num_kept in range(_CONTEXT, _CONTEXT + 4):
            window = self._window[-num_kept:]
            text = self._decode(window)
            if self._text.endswith(text):
                break
        self._num_given += len(text) - len(self._text)
        self._window, self._text = window, text

    def _is_skipped(self, token_id: int) -> bool:
        """Tell whether a token is special or unknown. It is decoded twice, for a space may be dropped at the start."""
        return not self._decode([token_id, token_id])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
