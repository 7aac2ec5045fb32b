"""Words with one meaning in docstrings, comments and pages; ruff's D401 checks the imperative mood of docstrings."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.launchers import ROOT
from tests.support.sources import FILES, nodes_of

RULES = {  # banned -> what to write
    r"(?:quanti|normali|seriali|initiali|synchroni|optimi|tokeni|recogni|speciali|randomi)s(?:e|ing|ation)": "z",
    r"\bbehind\b(?! the scenes)": "after, past",
    r"\bstands\b(?! for\b| out\b)": "is, lies",
    r"\bin a row\b": "one after the other",
    r"\b(?:a|an|the|its|their|each|no|one) places?\b": "location, position, rank, slot ...",
    r"\boperators? of torch\b": "custom op",
}
HEADLESS = re.compile(r"(?:Of|What|Where|Whether|Which|Who|Whose|Why|How many|How much|As) ")


def read_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring and comment of a Python file, and of each line of a page."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    yield from read_docstrings(ast.walk(ast.parse(text)))


def read_docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, docstring) of each module, class and function among nodes."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring


def find_faults(text: str) -> list[str]:
    """List the banned phrases in a text, each with what to write."""
    found = [(match[0], better) for banned, better in RULES.items() for match in re.finditer(banned, text, re.I)]
    return [f"{phrase!r}; write {better}" for phrase, better in found]


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_no_banned_phrase() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in [*FILES.values(), *PAGES]
        if find_faults(path.read_text())  # Code may hold such a phrase. Few files need the slow tokenizer.
        for line, text in read_prose(path)
        for fault in find_faults(text)
    ]
    assert not faults, "\n".join(faults)


def test_docstrings_have_a_subject_or_a_verb() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {docstring.splitlines()[0]}"
        for module, path in FILES.items()
        for line, docstring in read_docstrings(nodes_of(module))
        if HEADLESS.match(docstring)
    ]
    assert not faults, "\n".join(["begin with a noun (module, class) or an imperative verb (function):", *faults])


@pytest.mark.parametrize(
    ("text", "num_faults"),
    [
        ("dequantised rows lie behind the last one, in a row", 3),
        ("a place where it stands, by an operator of torch", 3),
        ("in place, after each other; stands for; a stand-in behind the scenes; precise; otherwise quantized", 0),
    ],
)
def test_what_is_found(text: str, num_faults: int) -> None:
    assert len(find_faults(text)) == num_faults


def test_documents_name_code_that_exists() -> None:
    """`file.py: name` in the documents: a file of the project, and a name in it."""
    folders = "dcpmla", "tests", "benchmarks", "launch", "examples"
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    missing, read = [], cache(Path.read_text)
    for document in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for file, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", document.read_text()):
            texts = [read(path) for path in files if path.as_posix().endswith(f"/{file}")]
            if not any(all(re.search(rf"\b{part}\b", text) for part in name.split(".")) for text in texts):
                missing.append((document.name, file, name))
    assert not missing
