"""Tools of a request, and what the answer may do with them."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from dcpmla.fields import Rule, check_fields
from dcpmla.serving.errors import ApiError, as_api_error, wrong
from dcpmla.serving.shown import Json

_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_FUNCTION = {
    "name": Rule(
        "1 to 128 letters, digits and _ . : -", lambda name: isinstance(name, str) and bool(_NAME.fullmatch(name))
    ),
    "description": Rule("a JSON string", lambda value: isinstance(value, str | None)),
    "parameters": Rule("a JSON object", lambda value: isinstance(value, dict | None)),
    "strict": Rule("true or false", lambda value: isinstance(value, bool | None)),
}
_MAX_TOOLS = 1024
_MAX_LOGGED = 64  # types of tools: clients choose their names

_logger = logging.getLogger(__name__)
_logged: set[str] = set()

Tools = Annotated[list[dict[str, Any]], Field(max_length=_MAX_TOOLS)]
ToolsByPath = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request.

    Attributes:
        tools: Tools that the answer may call, in the shape of chat completions.
        is_parallel: Whether an answer may have several calls; of others only the first is kept.
        required: Names of functions. The answer must call one or more of them; empty if it need not.
        strict: Field `strict` of functions that have it, by name.
        schema_field: Path of the schema in a tool of the body.
        paths: Path of each tool in the body; none if these are all of its tools.
        deferred: Names of tools that the prompt does not list: a tool of the client finds them for the model.
    """

    tools: Sequence[Json] = ()
    is_parallel: bool = True
    required: Sequence[str] = ()
    strict: Mapping[str, bool] = field(default_factory=dict)
    schema_field: str = "function.parameters"
    paths: Sequence[str] = ()
    deferred: Collection[str] = ()

    @property
    def listed(self) -> list[Json]:
        """Return the tools that the prompt lists."""
        return [tool for tool in self.tools if tool["function"]["name"] not in self.deferred]

    @property
    def needs_grammar(self) -> bool:
        """Return whether a grammar must hold the answer to its calls."""
        return bool(self.required) or any(self.strict.values())

    def follows_schema(self, name: str) -> bool:
        """Return whether calls of a function must follow its schema: if it is strict, or if calls are required and no
        function says more.
        """
        return self.strict.get(name, bool(self.required) and not any(self.strict.values()))


def _function_tool(fields: Mapping[str, Any], path: str) -> Json:
    """Return a tool in the shape of chat completions.

    Args:
        fields: Name, maybe a description and the schema of the parameters; others are ignored.
        path: Path of the fields in the body.
    Raises:
        ApiError: A field has another type, or the name has other characters.
    """
    with as_api_error():
        check_fields(_FUNCTION, {"name": None, **fields}, lambda name: f"{path}.{name}")
    shown = {name: fields.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {name: value for name, value in shown.items() if value is not None}}


def by_path(tools: Sequence[Json] | None) -> ToolsByPath:
    """Return the tools of a body by their paths."""
    return {f"tools.{number}": tool for number, tool in enumerate(tools or ())}


def tool_use(tools: ToolsByPath, schema_field: str, types: Collection[str | None] = ("function",)) -> ToolUse:
    """Return the functions among a request's tools, before anything is chosen.

    Tools of other types are left out, since agents send them unasked: the provider's server runs them (`web_search`),
    or its models know them without a schema (`bash_20250124`). The log names each type once.

    Args:
        schema_field: Path of the schema in a tool: its last field, in the field around a function if there is one.
        types: Types of functions in the route's API; None where a tool without a type is a function.
    Raises:
        ApiError: A type is no string, or is missing; or a function has a wrong field.
    """
    wrapper, _, schema = schema_field.rpartition(".")
    functions: dict[str, Json] = {}
    strict: dict[str, bool] = {}
    for path, tool in tools.items():
        kind = tool.get("type")
        if kind not in types:
            _leave_out(kind, path)
            continue
        place = f"{path}.{wrapper}" if wrapper else path
        function = tool.get(wrapper) if wrapper else tool
        if not isinstance(function, Mapping):
            raise wrong(place, "is missing")
        functions[path] = _function_tool({**function, "parameters": function.get(schema)}, place)
        if function.get("strict") is not None:
            strict[function["name"]] = function["strict"]
    return ToolUse([*functions.values()], strict=strict, schema_field=schema_field, paths=[*functions])


def _leave_out(kind: Any, path: str) -> None:
    """Log the type of a tool that is no function, once."""
    if not isinstance(kind, str):
        raise ApiError(400, f"{path}: type {kind!r:.100} is not supported; give functions", param=path)
    if kind not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(kind)
        _logger.warning("tools of type %.100r are left out of prompts: only functions of the client are served", kind)


def chosen(use: ToolUse, choice: str | Mapping[str, Any] | None, is_parallel: bool | None) -> ToolUse:
    """Return what an answer may do with tools.

    Args:
        use: The tools.
        choice: "auto", "none", "required", or the object that names a function.
        is_parallel: Whether it may call several; None is true.
    Raises:
        ApiError: The choice is not served, or there is no tool to choose.
    """
    use = replace(use, is_parallel=is_parallel is not False)
    if choice in (None, "auto"):
        return use
    if choice == "none":
        return ToolUse()  # The model cannot call what the prompt does not show.
    names = [tool["function"]["name"] for tool in use.tools]
    if choice == "required":
        if not names:
            raise wrong("tool_choice", "is 'required', and there are no tools")
        return replace(use, required=names)
    function: Any = None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        words = f"is {str(choice)[:100]!r}; it must be 'auto', 'none', 'required' or a function's name"
        raise wrong("tool_choice", words)
    if name not in names:
        raise wrong("tool_choice", f"names {name[:100]!r}, which tools does not have")
    return replace(use, is_parallel=False, required=[name])
