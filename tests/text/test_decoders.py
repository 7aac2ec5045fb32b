"""Texts of decoders that treat spaces in their own ways, against the tokenizer's own decode."""

from typing import Any

import pytest
from tokenizers import decoders

from dcpmla.integrations.tokenizer import load_tokenizer
from tests.support.small_tokenizers import SENTENCES, byte_fallback, metaspace, new_stream, word_piece

SPACES = decoders.Replace("▁", " ")
DECODERS: dict[str, tuple[Any, Any]] = {
    "no space is dropped": (byte_fallback, decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()])),
    "a first space stays": (metaspace, decoders.Metaspace(prepend_scheme="never")),
    "a space before the first word": (metaspace, decoders.Metaspace(prepend_scheme="first")),
    "pieces": (word_piece, decoders.WordPiece(cleanup=False)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_texts_are_what_the_decoder_makes(name: str) -> None:
    build, decoder = DECODERS[name]
    tokenizer = build()
    tokenizer.backend_tokenizer.decoder = decoder
    for text in [*SENTENCES, "  a", " ", "the"]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(min(len(token_ids), 4)):
            stream = new_stream(tokenizer)
            pieces = [stream.push([token]) for token in token_ids[start:]]
            whole = tokenizer.decode(token_ids[start:], skip_special_tokens=True)
            if "\ufffd" not in whole:
                assert "".join([*pieces, stream.end((), False)]) == whole


def test_a_decoder_that_is_not_known_is_refused(tmp_path: Any) -> None:
    """No text would be better than another text."""
    tokenizer = metaspace()
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    tokenizer.save_pretrained(tmp_path)
    loaded, reason = load_tokenizer(tmp_path)
    assert loaded is None
    assert "the tokenizer decodes" in reason
