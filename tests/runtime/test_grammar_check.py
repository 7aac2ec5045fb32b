"""The check of grammars: what texts satisfy passes, and the rest has its path, with masks at a bounded cost. Parts of
schemas keep what their references lead to, as jsonschema resolves them.
"""

import json
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from dcpmla.runtime.schemas import alone, inner_schemas, refer, with_inner
from tests.support.random_model import EOS, TOKENIZER, VOCAB_SIZE

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from dcpmla.runtime.grammar_text import compile_grammar, find_fault, read_vocabulary  # noqa: E402

VOCABULARY = read_vocabulary(TOKENIZER, VOCAB_SIZE, [EOS])
ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}


@pytest.fixture(autouse=True)
def _standard_error() -> Iterator[None]:
    """Give the standard error back, which a check takes for llguidance's log."""
    kept = os.dup(2)
    yield
    os.dup2(kept, 2)
    os.close(kept)


def fault_of(kind: str, content: Any) -> tuple[str, str] | None:
    text = content if isinstance(content, str) else json.dumps(content)
    fault = find_fault(VOCABULARY, kind, text)
    return None if fault is None else (".".join(map(str, fault[0])), fault[1])


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"$ref": "#"}, "", "always needs itself again"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "$defs.n", "always needs itself again"),
        ({**ITSELF, "required": ["a"]}, "", "always needs itself again"),
        ({"items": {"$ref": "#"}, "type": "array", "minItems": 1}, "", "always needs itself again"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}}, "properties.a", "always needs itself again"),
        ({"properties": {"a": {"$ref": "#"}, "b": {"not": {}}}}, "properties.b", 'Unimplemented keys: ["not"]'),
        ({"items": {"$ref": "#/$defs/d"}, "$defs": {"d": {"uniqueItems": True}}}, "$defs.d", "uniqueItems"),
        ({"items": {"minProperties": 1}}, "items", "minProperties is 1"),
        ({"properties": {"k": {"enum": ["a", "\x7f"]}}}, "properties.k", "the character U+007F"),
        ({"items": {"const": [{"k": "\x00"}]}}, "items", "the character U+0000"),
        ({"type": "array", "items": {"type": "string", "pattern": "^\x1b"}, "minItems": 1}, "items", "cannot go on"),
        ({"enum": []}, "", "Unsatisfiable"),
        ({"$ref": "#/$defs/none"}, "", "does not exist"),
    ],
)
def test_schemas_without_texts(schema: dict[str, Any], path: str, words: str) -> None:
    fault = fault_of("json_schema", schema)
    assert fault is not None
    assert fault[0] == path
    assert words in fault[1]
    assert "start:" not in fault[1]  # no page of a grammar that the client has not written


@pytest.mark.parametrize(
    "content",
    [
        ITSELF,
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        {"type": "array", "uniqueItems": False},
        {"const": "\n\t"},
        {"const": "a" * 50_000},
        {"type": "string", "minLength": 60_000},
        {"enum": [f"{number:09}" for number in range(3000)]},
        'start: e\ne: "(" e e e ")" | "x"',
        'root ::= "a" root | "b"',
        'start: ""',
    ],
)
def test_grammars_with_texts(content: Any) -> None:
    assert fault_of("grammar" if isinstance(content, str) else "json_schema", content) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *(("regex", text) for text in (r"[^\s\S]", r"a[^\s\S]", "(", "a(?=b)")),
        *(("grammar", text) for text in ('start: "x" start', "start: a\na: b\nb: a", 'root ::= "a" root')),
        ("grammar", 'start: "x" T\nT: /a/ & /b/'),
    ],
)
def test_grammars_without_texts(kind: str, text: str) -> None:
    fault = fault_of(kind, text)
    assert fault is not None
    assert kind == "regex" or "needs itself again" in fault[1] or "no token continues it" in fault[1]


def test_no_mask_takes_the_memory_of_an_expression() -> None:
    """Before it, one mask took 100 to 1,000 MB, and seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, text in (
        ("regex", "a{1000}{1000}{4}"),
        ("regex", "[bc]{300}(a{1000}){2000}b"),
        ("json_schema", '{"type": "string", "pattern": "^b{3}(a{1000}{999})$"}'),
        ("grammar", 'start: A B\nA: "x"{1000}\nB: A{1000}'),
    ):
        assert fault_of(kind, text) is None
        matcher = compile_grammar(VOCABULARY, kind, text)
        for _ in range(400):
            token = next(token for token in range(VOCAB_SIZE) if matcher.validate_tokens([token]))
            matcher.compute_bitmask()
            assert matcher.consume_token(token)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


@pytest.mark.parametrize("text", ["<tool>", "a<eos>b", "<eos>"])
def test_special_tokens_texts_are_texts(text: str) -> None:
    """A literal is written with other tokens, which the grammar allows one by one, and read as itself."""
    schema = {
        "type": "object",
        "properties": {text: {"const": text}},
        "required": [text],
        "additionalProperties": False,
    }
    for kind, content in (("choice", json.dumps([text])), ("json_schema", json.dumps(schema))):
        matcher, tokens = compile_grammar(VOCABULARY, kind, content), list[int]()
        while not matcher.is_stopped():
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            tokens.append(max(token for token in range(VOCAB_SIZE) if bits >> token & 1))
            assert matcher.consume_token(tokens[-1])
        written = TOKENIZER.decode([token for token in tokens if token != EOS])
        assert written == text or jsonschema.validate(json.loads(written), schema) is None


def test_rules_of_large_grammars_are_looked_at() -> None:
    """A log of a lower level leaves them out."""
    names = [f"r{number}" for number in range(300)]
    chain = [f'{name}: "x" {after} | "y"' for name, after in zip(names, names[1:], strict=False)]
    for last, is_endless in (('"z"', False), ('"z" r299', True)):
        fault = fault_of("grammar", "\n".join(["start: r0", *chain, f"r299: {last}"]))
        assert (fault is not None) is is_endless


TREE = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "maximum": 9},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "a/b": {"properties": {"q": {"$ref": "#/properties/a~1b/$defs/Q"}}, "$defs": {"Q": {"type": "null"}}},
        "any": {"anyOf": [{"$ref": "#/properties/any/anyOf/1"}, {"$ref": "#/$defs/a%20b"}]},
        "const": {"const": {"$ref": "#"}},
    },
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"a b": {"enum": ["x"]}},
}


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("size", 9, 10),
        ("children", [{"size": 1, "children": [{"size": 2}]}], [{"size": 1, "children": [3]}]),
        ("a/b", {"q": None}, {"q": 1}),
        ("any", "x", "y"),
        ("const", {"$ref": "#"}, {"size": 1}),
    ],
)
def test_a_part_alone_means_what_it_means_in_the_whole(name: str, valid: Any, invalid: Any) -> None:
    part = jsonschema.Draft202012Validator(alone(TREE, TREE["properties"][name]))  # type: ignore[index]
    assert part.is_valid(valid)
    assert not part.is_valid(invalid)


def test_references_that_lead_nowhere() -> None:
    for reference in ("#/$defs/none", "#/properties/size/type/x", "#anchor", "https://example.com", "#/required/1", 3):
        with pytest.raises(LookupError):
            refer(TREE, reference)  # type: ignore[arg-type]
    assert alone(TREE, {"$ref": "#/none"}) == {"$ref": "#/none"}


def test_schemas_inside_are_replaced_in_a_copy() -> None:
    before = json.dumps(TREE)
    assert len(list(inner_schemas(TREE))) == 7
    assert with_inner(TREE, lambda path, part: part) == TREE
    with_inner(TREE, lambda path, part: False)
    assert json.dumps(TREE) == before
