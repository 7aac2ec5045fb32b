"""The documents' tables of options, which `python launch/write_options.py` writes anew."""

import sys
from pathlib import Path

import pytest

from tests.support.launchers import ROOT

pytest.importorskip("pydantic")  # of the fields' table

sys.path.append(str(ROOT / "launch"))
from write_options import render  # noqa: E402

PAGES = [page for page in (ROOT / "docs").glob("*.md") if "<!-- options: " in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_current(page: Path) -> None:
    assert page.read_text() == render(page.read_text())


def test_a_table_has_the_options_of_a_group() -> None:
    assert {page.name for page in PAGES} == {"options.md", "serving.md", "disaggregation.md", "launch.md"}
    text = render("a\n<!-- options: serve, server, port role -->\nold\n<!-- end of options -->\nb\n")
    assert "old" not in text
    assert "| `--port N` | Port to listen on; 0 is any that is free. " in text
    assert "| `--role {both,prefill,decode}` | " in text
    assert text.count("| `--") == 2
    assert text.startswith("a\n<!-- options: serve, server, port role -->\n| option | |\n|---|---|\n| `--port N`")
    assert text.endswith("Default: both. |\n<!-- end of options -->\nb\n")


def test_a_table_has_the_fields_of_http_with_their_values() -> None:
    text = render("a\n<!-- fields -->\nold\n<!-- end of fields -->\nb\n")
    assert text.startswith(
        "a\n<!-- fields -->\n| field | completions | chat | responses | messages | values | |\n|---|"
    )
    assert text.endswith(" |\n<!-- end of fields -->\nb\n")
    assert (
        "| `temperature` | yes | yes | yes | yes | a finite number of at least 0; 1.0 by default | Divisor of " in text
    )
    assert (
        "| `top_k` | yes | yes | 400 | yes | a whole number in [-1, 2147483648] (-1 and 0 are all tokens); 0 " in text
    )
