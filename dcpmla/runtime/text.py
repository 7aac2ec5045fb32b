"""Incremental text of token ids, up to a stop string, and the offset of each token in it."""

from collections.abc import Mapping, Sequence
from functools import cache
from os.path import commonprefix
from typing import Any, Protocol, Self

from dcpmla.runtime.sampling import SamplingParams

_REPLACEMENT = "\ufffd"  # decoding makes it of bytes that are no character, or not yet
_MAX_BYTES = 4  # a character has at most this many, each maybe a token
_CONTEXT = 8  # tokens kept before the new ones, at least a character's
_LONGEST = 4 * _CONTEXT  # tokens decoded at once


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the runtime uses."""

    def __call__(self, text: str) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """The text of a request, in pieces as its tokens arrive.

    The pieces together are the text that new tokens add to the prompt's: decode(prompt + new), less the characters that
    the prompt completes. If the prompt ends inside a character, that character belongs to the new text, whole or
    broken. A stop string cuts the text; of stop strings that become complete with the same character the longest
    counts. Work per token does not grow with the text or the prompt.

    Args:
        stop: Strings that end the text; no string is empty.
        prompt_token_ids: Tokens before the text. Only the last few matter.
        min_tokens: Number of first tokens that stop strings may not end in.
        includes_stop: Whether the text includes the stop string that ends it.
        skip_special_tokens: Whether the text is without special tokens.

    Exact for tokenizers that only ever add to the text, incomplete characters aside. A byte-fallback vocabulary takes
    text back when a broken character follows a whole one, and so does clean_up_tokenization_spaces; pieces are never
    taken back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = _Decoder(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop, self._includes_stop = tuple(stop), includes_stop
        self._num_exempt_tokens = min_tokens
        self._num_exempt = 0  # characters of the held text that no stop string may end in
        self._held = ""
        self._pieces: list[str] = []
        self.stopped, self.stop_string = False, ""  # the stop string that ended the text

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> Self:
        """Return the text that sampling parameters ask for."""
        return cls(
            tokenizer,
            params.stop,
            prompt_token_ids,
            min_tokens=params.min_tokens,
            includes_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return new text that is certain: whole characters that are part of no stop string, and nothing after one."""
        num_exempt, self._num_exempt_tokens = self._num_exempt_tokens, max(0, self._num_exempt_tokens - len(token_ids))
        exempt = "".join(self._decoder.push(token) for token in token_ids[:num_exempt])
        if exempt:
            self._num_exempt = len(self._held) + len(exempt)
        return self._give(exempt + "".join(self._decoder.push(token) for token in token_ids[num_exempt:]), is_end=False)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the request."""
        return self._give(self._decoder.finish(), is_end=True)

    def _give(self, new: str, is_end: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        starts = [(text.find(stop, max(0, self._num_exempt + 1 - len(stop))), stop) for stop in self._stop]
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            self.stopped, (end, start) = True, min(ends)
            self.stop_string, num_given = text[start:end], end if self._includes_stop else start
        else:
            num_given = len(text) if is_end else len(text) - self._num_held(text)
        self._held = text[num_given:]
        self._num_exempt = max(0, self._num_exempt - num_given)
        self._pieces.append(text[:num_given])
        return text[:num_given]

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string, and is not all of it."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next(
            (num for num in range(longest, 0, -1) if any(stop[:-1].startswith(text[-num:]) for stop in self._stop)), 0
        )


class TokenOffsets:
    """Offsets of tokens in `TextStream`'s text: the index of each token's first character.

    All tokens of a character have its offset; a special token has the next character's. An offset is never beyond the
    text's end. In a run of tokens that never become characters, each may have the offset of the first.

    Args:
        prompt_token_ids: Tokens before the text.
        start: Offset of the first token.
        skip_special_tokens: Whether the text is without special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        start: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = _Decoder(tokenizer, prompt_token_ids, skip_special_tokens)
        self._num_certain = start

    def push(self, token_id: int) -> int:
        """Return the offset of the next token."""
        uncertain = self._decoder.uncertain
        new = self._decoder.push(token_id)
        offset = self._num_certain + len(commonprefix([uncertain, new]))
        self._num_certain += len(new)
        return offset


def unfinished_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the decoded text of the incomplete character at the end, empty without one."""
    return _Decoder(tokenizer, token_ids).uncertain


def joins_words(tokenizer: Tokenizer) -> bool:
    """Return whether spaces that belong to no token join the texts of tokens: in fast tokenizers without a decoder.
    Vocabularies of whole words are an example.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and backend.decoder is None


class _Decoder:
    """Incremental decoding over a short window of tokens.

    A token's text depends on the tokens before it: a leading space is dropped at the start of a text, and a character
    may be cut into several tokens. So the window begins with tokens whose text is certain already, at first the
    prompt's, and only what follows that text is new.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._window: list[int] = [] if joins_words(tokenizer) else self._context(prompt_token_ids)
        self._text = self._decode(self._window)  # the window's
        self._num_given = self._num_finished()  # characters of it

    @property
    def uncertain(self) -> str:
        """The text of tokens that is not certain: replacement characters."""
        return self._text[self._num_given :]

    def push(self, token_id: int) -> str:
        """Return the text that the token makes certain."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._is_skipped(token_id):
            return ""  # a run of such tokens would fill the window
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
        new, self._num_given = self.uncertain, len(self._text)
        return new

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the prompt's last tokens that have a text, from a boundary of characters on if one is found."""
        visible: list[int] = []
        is_skipped = cache(self._is_skipped)  # a prompt may end with many of the same special tokens
        for token_id in reversed(prompt_token_ids):
            if len(visible) == _CONTEXT + _MAX_BYTES:
                break
            if not is_skipped(token_id):
                visible.insert(0, token_id)
        windows = [visible[-num_kept:] for num_kept in range(_CONTEXT, _CONTEXT + _MAX_BYTES)]
        for window in windows:
            if any(_REPLACEMENT not in self._decode(start) for start in _without_last(window)):
                return window
        return windows[0]

    def _num_finished(self) -> int:
        """Return the number of characters in the prompt's text that new tokens cannot change."""
        if not self._text.endswith(_REPLACEMENT):
            return len(self._text)
        num_compared = min(_MAX_BYTES - 1, len(self._window))
        if list(self._tokenizer(self._text)["input_ids"])[-num_compared:] == self._window[-num_compared:]:
            return len(self._text)  # an encoded text has no unfinished character: it ends with U+FFFD itself
        # Byte-fallback vocabularies break all bytes before an unfinished character as well.
        return max(len(self._decode(start).rstrip(_REPLACEMENT)) for start in _without_last(self._window))

    def _shorten(self) -> None:
        """Keep the last tokens, from a boundary of characters on. Unless bytes are broken, one of four neighbouring
        cuts is a boundary.
        """
        for num_kept in range(_CONTEXT, _CONTEXT + _MAX_BYTES):
            window = self._window[-num_kept:]
            text = self._decode(window)
            if self._text.endswith(text):
                break
        self._num_given += len(text) - len(self._text)
        self._window, self._text = window, text

    def _is_skipped(self, token_id: int) -> bool:
        """Return whether a token has no text. It is decoded twice, for a space may be dropped at the start."""
        return not self._decode([token_id, token_id])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _without_last(window: list[int]) -> list[list[int]]:
    """Return the window, and the window without its last one, two and three tokens."""
    return [window[: max(0, len(window) - num_cut)] for num_cut in range(_MAX_BYTES)]
