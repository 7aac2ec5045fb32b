"""A model's tokenizer; Kimi's, which transformers reads with the checkpoint's own code only, from its data files."""

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import transformers
from transformers.convert_slow_tokenizer import TikTokenConverter

_KIMI_MODEL_TYPES = ("kimi_k2", "kimi_k25")
_NUM_SPECIAL_TOKENS = 256  # after the ranks, named or not
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Kimi's pieces of a text, each of which becomes tokens of its own: pat_str in tokenization_kimi.py. Llama-3's, the
# pattern of transformers' converter, would give other tokens.
_KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def load_tokenizer(directory: Path) -> tuple[Any, str]:
    """Load the model's tokenizer; or give None, and why it does not load (none there, broken, or one that needs the
    checkpoint's own code).
    """
    try:
        if _is_kimi(directory):
            return _load_kimi(directory), ""
        return transformers.AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False), ""
    except Exception as error:  # a broken tokenizer.json raises whatever its reader stumbled over
        return None, f"{type(error).__name__}: {error}"


class _RankConverter(TikTokenConverter):
    """transformers' converter, which here reads the ranks without package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(path: Path) -> dict[bytes, int]:
        """Return the rank of each token's bytes, from lines of base64 and a number."""
        fields = path.read_bytes().split()
        try:
            tokens = [b64decode(field, validate=True) for field in fields[::2]]
            return dict(zip(tokens, map(int, fields[1::2]), strict=True))
        except ValueError as error:
            raise ValueError(f"{path} is no file of tiktoken's ranks: {error}") from error


def _is_kimi(directory: Path) -> bool:
    """Tell whether the directory holds Kimi's ranks and no tokenizer.json."""
    if not (directory / "tiktoken.model").exists() or (directory / "tokenizer.json").exists():
        return False
    code = _read_json(directory / "tokenizer_config.json").get("auto_map")
    model_type = _read_json(directory / "config.json").get("model_type")
    return model_type in _KIMI_MODEL_TYPES or "tokenization_kimi." in str(code)


def _load_kimi(directory: Path) -> Any:
    """Build the tokenizer that tokenization_kimi.py would, as one of transformers' fast ones.

    Raises:
        ValueError: ranks that cannot be read, or that leave no room for the special tokens' ids.
    """
    settings = _read_json(directory / "tokenizer_config.json")
    backend = _RankConverter(directory / "tiktoken.model", _KIMI_PATTERN).converted()
    num_ranks = backend.get_vocab_size()
    named = {int(token_id): token for token_id, token in settings["added_tokens_decoder"].items()}
    added = []
    for token_id in range(num_ranks, num_ranks + _NUM_SPECIAL_TOKENS):  # tokens get ids in this order
        token = named.get(token_id, {"content": f"<|reserved_token_{token_id}|>"})
        special = token.get("special", False)  # skipped in an answer's text; <think> and tool calls are not
        added.append(transformers.AddedToken(token["content"], normalized=False, special=special))
    backend.add_tokens(added)
    template = directory / "chat_template.jinja"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{name: settings.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
        extra_special_tokens=[token["content"] for token in named.values() if token.get("special")],
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text("utf-8") if template.exists() else settings.get("chat_template"),
    )
    if len(tokenizer) != num_ranks + _NUM_SPECIAL_TOKENS:  # transformers adds those that it misses at the end
        raise ValueError(
            f"{directory}: tiktoken.model has {num_ranks:,} ranks; the special tokens of tokenizer_config.json must "
            f"have the ids {num_ranks} to {num_ranks + _NUM_SPECIAL_TOKENS - 1}"
        )
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return what a file says, nothing where there is none."""
    return dict(json.loads(path.read_bytes())) if path.exists() else {}
