"""Write the documents' tables of options from the commands' options, most of which are fields of dataclasses, the table
of vLLM's other options, the table of metrics, and the table of the fields of HTTP that have the same descriptions as
options.

python launch/write_options.py            writes the tables between the marks of each page
python launch/write_options.py --check    ends with 1 if a page differs
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from pydantic import BaseModel

from dcpmla.__main__ import build_parser
from dcpmla.cli.field_options import texts_of
from dcpmla.cli.vllm_options import VLLM_OPTIONS
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.anthropic_body import MessagesBody
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.metric_names import METRICS
from dcpmla.serving.protocol import CompletionBody
from dcpmla.serving.responses_body import ResponsesBody
from dcpmla.serving.sampling_fields import DEFAULTS, Ruled

ROOT = Path(__file__).resolve().parents[1]
# <!-- options: COMMAND, TITLE OF A GROUP --> or, for some options alone, <!-- options: COMMAND, TITLE, FIELD FIELD -->
_MARKED = re.compile(r"(<!-- options: (\w+), ([\w ]+)(?:, ([\w ]+))? -->\n).*?(<!-- end of options -->\n)", re.DOTALL)
_OF_VLLM = re.compile(r"<!-- vllm options -->\n.*?(<!-- end of vllm options -->\n)", re.DOTALL)
_METRICS = re.compile(r"<!-- metrics -->\n.*?(<!-- end of metrics -->\n)", re.DOTALL)
_FIELDS = re.compile(r"<!-- fields -->\n.*?(<!-- end of fields -->\n)", re.DOTALL)
_BODIES: dict[str, type[BaseModel]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
}


def main() -> None:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the pages with the options")
    is_check = parser.parse_args().check
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        if (written := render(text)) == text:
            continue
        if is_check:
            sys.exit(f"{page} differs from the options: run launch/write_options.py")
        page.write_text(written)


def render(text: str) -> str:
    """Return the text of a page with its tables written anew."""

    def write(found: re.Match[str]) -> str:
        head, command, title, names, end = found.groups()
        return "\n".join([f"{head}| option | |", "|---|---|", *_rows(command, title, (names or "").split()), end])

    head = [f"<!-- fields -->\n| field | {' | '.join(_BODIES)} | values | |", "|---|---|---|---|---|---|---|"]
    text = _FIELDS.sub(lambda found: "\n".join([*head, *_field_rows(), found[1]]), text)
    vllm = ["<!-- vllm options -->\n| options of vLLM | | |", "|---|---|---|"]
    text = _OF_VLLM.sub(lambda found: "\n".join([*vllm, *_vllm_rows(), found[1]]), text)
    metrics = ["<!-- metrics -->\n| metric | labels | in vLLM | |", "|---|---|---|---|"]
    text = _METRICS.sub(lambda found: "\n".join([*metrics, *_metric_rows(), found[1]]), text)
    return _MARKED.sub(write, text)


def _rows(command: str, title: str, names: list[str]) -> Iterator[str]:
    """Yield a row for each option of a command in a group of its help.

    Args:
        names: Names of the fields; none for all.
    """
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    (group,) = (group for group in commands.choices[command].filled()._action_groups if group.title == title)
    for action in group._group_actions:
        if not names or action.dest in names:
            values = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
            usage = " ".join([", ".join(action.option_strings), *([str(values)] if values else [])])
            text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", (action.help or "") % {"default": action.default})
            yield f"| `{usage}{' ...' if action.nargs == '+' else ''}` | {text} |"


def _vllm_rows() -> Iterator[str]:
    """Yield a row for the options of vLLM that are treated alike: what is taken, and why or what to use instead."""
    rows: dict[tuple[str, str], list[str]] = {}
    for option in VLLM_OPTIONS:
        same = " or ".join(f"`{each}`" for each in option.same)
        if option.is_ignored:
            taken = "without effect"
        elif option.is_flag:
            taken = "always so; `--no-...` is refused" if same == "`on`" else "refused"
        else:
            taken = f"{same}; others are refused" if same else "refused"
        words = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", option.words)
        rows.setdefault((taken, words), []).extend(f"`{name}`" for name in option.names)
    for (taken, words), names in rows.items():
        yield f"| {', '.join(names)} | {taken} | {words} |"


def _metric_rows() -> Iterator[str]:
    """Yield a row for each metric: its names and labels here and in vLLM, and its text."""
    for name, metric in METRICS.items():
        end = "_total" if metric.kind == "counter" else ""
        in_vllm = ", ".join(f"`vllm:{each}{end}`" for each in metric.vllm)
        if metric.vllm_labels != metric.labels and metric.vllm:
            in_vllm += f" with {', '.join(f'`{label}`' for label in metric.vllm_labels)}"
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `dcpmla_{name}{end}` | {labels} | {in_vllm} | {metric.text} |"


def _field_rows() -> Iterator[str]:
    """Yield a row for each field of HTTP that a rule checks: the routes that have it, its values and its text."""
    values = {name: _values_of(name) for kind in _BODIES.values() for name in kind.model_fields}
    classes = [SamplingParams, *(each for kind in _BODIES.values() for each in reversed(kind.__mro__))]
    texts = {name: text for each in classes for name, text in texts_of(each).items()}
    defaults = {field.name: field.default for field in fields(SamplingParams)} | DEFAULTS
    for name, words in values.items():
        if words:
            cells = ("yes" if name in kind.model_fields else "400" for kind in _BODIES.values())
            default = "" if defaults.get(name) in (None, ()) else f"; {json.dumps(defaults[name])} by default"
            yield f"| `{name}` | {' | '.join(cells)} | {words}{default} | {texts[name]} |"


def _values_of(name: str) -> str:
    """Return the words of the rule of a field of HTTP, none without a rule."""
    checks = (each for kind in _BODIES.values() if (field := kind.model_fields.get(name)) for each in field.metadata)
    return next((each.rule.words for each in checks if isinstance(each, Ruled)), "")


if __name__ == "__main__":
    main()
