"""Fields for structured output, as grammars, and the check of a client's grammar before any rank compiles it.

Sources: OpenAI's API reference (response_format); the protocol of vLLM's server (structured_outputs).
"""

import hashlib
import json
from collections import OrderedDict
from typing import Any

from dcpmla.extras import missing
from dcpmla.runtime.grammar import Grammar
from dcpmla.serving.background import Prepared
from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.messages import Started
from dcpmla.serving.refused import OpenFields
from dcpmla.serving.worker import LimitError, Worker

MAX_CHARACTERS = 1 << 16
_MAX_KEPT = 1024  # latest grammars that need no other check
_KINDS = {"json": "json_schema"} | {kind: kind for kind in ("json_object", "regex", "choice", "grammar")}


class StructuredFields(OpenFields):
    """Fields that describe the form of an answer; null is the default."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def grammar_source(self) -> str:
        """Return the path of the field that has the grammar."""
        if self.structured_outputs is None:
            return "response_format.json_schema.schema"
        return f"structured_outputs.{next(iter(_entries(self.structured_outputs)), '')}"

    def grammar(self) -> Grammar | None:
        """Return the grammar that the fields ask for, None for any text.

        Raises:
            ApiError: A field is wrong, or both ask for a grammar.
        """
        grammar = grammar_of_format(self.response_format, "response_format", "json_schema")
        if self.structured_outputs is None:
            return grammar
        if grammar is not None:
            raise ApiError(400, "give response_format or structured_outputs, not both", param="structured_outputs")
        return _of_structured_outputs(self.structured_outputs)


def grammar_of_format(value: dict[str, Any] | None, path: str, wrapper: str = "") -> Grammar | None:
    """Return the grammar of a format of text, a JSON object or a JSON schema; None for text, or without a format.

    Args:
        path: Path of the format in the body.
        wrapper: Field around the schema, empty for none.
    Raises:
        ApiError: The format is of another type, or has no schema.
    """
    value = value or {"type": "text"}
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            around = value.get(wrapper) if wrapper else value
            path = ".".join(filter(None, (path, wrapper, "schema")))
            if not isinstance(around, dict) or not isinstance(around.get("schema"), dict):
                raise wrong(path, "is missing; it must be a JSON schema")
            return _grammar("json_schema", around["schema"], path)
    raise wrong(f"{path}.type", f"is {str(value.get('type'))[:40]!r}; it must be text, json_object or json_schema")


def _of_structured_outputs(value: dict[str, Any]) -> Grammar | None:
    entries = _entries(value)
    for name in value:
        if name not in _KINDS and name in entries:
            raise wrong(f"structured_outputs.{name}", "is not supported; leave it out")
    if len(entries) != 1:
        words = f"has {sorted(entries)}; give one of {', '.join(_KINDS)}"
        raise wrong("structured_outputs", words)
    ((name, content),) = entries.items()
    path = f"structured_outputs.{name}"
    if name == "json" and isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise wrong(path, f"is a text that is no JSON: {error}") from None
    return _grammar(_KINDS[name], content, path)


def _entries(value: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of structured_outputs that are set."""
    return {name: content for name, content in value.items() if content is not None and content is not False}


def _grammar(kind: str, content: Any, path: str) -> Grammar:
    """Return the grammar of a field's content.

    Raises:
        ApiError: The content is of another type, or too long.
    """
    if kind == "json_object":
        return Grammar(kind)
    if kind in ("regex", "grammar"):
        if not isinstance(content, str):
            raise wrong(path, "must be text")
        text = content
    else:
        try:
            text = json.dumps(content, ensure_ascii=False)
        except RecursionError:
            raise wrong(path, "is nested too deep") from None
    if len(text) > MAX_CHARACTERS:
        raise wrong(path, f"has {len(text):,} characters; at most {MAX_CHARACTERS:,} are served")
    try:
        return Grammar(kind, text)
    except ValueError as error:
        raise ApiError(400, f"{path}: {str(error).removeprefix('grammar.text ')}", param=path) from None


def check_support(field: str, model: Started) -> None:
    """Raise ApiError if no field may ask for a grammar: the extra is not installed, or the tokenizer is of no use."""
    if missing("structured"):
        raise wrong(field, "needs the extra structured, which is not installed on the server")
    if model.no_grammars:
        raise wrong(field, f"is not supported with this model's tokenizer: {model.no_grammars}")


class GrammarChecks:
    """Checks of grammars with the model's own tokenizer, in a process with limits of time and memory.

    A grammar that passes takes the ranks a bounded time, and crashes none.

    Args:
        worker: Process whose model is `background.prepare` of a `Started`.
    """

    def __init__(self, worker: Worker) -> None:
        self._passed: OrderedDict[bytes, None] = OrderedDict()  # digests
        self._worker = worker

    async def check(self, grammar: Grammar | None, source: str, model: Started) -> None:
        """Check a grammar, unless an equal one has passed.

        Args:
            source: Path of the field that has it.
            model: The model, whose tokenizer must be one that grammars can use; the same in all calls.
        Raises:
            ApiError: It cannot be served; the message has the path of the part of a schema that is at fault.
        """
        if grammar is None:
            return
        check_support(source.partition(".")[0], model)
        key = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode(errors="surrogatepass")).digest()
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        try:
            fault = await self._worker.call(model, _find_fault, grammar.kind, grammar.text)
        except LimitError as error:
            fault = [], f"{error} to compile"
        if fault is not None:
            path = ".".join([source, *map(str, fault[0])])
            raise ApiError(400, f"{path}: {fault[1]}", param=path)
        self._passed[key] = None
        while len(self._passed) > _MAX_KEPT:
            self._passed.popitem(last=False)


def _find_fault(prepared: Prepared, kind: str, text: str) -> Any:
    """Return the fault of a grammar (`grammar_text.find_fault`)."""
    from dcpmla.runtime.grammar_text import find_fault

    return find_fault(prepared.vocabulary, kind, text)
