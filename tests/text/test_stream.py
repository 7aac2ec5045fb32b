"""Text in pieces against the whole decode, also after a prompt, and offsets of tokens in it; with small tokenizers of
each family.
"""

from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from dcpmla.integrations.tokenizer import load_tokenizer
from dcpmla.text.stream import TextStream
from tests.support.small_tokenizers import (
    BUILDERS,
    FAMILIES,
    SENTENCES,
    SPECIAL,
    byte_letter,
    ids_of_bytes,
    new_stream,
    tokenizer_of,
)

SPACED = [family for family in FAMILIES if family != "word_level"]  # families whose tokens have their spaces


def whole(family: str, token_ids: Sequence[int]) -> str:
    return tokenizer_of(family).decode(list(token_ids), skip_special_tokens=True)


def texts() -> st.SearchStrategy[str]:
    """Draw the sentences' characters, any others, and long runs of one."""
    characters = (
        st.sampled_from("".join(SENTENCES)) | st.characters(exclude_categories=["Cs"]) | st.sampled_from("世ä🦊 \ufffd")
    )
    runs = st.builds(lambda character, num: character * num, characters, st.integers(1, 40))
    return st.lists(st.sampled_from(SENTENCES) | characters | runs, max_size=8).map("".join)


@st.composite
def token_ids_of(draw: st.DrawFn, family: str) -> list[int]:
    """Tokens of texts; special ones, those outside of the vocabulary and any others between them; runs of each.

    With byte fallback, where broken characters take back text and \ufffd in a text looks like one, nothing is broken.
    """
    tokenizer = tokenizer_of(family)
    special = st.sampled_from([*tokenizer.convert_tokens_to_ids(SPECIAL), len(tokenizer) + 7])
    strange = special if family == "byte_fallback" else special | st.integers(0, len(tokenizer) - 1)
    token_ids: list[int] = []
    for text in draw(st.lists(texts(), max_size=3)):
        text = text.replace("\ufffd", "") if family == "byte_fallback" else text
        token_ids += tokenizer.encode(text, add_special_tokens=False)
        for _ in range(draw(st.integers(0, 3))):
            place = draw(st.integers(0, len(token_ids)))
            token_ids[place:place] = [draw(strange)] * draw(st.sampled_from([1, 2, 5, 40]))
    return token_ids


def streamed(stream: TextStream, token_ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    """Return the pieces of tokens that come in numbers that are repeated; the last piece is from `end`."""
    ends = [0]
    for size in cycle(sizes):
        if ends[-1] >= len(token_ids):
            break
        ends.append(ends[-1] + size)
    return [*(stream.push(token_ids[start:end]) for start, end in pairwise(ends)), stream.end((), False)]


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the stop string that is complete first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        complete = [each for each in stop if text.endswith(each, 0, end)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_the_whole_text(family: str) -> None:
    @given(token_ids_of(family))
    def check(token_ids: list[int]) -> None:
        assert "".join(streamed(new_stream(tokenizer_of(family)), token_ids)) == whole(family, token_ids)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_end_before_a_stop_string(family: str) -> None:
    @given(token_ids_of(family), st.data())
    def check(token_ids: list[int], data: st.DataObject) -> None:
        text = whole(family, token_ids)
        places = st.tuples(st.integers(0, len(text)), st.integers(1, 9)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
        stop = data.draw(st.lists((places | st.text("the ab世\ufffd", max_size=3)).filter(bool), max_size=3))
        sizes = data.draw(st.sampled_from([[1], [2, 0, 5], [40]]))
        streams = [new_stream(tokenizer_of(family), stop) for _ in range(2)]
        shown = ["".join(streamed(streams[0], token_ids)), "".join(streamed(streams[1], token_ids, sizes))]
        assert shown == [cut_at_stop(text, stop)[0]] * 2
        assert [stream.is_stopped for stream in streams] == [cut_at_stop(text, stop)[1]] * 2

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_certain_text_comes_at_once(family: str) -> None:
    """After each token: all characters that are whole by then."""

    @given(token_ids_of(family))
    def check(token_ids: list[int]) -> None:
        stream = new_stream(tokenizer_of(family))
        text = ""
        for num_tokens, token in enumerate(token_ids, 1):
            text += stream.push([token])
            assert text.startswith(whole(family, token_ids[:num_tokens]).rstrip("\ufffd"))

    if family != "byte_fallback":  # its whole decode takes back characters while another one is incomplete
        check()


@given(st.lists(st.integers(1, 256), max_size=60))
def test_text_after_broken_bytes_is_right_again(broken: list[int]) -> None:
    """With byte fallback, what comes out of the bytes themselves depends on where they were cut."""
    tail = tokenizer_of("byte_fallback").encode(" the lazy dog", add_special_tokens=False)
    pieces = streamed(new_stream(tokenizer_of("byte_fallback")), broken + tail)
    assert "".join(pieces).endswith("the lazy dog")


def test_a_character_of_byte_fallback_comes_whole() -> None:
    token_ids = tokenizer_of("byte_fallback").encode("世世")
    assert streamed(new_stream(tokenizer_of("byte_fallback")), token_ids) == ["", "", "", "世", "", "", "世", ""]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    def pieces(text: str, *stop: str) -> list[str]:
        stream = new_stream(tokenizer_of("straddling"), stop)
        return [*streamed(stream, tokenizer_of("straddling").encode(text)), "stopped" if stream.is_stopped else "ended"]

    assert pieces("abac", "abad") == ["", "", "", "abac", "", "ended"]
    assert pieces("ababad", "abad") == ["", "", "", "ab", "", "", "", "stopped"]
    assert pieces("xaby", "ab") == ["x", "", "", "", "", "stopped"]
    assert pieces("xab", "abc") == ["x", "", "", "ab", "ended"]
    assert pieces("abcd", "bcd", "c") == ["a", "", "b", "", "", "stopped"]
    assert pieces("abcd", "cd", "bcd", "d") == ["a", "", "", "", "", "stopped"]
    assert pieces("ab", "ab") == ["", "", "", "stopped"]


def test_nothing_comes_after_the_end() -> None:
    stream = new_stream(tokenizer_of("straddling"), ["b"])
    token_ids = tokenizer_of("straddling").encode("abc")
    assert stream.push(token_ids) == "a"
    assert (stream.push(token_ids), stream.end((), False), stream.num_tokens, stream.is_stopped) == ("", "", 2, True)
    stream = new_stream(tokenizer_of("straddling"), ["b"], includes_stop=True)
    assert [stream.push(token_ids), stream.push(token_ids), stream.end((), False)] == ["ab", "", ""]
    stream = new_stream(tokenizer_of("straddling"), ["bc"])
    assert [stream.push(token_ids[:2]), stream.end((), False), stream.end((), False)] == ["a", "b", ""]


@pytest.mark.parametrize("includes_stop", [False, True])
def test_a_stop_token_has_no_text(includes_stop: bool) -> None:
    """Unless the text includes what ends it; a stop string before it counts."""
    token_ids = tokenizer_of("straddling").encode("abc")
    for stop, expected in (((), "abc" if includes_stop else "ab"), (("b",), "ab" if includes_stop else "a")):
        stream, offsets = new_stream(tokenizer_of("straddling"), stop, includes_stop=includes_stop), list[int]()
        assert stream.end(token_ids, True, offsets) == expected
        assert offsets == [0, 1, 2][: stream.num_tokens]
        assert stream.num_tokens == 3 - bool(stop)


def test_the_tokens_of_a_stop_string_are_counted() -> None:
    """However they come, up to the one that completes it."""
    token_ids = tokenizer_of("straddling").encode("abcdef")
    for parts in ([6], [3, 3], [1] * 6, [4, 2]):
        stream, offsets, start = new_stream(tokenizer_of("straddling"), ["bcd"]), list[int](), 0
        for num in parts:
            stream.push(token_ids[start : start + num], offsets)
            start += num
        assert (stream.num_tokens, stream.stop_string, offsets) == (4, "bcd", [0, 1, 2, 3])


class Undecoded:
    """A tokenizer whose texts are made from its tokens' bytes alone."""

    def __init__(self, family: str) -> None:
        self.backend_tokenizer = tokenizer_of(family).backend_tokenizer

    def __call__(self, text: str) -> Any:
        raise AssertionError("texts encode nothing")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise AssertionError("texts decode nothing again")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_decoded_again(family: str) -> None:
    token_ids = [token for text in SENTENCES for token in tokenizer_of(family).encode(text)]
    pieces = streamed(new_stream(Undecoded(family), ("?!",), token_ids[:9]), token_ids)
    assert "".join(pieces) == "".join(streamed(new_stream(tokenizer_of(family), ("?!",), token_ids[:9]), token_ids))


@pytest.mark.parametrize("broken", [b"\xe4", b"\x80"])
def test_broken_bytes_become_text(broken: bytes) -> None:
    """A model may be stuck in bytes that never become a character; their text comes meanwhile."""
    stream = new_stream(tokenizer_of("byte_level"))
    (token,) = tokenizer_of("byte_level").convert_tokens_to_ids([byte_letter(broken[0])])
    text = "".join(stream.push([token]) for _ in range(500))
    assert len(text) >= 499
    assert text + stream.end((), False) == "\ufffd" * 500


SPACES = decoders.Replace("▁", " ")
DECODERS: dict[str, tuple[str, Any]] = {
    "no space is dropped": ("byte_fallback", decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()])),
    "a first space stays": ("metaspace", decoders.Metaspace(prepend_scheme="never")),
    "a space before the first word": ("metaspace", decoders.Metaspace(prepend_scheme="first")),
    "pieces": ("word_piece", decoders.WordPiece(cleanup=False)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_texts_are_what_the_decoder_makes(name: str) -> None:
    family, decoder = DECODERS[name]
    tokenizer = BUILDERS[family]()
    tokenizer.backend_tokenizer.decoder = decoder
    for text in [*SENTENCES, "  a", " ", "the"]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(min(len(token_ids), 4)):
            text = tokenizer.decode(token_ids[start:], skip_special_tokens=True)
            assert "\ufffd" in text or "".join(streamed(new_stream(tokenizer), token_ids[start:])) == text


def test_a_decoder_that_is_not_known_is_refused(tmp_path: Any) -> None:
    """No text would be better than another text."""
    tokenizer = BUILDERS["metaspace"]()
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    tokenizer.save_pretrained(tmp_path)
    loaded, reason = load_tokenizer(tmp_path)
    assert loaded is None
    assert "the tokenizer decodes" in reason


def answer(family: str, prompt: Sequence[int], new: Sequence[int]) -> str:
    return "".join(streamed(new_stream(tokenizer_of(family), prompt_token_ids=prompt), new))


def offsets_of(family: str, prompt: Sequence[int], new: Sequence[int]) -> list[int]:
    offsets: list[int] = []
    new_stream(tokenizer_of(family), prompt_token_ids=prompt).push(new, offsets)
    return offsets


@pytest.mark.parametrize("family", SPACED)
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


@pytest.mark.parametrize("family", SPACED)
def test_stop_strings_are_in_new_text_only(family: str) -> None:
    @given(token_ids_of(family), st.text("the ab世", min_size=1, max_size=2))
    def check(new: list[int], stop: str) -> None:
        prompt = tokenizer_of(family).encode("the lazy dog", add_special_tokens=False)
        text = answer(family, prompt, new)
        stream = new_stream(tokenizer_of(family), [stop], prompt)
        assert ("".join(streamed(stream, new)), stream.is_stopped) == cut_at_stop(text, [stop])

    check()


@pytest.mark.parametrize("family", FAMILIES)
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
