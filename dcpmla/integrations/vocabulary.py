"""The compressed vocabulary of n-grams' hashes: one id for all spellings of a word (`dcpmla.model.ngrams`)."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers

from dcpmla.integrations.tokenizer import load_tokenizer

# A token that is one space has this private letter as its text until spaces are stripped.
_LONE_SPACE = "\ue000"
_SPELLINGS = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
)


def compress_vocabulary(directory: Path) -> list[int]:
    """Return the compressed id of each token of a tokenizer: ids in order of first use, one for all tokens whose texts
    are alike without case, accents and space around them.
    """
    tokenizer, reason = load_tokenizer(directory)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        reason = reason or f"{type(tokenizer).__name__} is not one of the tokenizers library"
        raise ValueError(f"model (--model): {directory} has no tokenizer for its hashes of n-grams: {reason}")
    ids: dict[str, int] = {}
    return [ids.setdefault(_spelling(backend, token), len(ids)) for token in range(len(tokenizer))]


def _spelling(backend: Any, token: int) -> str:
    """Return the text that tokens of one compressed id share; for a part of a character the token's own name."""
    text: str = backend.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return str(backend.id_to_token(token))
    alike = _SPELLINGS.normalize_str(text)
    alike = _LONE_SPACE if alike == " " else alike
    # Training took a letter for the lone space, too, so a text with this letter has a space instead.
    return normalizers.Strip().normalize_str(alike).replace(_LONE_SPACE, " ") or text
