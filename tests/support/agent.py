"""A script for agents: two tools, and three answers of a model that uses them."""

import json
from typing import Any

TEMPLATE = """{% for tool in tools or [] %}<|system|>{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{%- set function = call.function %}{"name": "{{ function.name }}", "arguments": {{ function.arguments }}}</tool_call>
{%- endfor %}
{%- if m.tool_call_id %} [{{ m.tool_call_id }}]{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '</think>' if thinking is defined and not thinking else '<think>' }}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SUM = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer(prompt: str) -> str:
    """Ask for the weather of two cities, then for the sum of the temperatures, then answer."""
    results = prompt.count("<|tool|>")
    thinks = prompt.endswith("<think>")
    if "<|system|>" not in prompt:
        return ("so so</think>" if thinks else "") + "hello<|pad|> you"
    if results == 0:
        return "two cities</think>I look. " + call("weather", city="Bärlin") + call("weather", city="Rome")
    if results == 2:
        return "now add</think>" + call("add", a=3, b=20)
    return "done</think>It is 23."


def run(name: str, arguments: dict[str, Any]) -> str:
    return str(arguments["a"] + arguments["b"]) if name == "add" else {"Bärlin": "3", "Rome": "20"}[arguments["city"]]
