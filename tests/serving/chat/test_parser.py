"""The streaming parser: answers that templates write come back, all other text stays as it is."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dcpmla.serving.chat.formats import FORMATS
from tests.serving.chat.answers import (
    LONGCAT_TAGS,
    TEMPLATES,
    Call,
    calls_of,
    cut,
    markers_of,
    parser_of,
    render,
    some_calls,
    stream,
)

NAMES = list(FORMATS)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)
PLAIN = st.text(st.characters(exclude_categories=("Cs", "Z", "Cc"), exclude_characters="<["), min_size=1, max_size=30)


def test_all_formats_have_a_template() -> None:
    assert sorted(TEMPLATES) == sorted(FORMATS)


def as_values(calls: list[Call]) -> list[Call]:
    return [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]


@pytest.mark.parametrize(
    ("name", "template"), [*TEMPLATES.items(), ("longcat", LONGCAT_TAGS), ("ling", TEMPLATES["glm47"])]
)
@given(data=st.data())
def test_round_trip(name: str, template: str, data: st.DataObject) -> None:
    calls = data.draw(some_calls(name))
    reasoning, content = data.draw(PLAIN), data.draw(PLAIN)
    answer = render(template, reasoning, content, calls)
    opened = FORMATS[name].bare.reasoning[0]
    sizes = data.draw(SIZES)
    for start, in_reasoning in (("", False), (opened, True)):
        parser = parser_of(name, in_reasoning=in_reasoning)
        shown = stream(parser, cut(answer.removeprefix(start), sizes))
        assert (shown[0], shown[1], as_values(shown[2])) == (reasoning, content, calls)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_text_without_calls_is_unchanged(name: str, data: st.DataObject) -> None:
    """Beginnings of markers, and whole markers without a call, are text."""
    markup = FORMATS[name].bare
    whole = [*markup.section[:1], markup.call[0], markup.call[1], markup.reasoning[1]]
    begun = [marker[:length] for marker in markers_of(name) for length in (1, len(marker) // 2, len(marker) - 1)]
    drawn = st.sampled_from([*begun, *whole, *markup.section[1:], "\n", "\n\n", " ", "other"]) | PLAIN
    text = data.draw(PLAIN) + "".join(data.draw(st.lists(drawn, max_size=8))) + " "
    assume(not any(marker in text for marker in markup.dropped))
    assert stream(parser_of(name), cut(text, data.draw(SIZES))) == ("", text, [])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", " \n x", "x\n\n", "<", "[TOOL", "a <think> b </think> c", "</", "\n\n<"]
)
def test_short_texts_are_unchanged(name: str, text: str) -> None:
    assert stream(parser_of(name), list(text)) == ("", text, [])


def answer_of(name: str, calls: list[Call], reasoning: str = "hm", content: str = "Hi") -> str:
    return render(TEMPLATES[name], reasoning, content, calls)


CALL = {"name": "search", "arguments": {"query": "a b", "limit": 3}}


@pytest.mark.parametrize("name", NAMES)
def test_a_switch_leaves_its_markup_in_the_content(name: str) -> None:
    """The wrapper of Kimi-K3's responses is removed in any case: it is not part of calls or reasoning."""
    markup, answer = FORMATS[name].bare, answer_of(name, [CALL])
    plain = answer
    for dropped in markup.dropped:
        plain = plain.replace(dropped, "")
    off = parser_of(name, parses_calls=False, parses_reasoning=False)
    assert stream(off, cut(answer, [3])) == ("", plain, [])
    reasoning, content, calls = stream(parser_of(name, parses_calls=False), cut(answer, [3]))
    assert (reasoning, calls) == ("hm", [])
    assert content.startswith("Hi")
    assert markup.call[0] in content
    reasoning, content, calls = stream(parser_of(name, parses_reasoning=False), cut(answer, [3]))
    assert reasoning == ""
    assert content.startswith("".join([markup.reasoning[0], "hm", markup.reasoning[1]]))
    assert as_values(calls) == [CALL]
    inside = parser_of(name, parses_reasoning=False, in_reasoning=True)
    assert stream(inside, ["hm", markup.reasoning[1]]) == ("", "hm" + markup.reasoning[1], [])


@pytest.mark.parametrize("name", NAMES)
def test_reasoning(name: str) -> None:
    start, end = FORMATS[name].bare.reasoning
    inside = {"in_reasoning": True}
    assert stream(parser_of(name), [f"\n{start}a", f"b{end}c"]) == ("ab", "c", [])
    assert stream(parser_of(name, **inside), [f"{start}a{end}", "c"]) == ("a", "c", [])  # opened twice
    assert stream(parser_of(name, **inside), [f"a{end}", f" x{start}c{end}"]) == ("a", f" x{start}c{end}", [])
    assert stream(parser_of(name, **inside), ["a", end[:-1]]) == (f"a{end[:-1]}", "", [])  # unfinished
    assert stream(parser_of(name), [f"a{start}b{end}"]) == ("", f"a{start}b{end}", [])  # not at the start
    call = answer_of(name, [CALL]).split(end)[1]
    reasoning, content, calls = stream(parser_of(name, **inside), ["so ", *cut(call, [4])])  # ended by a call
    assert reasoning.startswith("so ")
    assert (content, as_values(calls)) == ("", [CALL])


@pytest.mark.parametrize("name", NAMES)
def test_pieces_come_as_soon_as_they_are_certain(name: str) -> None:
    """One character at a time: a name with the end of its header, texts of arguments with each character."""
    parser = parser_of(name)
    for word in ("The", " answer", " is", " 42", ".", " <b>", "x"):
        assert parser.push(word).content == word
    markup = FORMATS[name].bare
    text = "0123456789" * 5
    answer = answer_of(name, [{"name": "search", "arguments": {"query": text}}])
    parser, shown = parser_of(name), []
    for character in answer[: answer.index(text)]:
        shown.append(parser.push(character))
    names = [number for number, each in enumerate(shown) if any(piece.name for piece in each.calls)]
    if name in ("longcat", "ling"):
        expected = answer.index('"search"') + len('"search"') - 1
    else:
        after = answer.index("search")
        stop_at = min((answer.index(stop, after), stop) for stop in markup.stops if stop in answer[after:])
        expected = stop_at[0] + len(stop_at[1]) - 1
    assert names == [expected]
    assert "".join(each.content for each in shown[: names[0]]) == "Hi"
    before = calls_of(shown)[0]["arguments"]
    assert json.loads(before + '"}') == {"query": ""}
    for character in text:
        assert [piece.text for piece in parser.push(character).calls] == [character]


@pytest.mark.parametrize("name", NAMES)
def test_unfinished_calls(name: str) -> None:
    """An answer that ends anywhere gives the beginning of the whole answer's call, or its markup as text."""
    answer = answer_of(name, [CALL])
    whole = stream(parser_of(name), [answer])[2][0]["arguments"]
    start = answer.index("Hi")
    for length in range(start, len(answer)):
        reasoning, content, calls = stream(parser_of(name), cut(answer[:length], [5]))
        assert reasoning == "hm"
        assert content.startswith("Hi"[: length - start])
        if calls:
            assert whole.startswith(calls[0]["arguments"])


@pytest.mark.parametrize("name", NAMES)
def test_calls_of_other_functions_are_text(name: str) -> None:
    other = {"name": "delete", "arguments": {}}
    answer = answer_of(name, [other]).split(FORMATS[name].bare.reasoning[1])[1]
    for dropped in FORMATS[name].bare.dropped:
        answer = answer.replace(dropped, "")
    assert stream(parser_of(name), cut(answer, [7])) == ("", answer, [])
    assert as_values(stream(parser_of(name, []), [answer])[2]) == [other]
    after = stream(parser_of(name), [answer + answer_of(name, [CALL], content="")])
    assert as_values(after[2]) == [CALL]
    assert "delete" in after[1]


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].bare.tags is None])
@pytest.mark.parametrize(
    "broken", ['{"query": a}', '{"query": "a"b"}', '{"a": "line\nbreak"}', "query=a", '{"query": "a"]']
)
def test_broken_json_ends_with_the_call(name: str, broken: str) -> None:
    """The client sees what the model wrote, and the next call is not lost."""
    answer = answer_of(name, [CALL, CALL]).replace(json.dumps(CALL["arguments"]), broken, 1)
    _, _, calls = stream(parser_of(name), cut(answer, [3]))
    assert calls[0]["arguments"].removesuffix("\n```") == broken
    assert as_values(calls[1:]) == [CALL]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", ["", "call"])
def test_the_size_of_a_piece_changes_nothing(name: str, start: str) -> None:
    """A whole answer of 100,000 characters that repeats markup is read as its pieces are."""
    markup = FORMATS[name].bare
    spam = (markup.call[0] + (markup.tags.start if markup.tags else "{")) * 3000
    answer = (answer_of(name, [CALL]) if start else "") + "x" + spam[:100_000]
    whole, pieces = (stream(parser_of(name), each) for each in ([answer], cut(answer, [997])))
    assert whole[:2] == pieces[:2]
    assert as_values(whole[2]) == as_values(pieces[2]) == ([CALL] if start else [])
