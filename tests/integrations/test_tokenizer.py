"""Kimi's tokenizer from a small checkpoint's files, against tiktoken with the same ranks."""

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dcpmla.integrations.tokenizer import load_tokenizer
from tests.support.launchers import ROOT

PATTERN = "|".join(  # the published pattern, in full
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
TEXTS = [
    "",
    "The quick brown fox doesn't jump; it's LAZY, they'LL say. I'd've thought we're done",
    "getHTTPResponseCode XMLHttpRequest aB Ab ABc iOS macOS don'T",
    "你好，世界。模型的注意力缓存分布在多个设备上。",
    "用Python写的KVCache在GPU上跑，版本是3.14，共163840个token",
    "mixed中文English混排 ひらがなとカタカナと漢字 한국어 々〇",
    "1 22 333 4444 55555 3.14159 ½ Ⅷ ١٢٣٤",
    "def f(x):\n    return  x  +  1\n\n\n\t# tab \r\n\r\n  trailing   ",
    "emoji 🦊🐻, family 👩‍👩‍👧, flags 🇰🇪🇯🇵 ✈️!!!\n...",
    "naïve café – déjà vu, Ǆ ǅ ǆ, ʰˢ, ﬁ, a\u0301, हिन्दी, العربية, K, it'ſ",
    "\u3000全角 空格\u00a0nbsp\u2028line\u0085next\ufeffbom\x00nul \ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaa 的的的的的的的的的 !!!!!!!! ========\n\n\n\n\n\n",
    "[PAD] almost: [BOS <|im_user|<|im_end|>> <|reserved_token_1|>",
]
NAMED = {  # offset from the first id after the ranks -> token, and whether it is special
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    17: ("<|im_middle|>", True),
    22: ("<think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
TEMPLATE = (
    "{% for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "你好"}]
RENDERED = "<|im_user|>user<|im_middle|>你好<|im_end|><|im_assistant|>assistant<|im_middle|>"


def train_ranks() -> dict[bytes, int]:
    """Return ranks of a small byte-level BPE over pieces of the pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    lines = [*TEXTS[:-1] * 3, *(ROOT / "README.md").read_text().splitlines()]
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return {bytes(byte_of[letter] for letter in token): rank for token, rank in tokenizer.get_vocab().items()}


RANKS = train_ranks()
FIRST = len(RANKS)  # id after the ranks
SPECIAL = {NAMED.get(num, (f"<|reserved_token_{FIRST + num}|>",))[0]: FIRST + num for num in range(256)}
ORACLE = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=SPECIAL)


def save(directory: Path, model_type: str = "kimi_k2", **settings: Any) -> Path:
    """Write a checkpoint's files around the ranks; settings go into tokenizer_config.json."""
    lines = [b"%s %d\n" % (b64encode(token), rank) for token, rank in sorted(RANKS.items(), key=lambda item: item[1])]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    names = {str(FIRST + num): {"content": token, "special": special} for num, (token, special) in NAMED.items()}
    roles = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    fields = {"added_tokens_decoder": names, "tokenizer_class": "TikTokenTokenizer", **roles, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def load(directory: Path) -> Any:
    tokenizer, reason = load_tokenizer(directory)
    assert tokenizer is not None, reason
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(save(tmp_path_factory.mktemp("kimi"), chat_template=TEMPLATE))


def expect_ids(text: str) -> list[int]:
    return ORACLE.encode(text, allowed_special="all")


def texts() -> st.SearchStrategy[str]:
    """Draw any characters, the texts' own ones, special tokens, and runs of each."""
    characters = st.characters(exclude_categories=["Cs"]) | st.sampled_from("".join(TEXTS))
    pieces = characters | st.sampled_from([*TEXTS, *SPECIAL, "'s", "'LL", "\r\n", "  ", "aA", "中a"])
    return st.lists(st.builds(str.__mul__, pieces, st.sampled_from([1, 1, 1, 2, 9])), max_size=12).map("".join)


@given(text=texts())
def test_ids_and_text_are_tiktokens(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == expect_ids(text)
    assert tokenizer(text)["input_ids"] == token_ids
    assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_hand_picked_texts(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == expect_ids(text)
    assert tokenizer.decode(token_ids) == text


@given(token_ids=st.lists(st.integers(0, FIRST + 255), max_size=30))
def test_text_of_any_tokens(tokenizer: Any, token_ids: list[int]) -> None:
    """Characters cut anywhere, too."""
    assert tokenizer.decode(token_ids) == ORACLE.decode(token_ids)


def test_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == FIRST + 256
    for token, token_id in SPECIAL.items():
        assert tokenizer.encode(token) == [token_id]
        assert tokenizer.convert_ids_to_tokens(token_id) == token
    special = {FIRST + num for num, (_, is_special) in NAMED.items() if is_special}
    assert set(tokenizer.all_special_ids) == special
    assert tokenizer.decode(list(special), skip_special_tokens=True) == ""
    assert tokenizer.decode([FIRST + 11, FIRST + 22], skip_special_tokens=True) == "<|tool_calls_section_begin|><think>"
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert roles == (FIRST, FIRST + 1, FIRST + 254, FIRST + 255)


@pytest.mark.parametrize("in_a_file", [False, True])
def test_chat_template(tmp_path: Path, in_a_file: bool) -> None:
    save(tmp_path, chat_template="of tokenizer_config.json" if in_a_file else TEMPLATE)
    if in_a_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == RENDERED
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"] == expect_ids(RENDERED)


def test_no_chat_template(tmp_path: Path) -> None:
    """Kimi-K3's prompts are texts with special tokens, which code of its checkpoint writes."""
    tokenizer = load(save(tmp_path, "kimi_k3"))
    assert tokenizer.chat_template is None
    assert tokenizer(RENDERED)["input_ids"] == expect_ids(RENDERED)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: [b"<html> 0", *lines], "tiktoken.model is no file of tiktoken's ranks"),
        (lambda lines: [*lines, b"YQ=="], "tiktoken.model is no file of tiktoken's ranks"),
        (lambda lines: [*lines, b"YQ== many"], "tiktoken.model is no file of tiktoken's ranks"),
        (lambda lines: lines[:-1], rf"has {FIRST - 1} ranks; the special tokens .* ids {FIRST - 1} to {FIRST + 254}"),
        (lambda lines: [], "has 0 ranks"),
    ],
    ids=["html", "half a line", "no number", "cut off", "empty"],
)
def test_broken_ranks(tmp_path: Path, change: Any, expected: str) -> None:
    path = save(tmp_path) / "tiktoken.model"
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    tokenizer, reason = load_tokenizer(tmp_path)
    assert tokenizer is None
    assert re.match(f"ValueError: .*{expected}", reason)


def test_broken_settings(tmp_path: Path) -> None:
    assert load_tokenizer(save(tmp_path, eos_token="[END]"))[0] is None  # a token without an id
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path) == (None, "KeyError: 'added_tokens_decoder'")
