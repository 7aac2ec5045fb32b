"""Grammars of tool calls: every call is one of a function, with arguments of its schema, in the family's markup."""

import json
import re

import jsonschema
import pytest

from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.call_grammar import Either, Pattern, Repeat, Schema, Until, call_grammar, parts_grammar
from tests.support.hash_model import make_engine
from tests.support.random_model import TOKENIZER, TOOL, RandomModel

WEATHER = {"type": "object", "properties": {"city": {"enum": ["Bonn", "x\n/y"]}}, "required": ["city"]}
WEATHER |= {"additionalProperties": False}
CLOCK = {"type": "object", "properties": {"zone": {"type": "integer"}}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
SPECIAL = {"<tool>": TOOL}


def answers(grammar: Grammar, num_answers: int = 12) -> list[str]:
    """Texts that end, with their special tokens."""
    engine = make_engine(400, model=RandomModel({"}": 5.0, "/": 4.0}), tokenizer=TOKENIZER)
    params = SamplingParams(max_new_tokens=150, temperature=2.0, grammar=grammar, skip_special_tokens=False)
    requests = [engine.add([index], params) for index in range(num_answers)]
    list(engine.run())
    assert all(request.error is None for request in requests)
    ended = [request for request in requests if request.finish_reason == "stop"]
    for request in ended:
        assert request.text.count("<tool>") == request.token_ids.count(TOOL)
    return [request.text for request in ended]


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_calls_are_of_their_functions(limit: int | None) -> None:
    calls = [[f"<tool>{name}:", Pattern("[0-9]/"), Schema(schema), "</tool>"] for name, schema in SCHEMAS.items()]
    texts = answers(call_grammar(calls, SPECIAL, before="<calls>", between="\n", after="</calls>", limit=limit))
    assert texts
    nums, names = set(), set()
    for text in texts:
        found = re.fullmatch(r"<calls>(.*)</calls>", text, re.DOTALL)
        assert found is not None
        parts = re.findall(r"<tool>(\w+):[0-9]/(.*?)</tool>(?:\n(?=<tool>)|$)", found[1], re.DOTALL)
        nums.add(len(parts))
        for name, arguments in parts:
            names.add(name)
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert names == {"weather", "clock"} or limit == 1
    assert min(nums) == 1
    assert max(nums) <= (limit or 99)


def test_texts_end_where_their_markup_says() -> None:
    """As in families whose string arguments are not JSON."""
    option = ["<v>", Until("</v>")]
    texts = answers(
        parts_grammar([Repeat([Either([option, ["<n>", Pattern("[0-9]+"), "</n>"]])], limit=3), "."], SPECIAL)
    )
    assert texts
    for text in texts:
        assert re.fullmatch(r"(<v>((?!</v>).)*</v>|<n>[0-9]+</n>){1,3}\.", text, re.DOTALL), text
    texts = answers(parts_grammar(["a", Until("<tool>b")], SPECIAL))
    assert all(re.fullmatch(r"a((?!<tool>).)*<tool>b", text, re.DOTALL) for text in texts)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="calls is empty"):
        call_grammar([], {})
    with pytest.raises(ValueError, match="minProperties is 1"):
        call_grammar([[Schema({"minProperties": 1})]], {})
