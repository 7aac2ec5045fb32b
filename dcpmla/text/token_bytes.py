"""Bytes of tokens, as the decoder of a tokenizer joins them to a text."""

import codecs
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

_MAX_BYTES = 4  # UTF-8 has no longer characters.
_BYTES_ALONE = "dcpmla.bytes_alone"
# Letters of GPT-2's byte vocabulary: bytes that print are their own letters, the others follow from U+0100 on.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """Replace every byte that is part of no character, as decoders with byte fallback do."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_BYTES_ALONE, _replace_each)


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that texts need."""

    def __call__(self, text: str) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TokenBytes(dict[int, bytes]):
    """The bytes of each token inside a text; found when a token is first asked for.

    The decoders of `tokenizers` that it knows are ByteLevel, Metaspace, WordPiece, and sequences of Replace,
    ByteFallback, Fuse and Strip; a backend without one joins words with spaces. Of a tokenizer without a backend, a
    token has the bytes of its decoded text.

    Attributes:
        special: Ids of special tokens, which a text may leave out.
        joins_words: Whether spaces that belong to no token join the texts of tokens.
        errors: Name of the handler of bytes that are part of no character (`codecs.register_error`).
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer, self._backend = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(self._backend, "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        parts = {each["type"]: each for each in state.get("decoders", [state]) if each}
        self._is_byte_level, self._is_word_piece = "ByteLevel" in parts, "WordPiece" in parts
        self._has_bytes = "ByteFallback" in parts
        self.errors = _BYTES_ALONE if self._has_bytes else "replace"
        self.joins_words = self._backend is not None and decoder is None
        space = parts.get("Metaspace")
        self._space: str = "" if space is None else space["replacement"]
        self._drops_spaces = space is not None and space["prepend_scheme"] != "never"
        replaced = parts.get("Replace", {"pattern": {}})
        self._replaced = replaced["pattern"].get("String"), replaced.get("content", "")
        strip = parts.get("Strip", {"content": " ", "start": int(self.joins_words)})
        self._stripped = (strip["content"] * strip["start"]).encode()
        added = {} if self._backend is None else self._backend.get_added_tokens_decoder()
        self.special = frozenset(token for token, each in added.items() if each.special)

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = own = self._find(self._name(token_id), token_id)
        return own

    def first(self, token_id: int) -> bytes:
        """Return a token's bytes at the beginning of a text, where decoders drop a space."""
        name = self._name(token_id) if self._is_word_piece or self._drops_spaces else None
        if name is None:
            return self[token_id].removeprefix(self._stripped)
        return name.encode() if self._is_word_piece else name.replace(self._space, "").encode()

    def _name(self, token_id: int) -> str | None:
        return None if self._backend is None else self._backend.id_to_token(token_id)

    def _find(self, name: str | None, token_id: int) -> bytes:
        if self._backend is None:
            return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()
        if name is None:
            return b""
        if self._is_byte_level:
            is_spelled = all(letter in _BYTE_OF_LETTER for letter in name)  # An added token may have other letters.
            return bytes(map(_BYTE_OF_LETTER.__getitem__, name)) if is_spelled else name.encode()
        if self._has_bytes and len(name) == 6 and name.startswith("<0x"):
            return bytes.fromhex(name[3:5])
        if self._is_word_piece:
            return (name[2:] if name.startswith("##") else f" {name}").encode()
        pattern, content = (self._space, " ") if self._space else self._replaced
        text = name.replace(pattern, content) if pattern else name
        return f" {text}".encode() if self.joins_words else text.encode()


_known: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def bytes_of(tokenizer: Any) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens."""
    if tokenizer not in _known:
        _known[tokenizer] = TokenBytes(tokenizer)
    return _known[tokenizer]


class Decoder:
    """Incremental decoding of the tokens after a prompt. Only the prompt's last characters matter.

    Args:
        skip_special_tokens: Whether special tokens have no text.
    Attributes:
        num_certain: Characters of the tokens so far that later tokens cannot change.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._bytes = bytes_of(tokenizer)
        self._skipped = self._bytes.special if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._bytes.errors)
        self.num_certain, before = 0, b""
        for token_id in reversed(() if self._bytes.joins_words else prompt_token_ids):
            before = self._own(token_id) + before
            if len(before) >= _MAX_BYTES:
                break
        self._utf8.decode(before)
        self._is_first = not before

    @property
    def uncertain(self) -> str:
        """Return the text of bytes that are no character yet, as it is if no other byte follows."""
        pending = self._utf8.getstate()[0]
        return pending.decode(errors=self._bytes.errors) if pending else ""

    def push(self, token_id: int) -> str:
        """Return the text that a token makes certain."""
        own = self._own(token_id)
        if self._is_first and own:
            own, self._is_first = self._bytes.first(token_id), False
        new = self._utf8.decode(own)
        self.num_certain += len(new)
        return new

    def offset(self, token_id: int) -> int:
        """Return the index of the first character of the next token: tokens of a character all have its index, and a
        token without text has the next character's.
        """
        own = self._own(token_id)
        continues = not own or 0x80 <= own[0] < 0xC0
        return self.num_certain if continues else self.num_certain + len(self.uncertain)

    def finish(self) -> str:
        """Return the text that was not certain."""
        text = self.uncertain
        self._utf8.reset()
        self.num_certain += len(text)
        return text

    def _own(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._bytes[token_id]


def unfinished_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the decoded text of the incomplete character at the end, empty without one."""
    return Decoder(tokenizer, token_ids).uncertain


def offsets_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return the index of each token's first character in the text, special tokens included (`Decoder.offset`)."""
    decoder, offsets = Decoder(tokenizer, skip_special_tokens=False), list[int]()
    for token_id in token_ids:
        offsets.append(decoder.offset(token_id))
        decoder.push(token_id)
    return offsets
