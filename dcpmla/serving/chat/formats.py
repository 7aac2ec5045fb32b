"""Formats of answers: one for each family of models, found by its type and its chat template."""

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpmla.serving.chat.events import AnswerParser
from dcpmla.serving.chat.markup import Markup, Parameters
from dcpmla.serving.chat.parser import MarkupParser

_ALPHANUMERIC = string.ascii_letters + string.digits
_KIMI_ID = re.compile(r"functions\..+:\d+", re.DOTALL)
_NAME = re.compile(r"(?P<name>\S+)")
_THINK = ("<think>", "</think>")


def _random_id(name: str, written: str | None, number: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def _kimi_id(name: str, written: str | None, number: int) -> str:
    """Return the id that the model wrote, which its template repeats, or an id of the same form."""
    return written if written and _KIMI_ID.fullmatch(written) else f"functions.{name}:{number}"


def _mistral_id(name: str, written: str | None, number: int) -> str:
    """Return the id that the model wrote, or nine characters, as its template requires."""
    if written and len(written) == 9 and written.isascii() and written.isalnum():
        return written
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a family's answers.

    Attributes:
        name: vLLM's name of its parser.
        make_id: Function of the function's name, the id that the model wrote (None if it wrote none) and the number
            of calls before this one that returns the call's id.
    """

    name: str
    markup: Markup
    make_id: Callable[[str, str | None, int], str] = _random_id

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        in_reasoning: bool,
        parses_calls: bool,
        parses_reasoning: bool,
        first_call: int = 0,
    ) -> AnswerParser:
        """Return a parser of one answer.

        Args:
            tools: Tools of the request, as OpenAI's API has them. Calls of other functions are text; without tools,
                all functions may be called.
            in_reasoning: Whether the prompt opened the reasoning, so that the answer begins inside it.
            parses_calls: Whether calls are parsed; otherwise their markup is text.
            parses_reasoning: Whether reasoning is parsed; otherwise its markup is content.
            first_call: Number of calls in the conversation before this answer, which ids of Kimi count.
        """
        functions = [tool.get("function") or {} for tool in tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions if "name" in function}
        return MarkupParser(
            self.markup,
            schemas,
            self.make_id,
            in_reasoning=in_reasoning,
            parses_calls=parses_calls,
            parses_reasoning=parses_reasoning,
            first_call=first_call,
        )


def _deepseek(header_end: str, prefix: str = "") -> Markup:
    """Return the markup of DeepSeek V3 and V3.1: arguments in JSON, a token for each boundary."""
    return Markup(
        reasoning=_THINK,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=(f"<｜tool▁call▁begin｜>{prefix}", "<｜tool▁call▁end｜>"),
        header=_NAME,
        stops=(header_end,),
        consumed=header_end,
    )


def _dsml(section: str, space: str = "") -> Markup:
    """Return the markup of DeepSeek V3.2 and later.

    Args:
        section: Name of the element around calls.
        space: Text between the token DSML and the name of an element.
    """
    open_, close = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    key = re.compile(r'(?P<key>.*?)" string="(?P<type>true|false)">', re.DOTALL)
    return Markup(
        reasoning=_THINK,
        section=(f"{open_}{section}>", f"{close}{section}>"),
        call=(f'{open_}invoke name="', f"{close}invoke>"),
        header=_NAME,
        stops=('">',),
        consumed='">',
        parameters=Parameters(f'{open_}parameter name="', key, f"{close}parameter>", string_type="true"),
        before_calls="\n\n",
    )


def _tagged(prefix: str = "", wraps: bool = False, separator: str = "") -> Markup:
    """Return the markup of GLM, LongCat and Ling: a tag around a call, tags around keys and values.

    Args:
        prefix: Beginning of the tags' names.
        wraps: Whether a call may be a JSON object instead.
        separator: Text between reasoning, content and calls.
    """
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    key = re.compile(rf"(?P<key>.*?)</{prefix}arg_key>\s*<{prefix}arg_value>", re.DOTALL)
    return Markup(
        reasoning=(f"<{prefix}think>", f"</{prefix}think>"),
        call=(start, end),
        header=_NAME,
        stops=(f"<{prefix}arg_key>", end),
        parameters=Parameters(f"<{prefix}arg_key>", key, f"</{prefix}arg_value>"),
        wraps=wraps,
        before_calls=separator,
        after_reasoning=separator,
    )


_KIMI_K2 = Markup(
    reasoning=_THINK,
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    header=re.compile(r"(?P<id>(?:functions\.)?(?P<name>\S+?)(?::\d+)?)"),
    stops=("<|tool_call_argument_begin|>",),
    consumed="<|tool_call_argument_begin|>",
)
_KIMI_K3 = Markup(
    reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    call=('<|open|>call tool="', "<|close|>call<|sep|>"),
    header=re.compile(r'(?P<name>[^\s"]+)"(?: index="\d+")?'),
    stops=("<|sep|>",),
    consumed="<|sep|>",
    parameters=Parameters(
        '<|open|>argument key="',
        re.compile(r'(?P<key>[^"]*)" type="(?P<type>\w+)"<\|sep\|>'),
        "<|close|>argument<|sep|>",
        string_type="string",
        escapes=True,
    ),
    dropped=(
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
    ),
)
_MISTRAL = Markup(
    reasoning=("[THINK]", "[/THINK]"),
    call=("[TOOL_CALLS]", ""),
    header=re.compile(r"(?P<name>[^\s\[\]]+)(?:\[CALL_ID\](?P<id>\w+))?"),
    stops=("[ARGS]", "{"),
    consumed="[ARGS]",
)

FORMATS: Mapping[str, AnswerFormat] = {
    each.name: each
    for each in (
        AnswerFormat("deepseek_v3", _deepseek("```json", prefix="function<｜tool▁sep｜>")),
        AnswerFormat("deepseek_v31", _deepseek("<｜tool▁sep｜>")),
        AnswerFormat("deepseek_v32", _dsml("function_calls")),
        AnswerFormat("deepseek_v4", _dsml("tool_calls")),
        AnswerFormat("deepseek_v41", _dsml("calls", space=" ")),
        AnswerFormat("kimi_k2", _KIMI_K2, _kimi_id),
        AnswerFormat("kimi_k3", _KIMI_K3),
        AnswerFormat("glm45", _tagged(separator="\n")),
        AnswerFormat("glm47", _tagged()),
        AnswerFormat("longcat", _tagged("longcat_", wraps=True)),
        AnswerFormat("mistral", _MISTRAL, _mistral_id),
        AnswerFormat("ling", _tagged(wraps=True, separator="\n")),
    )
}

# Markup in a template, and its format; the first that the template has counts.
_MARKS = (
    ("｜DSML｜ calls", "deepseek_v41"),
    ("｜DSML｜tool_calls", "deepseek_v4"),
    ("｜DSML｜function_calls", "deepseek_v32"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|open|>", "kimi_k3"),
    ("<longcat_tool_call>", "longcat"),
    ("[TOOL_CALLS]", "mistral"),
    ("\\n<tool_call>' +", "glm45"),
    ("<arg_key>", "glm47"),
    ("<tool_call>", "ling"),
)
# Formats of types whose template does not show them, or is absent.
_TYPES = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v41",
    "kimi_k2": "kimi_k2",
    "kimi_k25": "kimi_k2",
    "kimi_linear": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "glm4_moe_lite": "glm47",
    "glm_moe_dsa": "glm47",
    "glm5_next": "glm47",
    "longcat_flash": "longcat",
    "mistral3": "mistral",
    "mistral4": "mistral",
    "mistral_large4": "mistral",
    "bailing_hybrid": "ling",
}


def find_format(model_type: str, chat_template: str | None) -> AnswerFormat | None:
    """Return the format of a model, None if it is unknown.

    The markup of calls in the template decides, then the type.

    Args:
        model_type: Field `model_type` of the model's config.
        chat_template: The model's template, or the text of the checkpoint's own encoder; None if it has neither.
    """
    template = chat_template or ""
    if "<｜tool▁sep｜>" in template:
        return FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    by_mark = next((name for mark, name in _MARKS if mark in template), None)
    name = by_mark or _TYPES.get(model_type.removesuffix("_text"))
    return FORMATS[name] if name is not None else None
