"""A model's tokenizer, as tokenizer.json defines it. Kimi's, which otherwise needs the checkpoint's code, is built from
its data files.
"""

import json
import re
from base64 import b64decode
from importlib import metadata
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import processors
from transformers.convert_slow_tokenizer import TikTokenConverter

from dcpmla.extras import install
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.text.stream import TextStream

_JINJA2 = (3, 1, 6)  # the first release whose sandbox has no known escape
_KIMI_MODEL_TYPES = ("kimi_k2", "kimi_k25", "kimi_linear", "kimi_k3")
_NUM_SPECIAL_TOKENS = 256  # after the ranks, named or not
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Kimi cuts a text into these pieces before it makes tokens: pat_str in tokenization_kimi.py. transformers' converter
# uses Llama-3's pattern, which would give other tokens.
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
_PROBES = (  # encoded and decoded at load
    "hello world",
    "  two  spaces, a\ttab\nand lines\n\n",
    "don't stop . now , please !",
    "Größe, naïve café, ΑΒΓ",
    "你好，世界。日本語 한국어",
    "3.14 and 1234567890",
    "🦊 👩‍👩‍👧 🇯🇵",
)


def check_template_sandbox() -> None:
    """Raise ValueError unless jinja2, whose sandbox runs chat templates of checkpoints, is recent enough."""
    try:
        version = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        version = "missing"
    numbers = re.match(r"(\d+)\.(\d+)\.?(\d*)", version)
    if numbers is None or tuple(int(number or 0) for number in numbers.groups()) < _JINJA2:
        raise ValueError(
            f"jinja2 is {version}; it must be 3.1.6 or later, because the chat templates of checkpoints can run code "
            f"through the sandbox of earlier ones: {install('serve')}"
        )


def silence_transformers() -> None:
    """Turn transformers' progress bars and notes off, from here on."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def load_tokenizer(directory: Path) -> tuple[Any, str]:
    """Load the model's tokenizer.

    Returns:
        The tokenizer and "", or None and the reason: there is none, it is broken, it needs the checkpoint's own code,
        it differs from tokenizer.json, or `TextStream` makes another text of its tokens than its own decoder.
    """
    try:
        if _is_kimi(directory):
            tokenizer = _load_kimi(directory)
        elif (directory / "tokenizer.json").exists():
            tokenizer = _load_file(directory)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        _check_texts(tokenizer)
        return tokenizer, ""
    except Exception as error:  # the reader of a broken tokenizer.json raises exceptions of many kinds
        return None, f"{type(error).__name__}: {error}"


def _load_file(directory: Path) -> Any:
    """Load tokenizer.json, with the special tokens and chat template of tokenizer_config.json.

    tokenizer_class is ignored: checkpoints name LlamaTokenizer over a ByteLevel file, and transformers' class of that
    name replaces its pre-tokenizer and decoder by Metaspace, so that spaces are lost. Text is not cleaned up after
    decoding ("a ." would become "a."), as in vLLM's streams.

    Raises:
        ValueError: The tokenizer differs from tokenizer.json, or a token to add has no name.
    """
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        str(directory), clean_up_tokenization_spaces=False, trust_remote_code=False
    )
    _check_probes(tokenizer, directory / "tokenizer.json")
    _add_ends(tokenizer, _read_json(directory / "tokenizer_config.json"))
    return tokenizer


def _check_probes(tokenizer: Any, path: Path) -> None:
    """Raise ValueError unless the tokenizer encodes and decodes the probes as tokenizer.json does."""
    own = tokenizers.Tokenizer.from_file(str(path))
    own.no_padding()
    own.no_truncation()
    for probe in _PROBES:
        expected = own.encode(probe, add_special_tokens=False).ids
        token_ids = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        if token_ids != expected:
            raise ValueError(f"transformers encodes {probe!r} as {token_ids}; {path} itself as {expected}")
        if (text := tokenizer.decode(token_ids)) != (own_text := own.decode(expected, skip_special_tokens=False)):
            raise ValueError(f"transformers decodes {token_ids} as {text!r}; {path} itself as {own_text!r}")


def _check_texts(tokenizer: Any) -> None:
    """Raise ValueError unless `TextStream` and the tokenizer make the same text of each probe's tokens."""
    for probe in _PROBES:
        token_ids = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        text = TextStream(tokenizer, SamplingParams()).end(token_ids, is_stop_token=False)
        if text != (expected := tokenizer.decode(token_ids, skip_special_tokens=True)):
            raise ValueError(f"the texts of tokens {token_ids} make {text!r}; the tokenizer decodes {expected!r}")


def _add_ends(tokenizer: Any, settings: dict[str, Any]) -> None:
    """Add the first and last token that the settings ask for, unless tokenizer.json adds them.

    transformers 4 followed add_bos_token and add_eos_token; transformers 5, and vLLM with it, ignores them if
    there is a tokenizer.json. A model trained with a first token is worse without it. `false` removes nothing:
    tokenizer.json decides, as in transformers 5.

    Raises:
        ValueError: The settings name no such token.
    """
    for name in ("bos_token", "eos_token"):
        if settings.get(f"add_{name}") and getattr(tokenizer, name) is None:
            raise ValueError(f"tokenizer_config.json sets add_{name}, but names no {name}")
    whole, text = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (True, False))
    start = next(start for start in range(len(whole) + 1) if whole[start : start + len(text)] == text)
    first, last = whole[:start], whole[start + len(text) :]
    if settings.get("add_bos_token") and first[:1] != [tokenizer.bos_token_id]:
        first = [tokenizer.bos_token_id, *first]
    if settings.get("add_eos_token") and last[-1:] != [tokenizer.eos_token_id]:
        last = [*last, tokenizer.eos_token_id]
    if [*first, *text, *last] != whole:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(f"{token}t:0" for token in first), "$A:0", *(f"{token}t:0" for token in last)],
            special_tokens=[
                {"id": f"{token}t", "ids": [token], "tokens": [tokenizer.convert_ids_to_tokens(token)]}
                for token in {*first, *last}
            ],
        )


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
    """Return whether the directory holds Kimi's ranks and no tokenizer.json."""
    if not (directory / "tiktoken.model").exists() or (directory / "tokenizer.json").exists():
        return False
    code = _read_json(directory / "tokenizer_config.json").get("auto_map")
    model_type = _read_json(directory / "config.json").get("model_type")
    return model_type in _KIMI_MODEL_TYPES or "tokenization_kimi." in str(code)


def _load_kimi(directory: Path) -> Any:
    """Build the tokenizer that tokenization_kimi.py would, as one of transformers' fast ones.

    Raises:
        ValueError: The ranks cannot be read, or the special tokens' ids do not follow them.
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
    if len(tokenizer) != num_ranks + _NUM_SPECIAL_TOKENS:  # transformers adds missing tokens at the end
        raise ValueError(
            f"{directory}: tiktoken.model has {num_ranks:,} ranks; the special tokens of tokenizer_config.json must "
            f"have the ids {num_ranks} to {num_ranks + _NUM_SPECIAL_TOKENS - 1}"
        )
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, empty if it does not exist."""
    return dict(json.loads(path.read_bytes())) if path.exists() else {}
