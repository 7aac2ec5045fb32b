"""Bodies: absurd ones are refused before they are parsed, large ones are not; unknown fields are dropped."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.errors import ApiError
from dcpmla.serving.protocol import CompletionBody, parse

MESSAGE = {"role": "user", "content": "x"}


def test_an_absurd_body_is_refused_before_it_is_parsed() -> None:
    content = '{"messages": [' + ",".join([json.dumps(MESSAGE)] * 400_000) + "]}"
    times = []
    for function in (lambda: parse(ChatBody, content.encode()), lambda: json.loads(content)):
        start = time.process_time()
        with suppress(ApiError):
            function()
        times.append(time.process_time() - start)
    assert times[0] < times[1]


@pytest.mark.parametrize("value", ["[]", "{}", '"a"', '"\\""', "1" + ",1" * 9])
def test_values_of_each_kind_have_a_limit(value: str) -> None:
    content = '{"prompt": [1], "x": [' + ",".join([value] * 300_000) + "]}"
    with pytest.raises(ApiError, match="the body has too many values"):
        parse(CompletionBody, content.encode())
    assert parse(CompletionBody, (content[: content.index(value)] + value + "]}").encode()).prompt == [1]


def test_large_bodies_that_are_not_absurd() -> None:
    texts = ['[{"a": "b"}], ' * 100_000, "\\" * 1_000_000, '\\"' * 1_000_000]
    for text in texts:
        body = parse(CompletionBody, json.dumps({"prompt": text}).encode())
        assert body.prompt == text
    ids = [123_456] * 1_000_000
    assert parse(CompletionBody, json.dumps({"prompt": ids}).encode()).prompt == ids
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 10_000
    assert len(parse(ChatBody, json.dumps({"messages": messages}).encode()).messages) == 10_000


def test_nothing_is_kept_of_unknown_fields() -> None:
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (CompletionBody, {"prompt": "a"}),
        (ChatBody, {"messages": [{**MESSAGE, "x": ["y"]}]}),
    ]
    for kind, fields in bodies:
        body = parse(kind, json.dumps({**fields, "x": ["y"] * 1000}).encode())
        assert not body.model_extra
    assert '"x"' not in body.model_dump_json().replace('"content":"x"', "")
    with pytest.raises(ApiError, match="functions is not supported"):
        parse(ChatBody, json.dumps({**fields, "functions": ["x"]}).encode())
