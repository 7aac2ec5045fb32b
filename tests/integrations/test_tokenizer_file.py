"""Tokenizers whose checkpoint has a tokenizer.json: the file decides, settings add tokens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, processors
from transformers import PreTrainedTokenizerFast

from dcpmla.integrations.tokenizer import load_tokenizer
from tests.integrations.test_tokenizer import MESSAGES, RENDERED, TEMPLATE, TEXTS, load, save
from tests.support import small_tokenizers


def byte_level() -> Tokenizer:
    """As DeepSeek's and Kimi's files; no token is added to a text."""
    tokenizer = small_tokenizers.byte_level().backend_tokenizer
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama-2's files: spaces are letters, and one is added before a text."""
    tokenizer = small_tokenizers.metaspace().backend_tokenizer
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


BOS, EOS = "<｜begin of: sentence｜>", "</s>"
FAMILIES = ["deepseek_v3", "kimi_k2", "axk1", "longcat_flash", "glm_moe_dsa", "mistral4", "youtu", "sarvam_mla_moe"]


def save_file(directory: Path, tokenizer: Tokenizer, model_type: str = "kimi_k2", **settings: Any) -> Path:
    """Write a checkpoint's files around tokenizer.json; settings go into tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"bos_token": BOS, "eos_token": EOS, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("build", [byte_level, metaspace])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokenizer_json_decides(tmp_path: Path, model_type: str, tokenizer_class: str | None, build: Any) -> None:
    """Whatever class tokenizer_config.json names; older versions of it ask for a clean-up of texts, too."""
    own = build()
    save_file(
        tmp_path,
        own,
        model_type,
        tokenizer_class=tokenizer_class,
        clean_up_tokenization_spaces=True,
        chat_template=TEMPLATE,
    )
    tokenizer = load(tmp_path)
    for text in ["hello world", "a b . c", *TEXTS]:
        token_ids = tokenizer.encode(text)
        assert token_ids == own.encode(text).ids
        assert tokenizer.decode(token_ids) == own.decode(token_ids, skip_special_tokens=False)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == RENDERED
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == (BOS, own.token_to_id(EOS))


@pytest.mark.parametrize("build", [byte_level, metaspace])
@pytest.mark.parametrize("adds_eos", [False, True, None])
@pytest.mark.parametrize("adds_bos", [False, True, None])
@pytest.mark.parametrize("present", ["", "bos", "bos, eos"])
def test_first_and_last_token(
    tmp_path: Path, build: Any, present: str, adds_bos: bool | None, adds_eos: bool | None
) -> None:
    """Each is added once if the settings or tokenizer.json ask for it."""
    own = build()
    bos, eos = own.token_to_id(BOS), own.token_to_id(EOS)
    if present:
        single = ["bos:0", "$A:0", "eos:0"] if "eos" in present else ["bos:0", "$A:0"]
        tokens = [{"id": "bos", "ids": [bos], "tokens": [BOS]}, {"id": "eos", "ids": [eos], "tokens": [EOS]}]
        own.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    flags: dict[str, Any] = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    save_file(tmp_path, own, **{name: flag for name, flag in flags.items() if flag is not None})
    tokenizer = load(tmp_path)
    plain = own.encode("a b", add_special_tokens=False).ids
    first = [bos] * bool(adds_bos or "bos" in present)
    last = [eos] * bool(adds_eos or "eos" in present)
    assert tokenizer("a b")["input_ids"] == [*first, *plain, *last]
    assert tokenizer("a b", add_special_tokens=False)["input_ids"] == plain
    assert tokenizer.decode([*first, *plain, *last], skip_special_tokens=True) == "a b"


def test_a_token_to_add_that_has_no_name(tmp_path: Path) -> None:
    save_file(tmp_path, byte_level(), add_bos_token=True, bos_token=None)
    expected = "ValueError: tokenizer_config.json sets add_bos_token, but names no bos_token"
    assert load_tokenizer(tmp_path) == (None, expected)


def test_a_tokenizer_that_differs_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' class for Llama over a ByteLevel file is one."""
    save_file(tmp_path, byte_level())
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=metaspace())
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", lambda *args, **options: other)
        tokenizer, reason = load_tokenizer(tmp_path)
    assert tokenizer is None
    assert re.fullmatch(r"ValueError: transformers encodes 'hello world' as .*tokenizer.json itself as .*", reason)
    lossy = byte_level()
    lossy.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", left=1, right=0)])
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=lossy)
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", lambda *args, **options: other)
    assert re.match("ValueError: transformers decodes .*", load_tokenizer(tmp_path)[1])


CODE = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


@pytest.mark.parametrize(
    ("model_type", "auto_map", "is_kimi"),
    [
        ("kimi_k2", {}, True),
        ("kimi_k25", CODE, True),
        ("kimi_linear", {}, True),
        ("kimi_k3", {}, True),
        ("deepseek_v3", CODE, True),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}, False),
    ],
)
def test_whose_pattern_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, auto_map: dict[str, Any], is_kimi: bool
) -> None:
    other, given = PreTrainedTokenizerFast(tokenizer_object=byte_level()), list[dict[str, Any]]()
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **options: given.append(options) or other
    )
    save(tmp_path, model_type, auto_map=auto_map)
    loaded, reason = load_tokenizer(tmp_path)
    assert reason == ""
    assert is_kimi == (loaded is not other)
    assert given == [{"trust_remote_code": False}] * (not is_kimi)
    byte_level().save(str(tmp_path / "tokenizer.json"))  # now this file decides
    assert load(tmp_path).encode("!") == byte_level().encode("!").ids
