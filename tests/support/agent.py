"""A script for agents: two tools, and three answers of a model that uses them.

And bodies with fields, tools and blocks that agents send in some of their settings. `tests/serving/agents/` has whole
requests as they were recorded.

Sources: `codex-rs/codex-api/src/common.rs` and `codex-rs/tools` of openai/codex; Claude Code's requests as its users
report them (anthropics/claude-code #31033, #77698; vllm-project/vllm #36829).
"""

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


def _schema(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}


def _item(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


_SHELL = {"type": "function", "name": "exec_command", "description": "Run.", "strict": False}
CODEX: dict[str, Any] = {
    "instructions": "You are Codex.",
    "input": [
        _item("developer", "<permissions instructions>sandbox</permissions instructions>"),
        _item("user", "<environment_context>cwd</environment_context>"),
        _item("user", "Fix it."),
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
    "tools": [
        {**_SHELL, "parameters": _schema("cmd")},
        {**_SHELL, "name": "update_plan", "parameters": _schema("plan")},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
        },
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "Search.", "parameters": _schema("query")},
        {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [{**_SHELL, "name": "find"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "service_tier": "priority",
    "prompt_cache_key": "0199a213",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "a"},
}
_MARKED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"},
        {"type": "text", "text": "You are Claude Code.", **_MARKED},
        {"type": "text", "text": "\nBe short.", **_MARKED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Fix it.", **_MARKED}]},
        {"role": "system", "content": [{"type": "text", "text": "<system-reminder>skills</system-reminder>"}]},
    ],
    "tools": [
        {"name": "Bash", "description": "Run.", "input_schema": _schema("command"), "eager_input_streaming": True},
        {"name": "Deferred", "description": "Later.", "input_schema": _schema("a"), "defer_loading": True},
        {"type": "custom", "name": "Edit", "input_schema": _schema("path"), "input_examples": [{"path": "a"}]},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ],
    "metadata": {"user_id": '{"device_id": "a", "account_uuid": "", "session_id": "b"}'},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 100000}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "stream": True,
}
