"""Parts of schemas keep what their references lead to, as jsonschema resolves them."""

import json
from typing import Any

import pytest

from dcpmla.runtime.schemas import alone, inner_schemas, refer, with_inner

jsonschema = pytest.importorskip("jsonschema")

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
