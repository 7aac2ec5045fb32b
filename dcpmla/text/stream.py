"""Incremental text of a request's tokens, up to a stop string."""

from collections.abc import Sequence
from typing import Protocol

from dcpmla.text.token_bytes import Decoder, Tokenizer


class _Params(Protocol):
    """The sampling parameters that texts depend on."""

    @property
    def stop(self) -> Sequence[str]: ...

    @property
    def min_tokens(self) -> int: ...

    @property
    def include_stop_str_in_output(self) -> bool: ...

    @property
    def skip_special_tokens(self) -> bool: ...


class TextStream:
    """The text of a request, in pieces as its tokens arrive.

    The pieces together are the text that new tokens add to the prompt's: decode(prompt + new), less the characters that
    the prompt completes. If the prompt ends inside a character, that character belongs to the new text, whole or
    broken. A stop string cuts the text; of stop strings that become complete with the same character the longest
    counts. Work per token does not grow with the text or the prompt.

    Args:
        params: Sampling parameters that the text depends on: stop strings, tokens that they may not end in, and whether
            the text includes what ends it, and special tokens.
        prompt_token_ids: Tokens before the text. Only the last few matter.
    Attributes:
        num_tokens: Number of tokens so far, at most up to the last token of a stop string.
        stop_string: Stop string that ended the text, "" before.

    Exact for decoders that only ever add to the text, incomplete characters aside. With byte fallback, a broken
    character takes back whole ones before it in the same run of bytes, and so does clean_up_tokenization_spaces; pieces
    are never taken back.
    """

    def __init__(self, tokenizer: Tokenizer, params: _Params, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decoder = Decoder(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stop, self._min_tokens = tuple(params.stop), params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._longest_start = max(map(len, self._stop), default=1) - 1
        self._num_exempt = 0  # characters of the held text that no stop string may end in
        self._held = ""
        self.num_tokens, self.stop_string = 0, ""

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string has ended the text."""
        return bool(self.stop_string)

    def push(self, token_ids: Sequence[int], offsets: list[int] | None = None) -> str:
        """Return new text that is certain: whole characters that are part of no stop string, and nothing after one.

        Args:
            offsets: List to which the offset of each token in the text is added, up to a stop string
                (`Decoder.offset`).
        """
        pieces: list[str] = []
        for token_id in () if self.is_stopped else token_ids:
            if offsets is not None:
                offsets.append(self._decoder.offset(token_id))
            self.num_tokens += 1
            pieces.append(self._take(self._decoder.push(token_id)) if self._stop else self._decoder.push(token_id))
            if self.is_stopped:
                break
        return "".join(pieces)

    def end(self, token_ids: Sequence[int], is_stop_token: bool, offsets: list[int] | None = None) -> str:
        """Return the text of a request's last tokens, after the text that was held back.

        Args:
            is_stop_token: Whether the last token ended the request by itself. It has no text then, unless the text
                includes what ends it.
            offsets: Argument of `push`.
        """
        num_shown = len(token_ids) - (is_stop_token and not self._includes_stop)
        text = self.push(token_ids[:num_shown], offsets)
        if self.is_stopped:
            return text
        if num_shown < len(token_ids):
            self.num_tokens += 1
            if offsets is not None:
                offsets.append(self._decoder.offset(token_ids[-1]))
        uncertain = self._held + self._decoder.finish()
        self._held = ""
        return text + self._cut(uncertain, is_end=True)

    def _take(self, new: str) -> str:
        """Return the part of the held text and of new text that is certain, where there are stop strings."""
        text = self._held + new
        if new and self.num_tokens <= self._min_tokens:
            self._num_exempt = len(text)
        return self._cut(text, is_end=False)

    def _cut(self, text: str, is_end: bool) -> str:
        """Return a text up to a stop string, and hold back the end that may begin one."""
        starts = [(text.find(stop, max(0, self._num_exempt + 1 - len(stop))), stop) for stop in self._stop]
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            end, start = min(ends)
            self.stop_string, num_given = text[start:end], end if self._includes_stop else start
        else:
            num_given = len(text) if is_end else len(text) - self._num_held(text)
        self._held = text[num_given:]
        self._num_exempt = max(0, self._num_exempt - num_given)
        return text[:num_given]

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string, and is not all of it."""
        lengths = range(min(len(text), self._longest_start), 0, -1)
        return next((num for num in lengths if any(stop[:-1].startswith(text[-num:]) for stop in self._stop)), 0)
