"""Tools of /v1/responses, as the functions that a prompt shows, and the items of their calls.

A function in a namespace is shown under both names. A custom tool, which takes a text, is shown as a function with one
argument that is a text.

Source: OpenAI's API reference of responses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpmla.serving.chat.values import object_of
from dcpmla.serving.conversation import text_in
from dcpmla.serving.errors import wrong
from dcpmla.serving.shown import Json
from dcpmla.serving.tools import ToolsByPath

_INPUT = "input"  # the argument of a custom tool


@dataclass(frozen=True)
class ClientTool:
    """A tool under the names by which a client knows it.

    Attributes:
        namespace: Name of its namespace, empty without one.
        is_custom: Whether its input is a text, and no JSON.
    """

    name: str
    namespace: str = ""
    is_custom: bool = False

    def call(self, call_id: str, arguments: str) -> Json:
        """Return the fields of the item of a call, without its id and status."""
        item: Json = {"type": "function_call", "call_id": call_id, "name": self.name}
        if self.namespace:
            item["namespace"] = self.namespace
        if self.is_custom:
            return {**item, "type": "custom_tool_call", "input": input_of(arguments)}
        return {**item, "arguments": arguments}


def input_of(arguments: str) -> str:
    """Return the input of a custom tool, of the arguments of its function: all of them if they are no such JSON."""
    text = (object_of(arguments) or {}).get(_INPUT)
    return text if isinstance(text, str) else arguments


def arguments_with(text: str) -> Json:
    """Return the arguments of a custom tool's function for an input."""
    return {_INPUT: text}


def shown_name(fields: Mapping[str, Any], path: str) -> str:
    """Return the name under which a prompt shows a tool.

    Args:
        fields: A tool, a call or a choice: its `name`, and maybe the `namespace` of that.
        path: Path of the fields in the body.
    Raises:
        ApiError: A name is no string.
    """
    name = text_in(fields, "name", path)
    if fields.get("namespace") is None:
        return name
    return f"{text_in(fields, 'namespace', path).removesuffix('__')}__{name}"


def client_tools(tools: Sequence[Json] | None) -> dict[str, ClientTool]:
    """Return the tools of a body by the names that a prompt shows."""
    return {
        shown_name(tool, path): ClientTool(tool["name"], tool.get("namespace") or "", tool.get("type") == "custom")
        for path, tool in _all_tools(tools)
        if isinstance(tool.get("name"), str)
    }


def functions_of(tools: Sequence[Json] | None) -> ToolsByPath:
    """Return the tools of a body by their paths: functions as prompts show them, and tools of other types as they are.

    Raises:
        ApiError: A namespace or a custom tool has a wrong field, or two tools have the same name.
    """
    functions: dict[str, Json] = {}
    names: set[str] = set()
    for path, tool in _all_tools(tools):
        if tool.get("type") not in ("function", "custom"):
            functions[path] = tool
            continue
        name = shown_name(tool, path)
        if name in names:
            raise wrong(f"{path}.name", f"is {name[:100]!r}, as that of another tool; give each a name of its own")
        names.add(name)
        functions[path] = _custom_function(tool, name) if tool["type"] == "custom" else {**tool, "name": name}
    return functions


def _custom_function(tool: Json, name: str) -> Json:
    """Return the function that stands for a custom tool; its grammar is described, but not enforced."""
    form, description = tool.get("format"), tool.get("description") or ""
    if isinstance(form, dict) and form.get("type") == "grammar":
        description += f"\n\n`{_INPUT}` must follow this {form.get('syntax')} grammar:\n{form.get('definition')}"
    parameters = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


def _all_tools(tools: Sequence[Json] | None) -> Iterator[tuple[str, Json]]:
    """Yield each tool after its path in the body. Tools in a namespace have its name as `namespace`, and the first one
    begins with its description.
    """
    for number, tool in enumerate(tools or ()):
        path = f"tools.{number}"
        if tool.get("type") != "namespace":
            yield path, tool
            continue
        namespace, members = text_in(tool, "name", path), tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise wrong(f"{path}.tools", "must be a list of tools")
        for index, member in enumerate(members):
            about = [tool.get("description"), member.get("description")] if index == 0 else [member.get("description")]
            words = "\n\n".join(text for text in about if isinstance(text, str) and text)
            yield f"{path}.tools.{index}", {**member, "namespace": namespace, "description": words}
