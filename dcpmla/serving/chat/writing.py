"""Tool calls as the families' templates write them: the texts around names and arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_JSON_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True)
class Tags:
    """Texts around arguments that are written one after the other.

    Attributes:
        start: Text before a value, with `{key}` and maybe `{type}`.
        end: Text after a value.
        types: Word for each type of JSON, in place of `{type}`; empty if types are not written.
        escapes: Whether a key has `&amp;` and `&quot;` in place of `&` and `"`.
    """

    start: str
    end: str
    types: Mapping[str, str] = field(default_factory=dict)
    escapes: bool = False


@dataclass(frozen=True)
class Form:
    """A form of one call.

    Attributes:
        start: Text between the call's opening and the arguments, with `{name}` and maybe `{number}`, any number.
        end: Text after the arguments.
        tags: Texts around arguments; None if they are a JSON object.
    """

    start: str
    end: str
    tags: Tags | None = None


@dataclass(frozen=True)
class Writing:
    """Calls of a family.

    Attributes:
        before, between, after: Texts before the first call, between two, and after the last.
        opening: Text with which every call begins.
        forms: Forms of a call after its opening.
        content_start: Text between the reasoning and the content.
        content_end: Text after content without calls, which may be missing.
    """

    opening: str
    forms: tuple[Form, ...]
    before: str = ""
    between: str = ""
    after: str = ""
    content_start: str = ""
    content_end: str = ""


def _dsml(section: str, space: str = "") -> Writing:
    open_, close = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    types = {name: "true" if name == "string" else "false" for name in _JSON_TYPES}
    tags = Tags(f'\n{open_}parameter name="{{key}}" string="{{type}}">', f"{close}parameter>", types)
    return Writing(
        f'{open_}invoke name="',
        (Form('{name}">', f"\n{close}invoke>", tags),),
        before=f"\n\n{open_}{section}>\n",
        between="\n",
        after=f"\n{close}{section}>",
    )


def _tagged(prefix: str = "", line: str = "", before: str = "", wraps: bool = False) -> Writing:
    """Return calls of GLM, LongCat and Ling.

    Args:
        prefix: Beginning of the tags' names.
        line: Text after a name, a key and a value.
        before: Text before a call.
        wraps: Whether a call may be a JSON object instead.
    """
    end = f"</{prefix}tool_call>"
    key = f"<{prefix}arg_key>{{key}}</{prefix}arg_key>{line}<{prefix}arg_value>"
    forms = [Form(f"{{name}}{line}", end, Tags(key, f"</{prefix}arg_value>{line}"))]
    if wraps:
        forms.append(Form('\n{{"name": "{name}", "arguments": ', f"}}\n{end}"))
    return Writing(f"{before}<{prefix}tool_call>", tuple(forms))


_K3_TYPES = {**{name: name for name in _JSON_TYPES}, "integer": "number"}
_K3_TAGS = Tags(
    '<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>", _K3_TYPES, escapes=True
)

# `formats.FORMATS` has the same names.
WRITINGS: Mapping[str, Writing] = {
    "deepseek_v3": Writing(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        (Form("{name}\n```json\n", "\n```<｜tool▁call▁end｜>"),),
        before="<｜tool▁calls▁begin｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Writing(
        "<｜tool▁call▁begin｜>",
        (Form("{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),),
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", space=" "),
    "kimi_k2": Writing(
        "<|tool_call_begin|>functions.",
        (Form("{name}:{number}<|tool_call_argument_begin|>", "<|tool_call_end|>"),),
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "kimi_k3": Writing(
        '<|open|>call tool="',
        (Form('{name}" index="{number}"<|sep|>', "<|close|>call<|sep|>", _K3_TAGS),),
        before="<|close|>response<|sep|><|open|>tools<|sep|>",
        after="<|close|>tools<|sep|><|close|>message<|sep|>",
        content_start="<|open|>response<|sep|>",
        content_end="<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "glm45": _tagged(line="\n", before="\n"),
    "glm47": _tagged(),
    "longcat": _tagged("longcat_", line="\n", wraps=True),
    "mistral": Writing("[TOOL_CALLS]", (Form("{name}[ARGS]", ""),)),
    "ling": _tagged(line="\n", before="\n", wraps=True),
}
