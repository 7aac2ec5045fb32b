"""Formats of answers: one for each family of models, found by its type and its chat template."""

import re
import secrets
import string
from collections.abc import Mapping

from dcpmla.serving.chat.markup import AnswerFormat, Tags

_ALPHANUMERIC = string.ascii_letters + string.digits
_KIMI_ID = re.compile(r"functions\..+:\d+", re.DOTALL)
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


def _kimi_id(name: str, written: str | None, number: int) -> str:
    """Return the id that the model wrote, which its template repeats, or an id of the same form."""
    return written if written and _KIMI_ID.fullmatch(written) else f"functions.{name}:{number}"


def _mistral_id(name: str, written: str | None, number: int) -> str:
    """Return the id that the model wrote, or nine characters, as its template requires."""
    if written and len(written) == 9 and written.isascii() and written.isalnum():
        return written
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _dsml(name: str, section: str, space: str = "") -> AnswerFormat:
    """Return the format of DeepSeek V3.2 and later.

    Args:
        section: Name of the element around calls.
        space: Text between the token DSML and the name of an element.
    """
    open_, close = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return AnswerFormat(
        name=name,
        marks=(f"｜DSML｜{space}{section}",),
        types=(name,),
        section=(f"\n\n{open_}{section}>\n", f"\n{close}{section}>"),
        between="\n",
        call=(f'{open_}invoke name="', f"\n{close}invoke>"),
        header_end='">',
        tags=Tags(
            f'\n{open_}parameter name="',
            '" string="{type}">',
            f"{close}parameter>",
            re.compile(r'(?P<key>.*?)" string="(?P<type>true|false)">', re.DOTALL),
            {**dict.fromkeys(_TYPES, "false"), "string": "true"},
        ),
    )


def _tagged(
    name: str,
    mark: str,
    types: tuple[str, ...] = (),
    *,
    prefix: str = "",
    line: str = "",
    separator: str = "",
    wraps: bool = False,
) -> AnswerFormat:
    """Return a format of GLM, LongCat or Ling: a tag around a call, tags around keys and values.

    Args:
        mark, types: Attributes of `AnswerFormat`.
        prefix: Beginning of the tags' names.
        line: Text after a name, a key and a value.
        separator: Text between reasoning, content and calls.
    """
    key = re.compile(rf"(?P<key>.*?)</{prefix}arg_key>\s*<{prefix}arg_value>", re.DOTALL)
    middle = f"</{prefix}arg_key>{line}<{prefix}arg_value>"
    return AnswerFormat(
        name=name,
        marks=(mark,),
        types=types,
        reasoning=(f"<{prefix}think>", f"</{prefix}think>"),
        after_reasoning=separator,
        call=(f"{separator}<{prefix}tool_call>", f"</{prefix}tool_call>"),
        header_end=line,
        tags=Tags(f"<{prefix}arg_key>", middle, f"</{prefix}arg_value>{line}", key),
        wraps=wraps,
    )


# The first format whose marks a template has is the template's.
FORMATS: Mapping[str, AnswerFormat] = {
    each.name: each
    for each in (
        AnswerFormat(
            name="deepseek_v3",
            marks=("<｜tool▁sep｜>", "```json"),
            types=("deepseek_v3",),
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            between="\n",
            call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            header_end="\n```json\n",
            after_arguments="\n```",
        ),
        AnswerFormat(
            name="deepseek_v31",
            marks=("<｜tool▁sep｜>",),
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            header_end="<｜tool▁sep｜>",
        ),
        _dsml("deepseek_v41", "calls", space=" "),
        _dsml("deepseek_v4", "tool_calls"),
        _dsml("deepseek_v32", "function_calls"),
        AnswerFormat(
            name="kimi_k2",
            marks=("<|tool_calls_section_begin|>",),
            types=("kimi_k2", "kimi_k25", "kimi_linear"),
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call=("<|tool_call_begin|>", "<|tool_call_end|>"),
            header=re.compile(r"(?P<id>(?:functions\.)?(?P<name>\S+?)(?::\d+)?)"),
            before_name="functions.",
            numbering=":{number}",
            header_end="<|tool_call_argument_begin|>",
            make_id=_kimi_id,
        ),
        AnswerFormat(
            name="kimi_k3",
            marks=("<|open|>",),
            types=("kimi_k3",),
            reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            content=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            ends=("<|close|>message<|sep|>", "<|end_of_msg|>"),
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            call=('<|open|>call tool="', "<|close|>call<|sep|>"),
            header=re.compile(r'(?P<name>[^\s"]+)"(?: index="\d+")?'),
            numbering='" index="{number}"',
            header_end="<|sep|>",
            tags=Tags(
                '<|open|>argument key="',
                '" type="{type}"<|sep|>',
                "<|close|>argument<|sep|>",
                re.compile(r'(?P<key>[^"]*)" type="(?P<type>\w+)"<\|sep\|>'),
                {**{kind: kind for kind in _TYPES}, "integer": "number"},
                escapes=True,
            ),
        ),
        _tagged("longcat", "<longcat_tool_call>", ("longcat_flash",), prefix="longcat_", line="\n", wraps=True),
        AnswerFormat(
            name="mistral",
            marks=("[TOOL_CALLS]",),
            types=("mistral3", "mistral4", "mistral_large4"),
            reasoning=("[THINK]", "[/THINK]"),
            call=("[TOOL_CALLS]", ""),
            header=re.compile(r"(?P<name>[^\s\[\]]+)(?:\[CALL_ID\](?P<id>\w+))?"),
            header_end="[ARGS]",
            stops_too="{",
            make_id=_mistral_id,
        ),
        _tagged("glm45", "\\n<tool_call>' +", line="\n", separator="\n"),
        _tagged("glm47", "<arg_key>", ("glm4_moe_lite", "glm_moe_dsa", "glm5_next")),
        _tagged("ling", "<tool_call>", ("bailing_hybrid",), line="\n", separator="\n", wraps=True),
    )
}


def find_format(model_type: str, chat_template: str | None) -> AnswerFormat | None:
    """Return the format of a model, None if it is unknown.

    The markup of calls in the template decides, then the type.

    Args:
        model_type: Field `model_type` of the model's config.
        chat_template: The model's template, or the text of the checkpoint's own encoder; None if it has neither.
    """
    template, kind = chat_template or "", model_type.removesuffix("_text")
    by_marks = (each for each in FORMATS.values() if all(mark in template for mark in each.marks))
    by_type = (each for each in FORMATS.values() if kind in each.types)
    return next(by_marks, None) or next(by_type, None)
