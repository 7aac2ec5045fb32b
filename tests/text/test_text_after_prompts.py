"""Text of new tokens after a prompt, and offsets of tokens in it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.small_tokenizers import FAMILIES as ALL_FAMILIES
from tests.support.small_tokenizers import SPECIAL, ids_of_bytes, new_stream, tokenizer_of
from tests.text.test_stream import cut_at_stop, streamed, texts, token_ids_of, whole

FAMILIES = [family for family in ALL_FAMILIES if family != "word_level"]


def answer(family: str, prompt: Sequence[int], new: Sequence[int]) -> str:
    return "".join(streamed(new_stream(tokenizer_of(family), prompt_token_ids=prompt), new))


def offsets_of(family: str, prompt: Sequence[int], new: Sequence[int]) -> list[int]:
    offsets: list[int] = []
    new_stream(tokenizer_of(family), prompt_token_ids=prompt).push(new, offsets)
    return offsets


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_what_new_tokens_add_to_the_prompt(family: str) -> None:
    """Prompts of texts, so they end with a whole character; special tokens may be anywhere."""

    @given(texts(), texts(), st.integers(0, 20), token_ids_of(family))
    def check(before: str, after: str, num_special: int, new: list[int]) -> None:
        if family == "byte_fallback":
            before, after = before.replace("\ufffd", ""), after.replace("\ufffd", "")
        tokenizer = tokenizer_of(family)
        special = [tokenizer.convert_tokens_to_ids(SPECIAL[1])] * num_special
        prompt = [token for text in (before, after) for token in [*tokenizer(text)["input_ids"], *special]]
        expected = whole(family, [*prompt, *new])
        assert whole(family, prompt) + answer(family, prompt, new) == expected

    check()


@given(texts(), st.data())
def test_a_text_cut_anywhere(text: str, data: st.DataObject) -> None:
    """If the prompt ends inside a character, the answer begins with that character, complete."""
    for family in ("byte_level", "straddling", "byte_fallback"):
        clean = text.replace("\ufffd", "")
        token_ids = tokenizer_of(family).encode(clean, add_special_tokens=False)
        cut = data.draw(st.integers(0, len(token_ids)))
        joint = whole(family, token_ids)
        finished = max(
            (
                len(start)
                for num in range(4)
                if joint.startswith(start := whole(family, token_ids[: max(0, cut - num)]).rstrip("\ufffd"))
            ),
            default=0,
        )
        assert answer(family, token_ids[:cut], token_ids[cut:]) == joint[finished:]


@pytest.mark.parametrize(
    ("prompt", "new", "expected"),
    [
        (b"x\xf0\x9f", b"y", "\ufffdy"),  # the character that the prompt began is broken
        (b"x\xf0\x9f", b"", "\ufffd"),
        (b"x\xef\xbf\xbd", b"y", "y"),  # the prompt ends with U+FFFD itself
        (b"\xef\xbf\xbd", b"\xef\xbf\xbd", "\ufffd"),
        (b"x\xef\xbf", b"\xbdy", "\ufffdy"),
    ],
)
def test_prompts_that_end_inside_a_character(prompt: bytes, new: bytes, expected: str) -> None:
    assert answer("straddling", ids_of_bytes(prompt), ids_of_bytes(new)) == expected


def test_spaces_between_whole_words_belong_to_no_token() -> None:
    tokenizer = tokenizer_of("word_level")
    assert answer("word_level", tokenizer.encode("the quick"), tokenizer.encode("brown fox")) == "brown fox"


@pytest.mark.parametrize("family", FAMILIES)
def test_stop_strings_are_in_new_text_only(family: str) -> None:
    @given(token_ids_of(family), st.text("the ab世", min_size=1, max_size=2))
    def check(new: list[int], stop: str) -> None:
        prompt = tokenizer_of(family).encode("the lazy dog", add_special_tokens=False)
        text = answer(family, prompt, new)
        stream = new_stream(tokenizer_of(family), [stop], prompt)
        assert ("".join(streamed(stream, new)), stream.is_stopped) == cut_at_stop(text, [stop])

    check()


@pytest.mark.parametrize("family", [*FAMILIES, "word_level"])
def test_offsets_never_decrease_and_stay_in_the_text(family: str) -> None:
    @given(token_ids_of(family), token_ids_of(family))
    def check(prompt: list[int], new: list[int]) -> None:
        offsets, length = offsets_of(family, prompt, new), len(answer(family, prompt, new))
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= length for offset in offsets)

    check()


@pytest.mark.parametrize("family", ["byte_level", "straddling"])
def test_offsets_are_of_first_characters(family: str) -> None:
    @given(texts())
    def check(text: str) -> None:
        text = text.replace("\ufffd", "")
        encoded = tokenizer_of(family)(text, return_offsets_mapping=True)
        num_bytes, expected = 0, []
        for token in tokenizer_of(family).convert_ids_to_tokens(encoded["input_ids"]):
            expected.append(len(text.encode()[: num_bytes + 1].decode(errors="ignore")))
            if text.encode()[: num_bytes + 1].decode(errors="replace")[-1] != "\ufffd":
                expected[-1] -= 1
            num_bytes += len(token)  # a letter of the token is a byte
        assert offsets_of(family, [], encoded["input_ids"]) == expected

    check()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfea", [0, 1, 2]),
        (b"a\xe6\x97", [0, 1, 1]),
        ("\ufffda".encode(), [0, 0, 0, 1]),
    ],
)
def test_offsets_of_bytes(content: bytes, expected: list[int]) -> None:
    assert offsets_of("straddling", [], ids_of_bytes(content)) == expected
