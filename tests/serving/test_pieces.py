"""Pieces of prompts: together they have the tokens of the whole text, and those seen before are not tokenized again."""

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dcpmla.serving.background import Background, Prepared
from dcpmla.serving.chats import Chats
from dcpmla.serving.conversation import Conversation
from dcpmla.serving.messages import Started
from dcpmla.serving.pieces import Borders, KnownPieces
from dcpmla.serving.prompts import Texts
from tests.support.launchers import ROOT
from tests.support.small_tokenizers import FAMILIES, SENTENCES, byte_level, tokenizer_of
from tests.support.workers import worker_of

CHAT = AutoTokenizer.from_pretrained(ROOT / "examples" / "chat" / "model")
# A token in the middle of another, one that begins as another, and neighbours that could join.
OVERLAPPING = ["<a>", "<a><b>", "<b>", "<b>c", "b><a", "\n\n"]


def with_added(*added: str | AddedToken) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(each, normalized=False) if isinstance(each, str) else each for each in added])
    return tokenizer


def whole(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


OVERLAP = with_added(*OVERLAPPING)
NORMALIZED = with_added("<a>", AddedToken("a<", normalized=True), AddedToken("<a><b>", normalized=True))


@given(st.lists(st.sampled_from([*OVERLAPPING, "<", "a", "b>", ">", " ", "é", "don't", "<eos>", "世", "\n", "12"])))
@pytest.mark.parametrize("tokenizer", [OVERLAP, NORMALIZED, tokenizer_of("byte_level")])
def test_pieces_have_the_tokens_of_the_text(tokenizer: Any, parts: list[str]) -> None:
    text = "".join(parts)
    pieces = Borders(tokenizer).split(text)
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in whole(tokenizer, piece)] == whole(tokenizer, text)


@pytest.mark.parametrize("name", [*FAMILIES, "chat"])
def test_a_tokenizer_has_certain_borders_or_none(name: str) -> None:
    tokenizer = CHAT if name == "chat" else tokenizer_of(name)
    control = tokenizer.added_tokens_decoder.values()
    text = "".join(f"{sentence}{token} {token}{sentence}" for sentence in SENTENCES for token in map(str, control))
    pieces = Borders(tokenizer).split(text)
    assert [token for piece in pieces for token in whole(tokenizer, piece)] == whole(tokenizer, text)
    assert (len(pieces) > 1) == (name in ("byte_level", "straddling", "chat"))


def changed(**steps: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    for name, step in steps.items():
        setattr(tokenizer.backend_tokenizer, name, step)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
        changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits()])),
        changed(normalizer=normalizers.Prepend("_")),
        changed(encode_special_tokens=True),
        with_added(AddedToken("<l>", normalized=False, lstrip=True)),
        with_added(AddedToken("<r>", normalized=False, rstrip=True)),
        with_added(AddedToken("<w>", normalized=False, single_word=True)),
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(dropout=0.5)), eos_token="<eos>"),
        None,
    ],
)
def test_uncertain_tokenizers_have_no_borders(tokenizer: Any) -> None:
    assert Borders(tokenizer).split("a<eos>b<pad>") == ["a<eos>b<pad>"]


def test_a_post_processor_does_not_matter() -> None:
    """Without special tokens it adds none."""
    template = processors.TemplateProcessing(single="<eos> $A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer = changed(post_processor=template, normalizer=normalizers.NFC())
    text = "e\u0301<eos>b"
    assert [token for piece in Borders(tokenizer).split(text) for token in whole(tokenizer, piece)] == whole(
        tokenizer, text
    )


def test_the_least_recently_used_pieces_are_forgotten() -> None:
    known = KnownPieces(1000)
    for piece in ("one", "two", "three"):  # Each has 330 bytes with its tokens.
        known.add(piece, [*range(50)])
    assert known.find(["one", "four"]).keys() == {"one"}
    known.add("four", [*range(50)])
    assert known.find(["one", "two", "three", "four"]).keys() == {"one", "three", "four"}
    known.add("five", [5])
    assert known.find(["one", "three", "five"]).keys() == {"three", "five"}
    assert known.find(["three"])["three"].tolist() == [*range(50)]


class Recorded(Texts):
    """Texts that note what is tokenized."""

    def __init__(self, background: Background) -> None:
        super().__init__(background)
        self.sent: list[Any] = []

    async def _run(self, param: str, size: int, function: Any, *args: Any) -> Any:
        self.sent.append(args[0])
        return await super()._run(param, size, function, *args)


@pytest.mark.parametrize("is_long", [False, True])
def test_a_turn_tokenizes_what_is_new(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of the whole text, in a thread and in a child, also after a change of an earlier message."""
    model = Started("", len(CHAT), 1 << 16, 4, 1 << 16, no_grammars="not of all of them")
    background = Background(Prepared(model, CHAT), worker_of(CHAT))
    if is_long:
        monkeypatch.setattr(background, "_small", 0)
    monkeypatch.setattr("dcpmla.serving.chats.Texts", Recorded)
    chats = Chats(background.prepared, background=background)
    texts: Any = chats._texts
    messages: list[dict[str, Any]] = [{"role": "user", "content": "add 3, 4 <|user|> and 5"}]
    asked = []

    async def ask() -> None:
        prompt = await chats.prompt(Conversation([*messages]))
        pieces = re.sub(r"(?<=<)\|user\|>(?= and)", "\ufdd0|user|>", prompt.text).split("\ufdd0")
        assert prompt.token_ids.tolist() == [token for piece in pieces for token in whole(CHAT, piece)]
        asked.append([piece for pieces in texts.sent for piece in pieces])
        texts.sent.clear()

    async def turns() -> None:
        await ask()
        messages.extend([{"role": "assistant", "content": "12"}, {"role": "user", "content": "and twice that?"}])
        await ask()
        messages[1]["content"] = "13"
        await ask()
        await ask()

    asyncio.run(turns())
    assert asked[1:] == [["12", "<eos>", "and twice that?"], ["13"], []]


def test_special_tokens_are_added_to_the_whole_text() -> None:
    """A tokenizer may add some to the end, so borders are not used."""
    template = processors.TemplateProcessing(single="<tool> $A <tool>", special_tokens=[("<tool>", 2)])
    tokenizer = changed(post_processor=template)
    tokenizer.chat_template = "{{ messages[0].content }}<eos>"
    background = Background(Prepared(Started("", 400, 99, 4, 99), tokenizer), worker_of(tokenizer))
    prompt = Chats(background.prepared, background=background).prompt(
        Conversation([{"role": "system", "content": "a<pad>b"}]), add_special_tokens=True
    )
    assert asyncio.run(prompt).token_ids.tolist() == tokenizer("a<pad>b<eos>")["input_ids"]
