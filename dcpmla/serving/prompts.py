"""Prompts of API requests -> token ids, and back: the tokenizer, off the event loop."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dcpmla.runtime.prompts import check_prompt
from dcpmla.serving.background import Background, Prepared
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Started
from dcpmla.serving.pieces import KnownPieces
from dcpmla.serving.worker import Allowance, LimitError
from dcpmla.text.token_bytes import bytes_of, offsets_of, unfinished_end

_CHARACTERS = 64  # a token's average in the longest text that is encoded
_ENCODED = 1 << 18  # characters a second of a slow tokenizer; common ones are faster
_DECODED = 16  # characters that are encoded while a token is decoded; decoding holds the interpreter's lock, too
_BYTES = 512  # limit of memory, and of an answer's length, for each character or token


@dataclass(frozen=True)
class Prompt:
    """A prompt that the model can continue.

    Attributes:
        token_ids: int32.
        text: Text of the request, or the whole characters of its tokens.
        offsets: Index of each token's first character in the text; empty unless the text is wanted.
        in_reasoning: Whether the prompt opens the reasoning, so that the answer begins inside it.
        may_reason: Whether the answer may open a reasoning itself.
    """

    token_ids: "array[int]"
    text: str
    offsets: Sequence[int] = ()
    in_reasoning: bool = False
    may_reason: bool = False


class Texts:
    """The model's tokenizer, as the API uses it.

    Raises:
        ApiError: No tokenizer; every method raises it.
    """

    def __init__(self, background: Background) -> None:
        self._background, self._model = background, background.prepared.model
        self._tokens: dict[int, str] = {}
        self._known = KnownPieces()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        prepared = self._background.prepared
        if prepared.tokenizer is None:
            words = f"the model's tokenizer does not load ({prepared.no_tokenizer}); give prompts as token ids"
            raise ApiError(400, words, param="prompt")
        return prepared.tokenizer

    async def prompt(
        self, content: str | list[int], wants_text: bool, add_special_tokens: bool = True, num_kept: int | None = None
    ) -> Prompt:
        """Return a prompt of a completion, with its text and offsets if they are wanted.

        Args:
            num_kept: Number of its last tokens to keep, None for all.
        Raises:
            ApiError: The model cannot continue the prompt.
        """
        if isinstance(content, str):
            prompt = await self.encoded([content], add_special_tokens, num_kept)
        else:
            prompt = self._checked(content, "", num_kept)
        if not wants_text:
            return prompt
        size = max(len(prompt.text), _DECODED * len(prompt.token_ids))
        args = prompt.token_ids.tolist(), prompt.text, add_special_tokens
        text, offsets = await self._run("prompt", size, _with_offsets, *args)
        return Prompt(prompt.token_ids, text, offsets)

    async def _run(self, param: str, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns for the model and arguments (`Background.run`)."""
        assert self.tokenizer is not None  # without one, the property raises ApiError
        seconds = 1 + size / _ENCODED
        allowance = Allowance(seconds, 20 * seconds, (512 << 20) + _BYTES * size, (1 << 20) + _BYTES * size)
        try:
            return await self._background.run(size, allowance, function, *args)
        except LimitError as error:
            raise ApiError(400, f"{param}: {error} in the tokenizer", param=param) from error

    async def encoded(self, pieces: Sequence[str], add_special_tokens: bool, num_kept: int | None) -> Prompt:
        """Return a prompt of a text.

        Args:
            pieces: Pieces of the text, which have no token in common.
            num_kept: Number of its last tokens to keep, None for all.
        Raises:
            ApiError: The model cannot continue the prompt.
        """
        return self._checked(await self.encode(pieces, add_special_tokens), "".join(pieces), num_kept)

    async def encode(self, pieces: Sequence[str], add_special_tokens: bool = True) -> "array[int]":
        """Return the tokens of a text in pieces, int32. If no special tokens are added, pieces that were seen before
        are not tokenized again.

        Raises:
            ApiError: The text is too long for any vocabulary.
        """
        longest = _CHARACTERS * self._model.max_model_len
        length = sum(map(len, pieces))
        if length > longest:
            raise _too_long(f"{length} characters > {longest} maximum")
        if add_special_tokens or len(pieces) == 1:
            return array("i", await self._run("prompt", length, _encode, pieces, add_special_tokens))
        known = self._known.find(pieces)
        new = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        encoded = await self._run("prompt", sum(map(len, new)), _encode_each, new) if new else []
        known |= {piece: self._known.add(piece, tokens) for piece, tokens in zip(new, encoded, strict=True)}
        token_ids = array("i")
        for piece in pieces:
            token_ids += known[piece]
        return token_ids

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens.

        Raises:
            ApiError: The model does not have a token.
        """
        vocab_size = self._model.vocab_size
        ends = (min(token_ids), max(token_ids)) if token_ids else ()
        outside = [token for token in ends if not 0 <= token < vocab_size]
        if outside:
            words = f"token id {outside[0]} is outside the model's vocabulary, [0, {vocab_size})"
            raise ApiError(400, words, param="tokens")
        text: str = await self._run("tokens", _DECODED * len(token_ids), _decode, token_ids)
        return text

    def token(self, token_id: int) -> str:
        """Return the text of one token inside a text, where a leading space is not dropped."""
        if token_id not in self._tokens:
            text: str = self.tokenizer.decode([token_id])
            twice = self.tokenizer.decode([token_id] * 2)
            if twice == f"{text} {text}" and not bytes_of(self.tokenizer).joins_words:
                text = f" {text}"
            self._tokens[token_id] = text
        return self._tokens[token_id]

    def _checked(self, token_ids: "list[int] | array[int]", text: str, num_kept: int | None) -> Prompt:
        if num_kept is not None and len(token_ids) > num_kept:
            token_ids, text = token_ids[-num_kept:], ""
        check_tokens(self._model, token_ids)
        return Prompt(array("i", token_ids), text)


def check_tokens(model: Started, token_ids: Sequence[int]) -> None:
    """Raise ApiError if the model cannot continue a prompt."""
    longest = model.max_model_len - 1  # leaves room for a new token
    if len(token_ids) > longest:
        raise _too_long(f"{len(token_ids)} tokens > {longest} maximum with --max-model-len {model.max_model_len}")
    try:
        check_prompt("the prompt", token_ids, model.vocab_size, model.max_model_len)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from error


def _too_long(words: str) -> ApiError:
    """Return the error of a prompt that is too long. Agents know it by its code or its words, which are those of
    Anthropic's API, and then shorten the conversation.
    """
    return ApiError(400, f"prompt is too long: {words}", param="prompt", code="context_length_exceeded")


def _encode_each(prepared: Prepared, pieces: Sequence[str]) -> list[list[int]]:
    return [_encode(prepared, [piece], add_special_tokens=False) for piece in pieces]


def _encode(prepared: Prepared, pieces: Sequence[str], add_special_tokens: bool) -> list[int]:
    if len(pieces) > 1:  # The first piece gets special tokens, if any are added.
        parts = (_encode(prepared, [piece], add_special_tokens and not index) for index, piece in enumerate(pieces))
        return list(chain.from_iterable(parts))
    tokenizer = prepared.tokenizer
    if tokenizer.is_fast and tokenizer.backend_tokenizer.truncation is tokenizer.backend_tokenizer.padding is None:
        # Computing the offsets of tokens, which are not needed, would take most of the time.
        (encoded,) = tokenizer.backend_tokenizer.encode_batch_fast(pieces, add_special_tokens=add_special_tokens)
        return list(encoded.ids)
    return list(tokenizer(pieces[0], add_special_tokens=add_special_tokens)["input_ids"])


def _decode(prepared: Prepared, token_ids: list[int]) -> str:
    text: str = prepared.tokenizer.decode(token_ids)
    return text


def _with_offsets(
    prepared: Prepared, token_ids: list[int], text: str, add_special_tokens: bool
) -> tuple[str, list[int]]:
    """Return a prompt's text, which may be given, and the offsets of its tokens."""
    tokenizer = prepared.tokenizer
    if text and tokenizer.is_fast:
        return text, _offsets(tokenizer(text, return_offsets_mapping=True, add_special_tokens=add_special_tokens))
    if not text:
        text = tokenizer.decode(token_ids).removesuffix(unfinished_end(tokenizer, token_ids))
    return text, [min(offset, len(text)) for offset in offsets_of(tokenizer, token_ids)]


def _offsets(encoded: Any) -> list[int]:
    """Return the offset of each token: its first character, or the previous token's end if spaces separate them."""
    offsets: list[int] = []
    end = 0
    for start, stop in encoded["offset_mapping"]:
        is_added = start == stop  # a special token that the text does not contain
        offsets.append(max(end if is_added else min(start, end), offsets[-1] if offsets else 0))
        end = max(end, stop)
    return offsets
