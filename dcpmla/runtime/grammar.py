"""The grammar that a request's new tokens follow: its kind and its text, checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from dcpmla.fields import Rule, check_fields, one_of, rules_of, tuple_of, whole

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
_TEXT = Rule("text", lambda value: isinstance(value, str))


@dataclass(frozen=True)
class Grammar:
    """A grammar that new tokens follow until it ends.

    Args:
        kind: One of json_schema, json_object, regex, choice and grammar.
        text: The schema as JSON; nothing; a regular expression, which all of the text matches; a JSON list of texts; or
            a grammar in Lark's or GBNF's notation, whose start is the rule `start` or `root`.
        starts_after: Token ids, one after the other, that the request must choose before the grammar begins, for
            example of </think>; () begins at the first new token.
    Raises:
        ValueError: A value has another type, or the text is not of its kind. `Engine.add` compiles the grammar.
    """

    kind: Annotated[str, one_of(KINDS)]
    text: Annotated[str, _TEXT] = ""
    starts_after: Annotated[tuple[int, ...], tuple_of(whole(0))] = ()

    def __post_init__(self) -> None:
        if isinstance(self.starts_after, list):
            object.__setattr__(self, "starts_after", tuple(self.starts_after))
        check_fields(rules_of(Grammar), vars(self), lambda name: f"grammar.{name}")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ValueError("grammar.text has half of a surrogate pair, which is no character") from None
        match self.kind:
            case "json_object":
                if self.text:
                    raise ValueError(f"grammar.text is {self.text[:40]!r}; of json_object it must be empty")
            case "json_schema":
                if not isinstance(self._value(), dict | bool):
                    raise ValueError("grammar.text is no JSON schema, which is an object, true or false")
            case "choice":
                value = self._value()
                if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
                    raise ValueError("grammar.text is no choice, which is a JSON list of one text or more")
            case _:
                if not self.text:
                    raise ValueError(f"grammar.text is empty; of {self.kind} it must be text")

    def _value(self) -> object:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"grammar.text is no JSON: {error}") from None


def as_grammar(value: object) -> object:
    """Return the grammar of a JSON object with its fields; anything else is returned unchanged.

    Raises:
        ValueError: The object has other fields, or a value is not allowed.
    """
    if not isinstance(value, Mapping):
        return value
    allowed = [field.name for field in fields(Grammar)]
    if "kind" not in value or not value.keys() <= set(allowed):
        raise ValueError(f"grammar has the fields {sorted(map(str, value))}; it has kind, and may have {allowed[1:]}")
    return Grammar(**value)
