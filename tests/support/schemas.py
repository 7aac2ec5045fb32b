"""Random JSON schemas of the keywords that are served, with values that satisfy them."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b c", "déjà", "x_1", 'q"', "名"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "password"]


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    match draw(st.integers(0, 3)):
        case 0:
            schema["minLength"] = draw(st.integers(0, 3))
            schema["maxLength"] = schema["minLength"] + draw(st.integers(0, 4))
        case 1:
            schema["pattern"] = draw(st.sampled_from(["^[a-c]+$", "^(x|yz){1,3}$", "[0-9]{2}", "^\\d+-\\w?$"]))
        case 2:
            schema["format"] = draw(st.sampled_from(FORMATS))
    return schema


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    low = draw(st.integers(-200, 200))
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = low + draw(st.integers(2, 300))
    elif schema["type"] == "integer" and draw(st.booleans()):
        schema["multipleOf"] = draw(st.integers(1, 12))
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": draw(inner)}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    schema["minItems"] = draw(st.integers(0, 2))
    schema["maxItems"] = schema["minItems"] + draw(st.integers(0, 2))
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": draw(st.dictionaries(NAMES, inner, max_size=3))}
    if schema["properties"]:
        schema["required"] = draw(st.lists(st.sampled_from([*schema["properties"]]), unique=True))
    match draw(st.integers(0, 2)):
        case 0:
            schema["additionalProperties"] = False
        case 1:
            schema["additionalProperties"] = draw(inner)
    if draw(st.integers(0, 3)) == 0:
        schema["patternProperties"] = {"^p[0-9]$": draw(inner)}
    return schema


LEAVES = st.one_of(
    strings(),
    numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"], "maxLength": 3}]),
    st.builds(
        lambda values: {"enum": values},
        st.lists(TEXTS | st.integers(-(10**9), 10**9) | st.booleans() | st.none(), min_size=1, max_size=3),
    ),
    st.builds(lambda value: {"const": value}, TEXTS | st.lists(st.integers(0, 9), max_size=2)),
)
PARTS = st.recursive(
    LEAVES | st.just({"$ref": "#/$defs/d"}),
    lambda inner: st.one_of(
        arrays(inner),
        objects(inner),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)
SCHEMAS = st.builds(lambda part, definition: {**part, "$defs": {"d": definition}}, PARTS, LEAVES)
