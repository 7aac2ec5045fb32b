"""The tables of fields in docs/serving.md, against the bodies that routes take."""

import json
import re
from collections.abc import Iterator
from typing import Any

from dcpmla.serving import anthropic_body, refused, responses_body
from dcpmla.serving.anthropic_body import MessagesBody
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.errors import ApiError
from dcpmla.serving.protocol import CompletionBody, parse
from dcpmla.serving.responses_body import ResponsesBody
from tests.support.launchers import ROOT

USER = {"role": "user", "content": "a"}
ROUTES: list[tuple[Any, dict[str, Any]]] = [  # in the order of the columns
    (CompletionBody, {"prompt": "a"}),
    (ChatBody, {"messages": [USER]}),
    (ResponsesBody, {"input": "a"}),
    (MessagesBody, {"messages": [USER], "max_tokens": 1}),
]


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield each field of the tables with its cells."""
    text = (ROOT / "docs" / "serving.md").read_text()
    tables = re.findall(r"^\| field \| completions.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert len(tables) == 2
    for line in (line for table in tables for line in table.splitlines()[2:] if line.startswith("|")):
        fields, *cells = (cell.strip() for cell in line.split("|")[1:6])
        for name in re.findall(r"`(\w+)`", fields):
            yield name, cells


def cell(kind: Any, body: dict[str, Any], name: str) -> str:
    if name in kind.model_fields:
        return "yes"
    try:
        parse(kind, json.dumps({**body, name: {"an odd": "value"}}).encode())
    except ApiError as error:
        is_own = error.param == name and error.message.startswith(f"{name} is not supported; ")
        return "400" if is_own else f"400 of {error.param}: {error.message}"
    return "–"


def test_the_table_of_fields() -> None:
    table = dict(rows())
    assert len(table) == len([*rows()]), "a field has two rows"
    known = {name for kind, _ in ROUTES for name in kind.model_fields}
    known |= {*refused._REFUSED, *refused._MISPLACED, *refused._OTHER_ROUTE}
    known |= {*responses_body._REFUSED, *anthropic_body._REFUSED}
    assert known == table.keys()
    for name, cells in table.items():
        assert cells == [cell(kind, body, name) for kind, body in ROUTES], name
