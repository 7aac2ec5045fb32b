"""Write the documents' tables of options from the commands' options, most of which are fields of dataclasses.

python launch/write_options.py            writes the tables between the marks of each page
python launch/write_options.py --check    ends with 1 if a page differs
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dcpmla.__main__ import build_parser

ROOT = Path(__file__).resolve().parents[1]
# <!-- options: COMMAND, TITLE OF A GROUP --> or, for some options alone, <!-- options: COMMAND, TITLE, FIELD FIELD -->
_MARKED = re.compile(r"(<!-- options: (\w+), ([\w ]+)(?:, ([\w ]+))? -->\n).*?(<!-- end of options -->\n)", re.DOTALL)


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


if __name__ == "__main__":
    main()
