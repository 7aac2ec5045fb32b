"""Names of code in the pages on structure, kernels and benchmarks exist, and the tables of rooms have every file."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dcpmla.bench.results import unknown_fields
from tests.support.launchers import ROOT
from tests.support.sources import (
    CORE_MODULES,
    FILES,
    PACKAGE,
    ROOMS,
    module_name,
    nodes_of,
    quoted,
    room,
    section_of_rooms,
)

PAGES = "structure.md", "kernels.md", "benchmarks.md"
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))
PATH = r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|sh|md)"
OTHERS = r"\b(?:True|False)\b|\b(?:torch|gl|mbarrier|cp)(?:\.\w+)+(?:\([^)]*\))?"  # of Python, torch, Gluon and PTX
OPTION = r"(?<![\w-])--?[a-z][\w-]*"


def read_page(name: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", (ROOT / "docs" / name).read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def files_of(path: str) -> tuple[Path, ...]:
    """Find files or folders by their path in the package, the repository or its benchmarks, or by the end of it in the
    package.
    """
    found = [file for file in (PACKAGE / path, ROOT / path, ROOT / "benchmarks" / path) if file.exists()]
    if not found:
        found = [file for file in PACKAGE.rglob(Path(path).name) if file.as_posix().endswith(f"/{path.rstrip('/')}")]
    return tuple(file for file in found if file.is_dir() or not path.endswith("/"))


@cache
def all_nodes() -> tuple[ast.AST, ...]:
    """Return the nodes of the syntax trees of the package and of the scripts of benchmarks/."""
    scripts = [node for file in SCRIPTS for node in ast.walk(ast.parse(file.read_text()))]
    return (*(node for module in FILES for node in nodes_of(module)), *scripts)


def targets_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that one node of a syntax tree defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Return the names that a file defines, in any scope."""
    nodes = nodes_of(module_name(file)) if PACKAGE in file.parents else ast.walk(ast.parse(file.read_text()))
    return frozenset(name for node in nodes for name in targets_of(node))


@cache
def all_defined() -> frozenset[str]:
    """Return the names that package and scripts define: classes, functions, parameters, attributes, modules."""
    stems = {part for module in FILES for part in module.split(".")}
    return frozenset(stems.union(name for node in all_nodes() for name in targets_of(node)))


@cache
def all_values() -> frozenset[str]:
    """Return options, their values, and names of other packages that package and scripts import or call with."""
    nodes = all_nodes()
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {node.arg or "" for node in nodes if isinstance(node, ast.keyword)}
    names |= {node.name for node in nodes if isinstance(node, ast.alias)}
    options = re.findall(r"`(--?[a-z][\w-]*)", (ROOT / "docs" / "options.md").read_text())
    return frozenset({text for text in texts if re.fullmatch(r"[\w+ -]+", text)} | names | set(options))


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return members and bases of the package's classes by name; classes of one name are taken together."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for node in (node for module in FILES for node in nodes_of(module) if isinstance(node, ast.ClassDef)):
        members, bases = found.setdefault(node.name, (set(), set()))
        members.update(name for child in ast.walk(node) for name in targets_of(child))
        bases.update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
    return found


def has_member(kind: str, name: str) -> bool:
    """Return whether a class or one of its bases has a member."""
    members, bases = classes().get(kind, ((), ()))
    return name in members or any(has_member(base, name) for base in bases if base != kind)


def is_defined(name: str) -> bool:
    """Return whether a name, or each of a dotted name, is the package's: `Class.member`, `module.name`, `value`."""
    first, *others = name.split(".")
    if first not in all_defined():
        return not others and first in all_values()
    return all(has_member(first, other) if first in classes() else other in all_defined() for other in others)


def faults_in(path: str, names: str) -> list[str]:
    """List what is wrong with a path, or with the names after it that its file must define."""
    files = files_of(path)
    if not files:
        return [f"no file {path}"]
    defined = frozenset[str]().union(*(defined_in(file) for file in files if file.suffix == ".py"))
    missing = [name for name in re.findall(r"[\w.]+", names) if not defined.issuperset(name.split("."))]
    return [f"no {name} in {path}" for name in missing]


def faults_of(text: str) -> list[str]:
    """List the names in a quotation that do not exist; it may be a value, or a field of a result's row."""
    if text in all_values() or not unknown_fields([{text: None}]):
        return []
    if kernel := re.fullmatch(r'"([\w.]+):(\w+)"', text):
        is_there = kernel[1] in FILES and kernel[2] in defined_in(FILES[kernel[1]])
        return [] if is_there else [f"no kernel {text}"]
    if path := re.fullmatch(rf"({PATH})(?:: ([\w., ]+))?", text):
        return faults_in(path[1], path[2] or "")
    if re.match(r"python |launch/|benchmarks/", text):
        return [fault for path in re.findall(PATH, text) for fault in faults_in(path, "")]
    options = [option.replace("--no-", "--") for option in re.findall(OPTION, text)]
    names = re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", re.sub(f"{OPTION}|{OTHERS}", "", text))
    # Benchmarks name an option as its field.
    missing = [option for option in options if not {option, option[2:].replace("-", "_")} & all_values()]
    return [f"no {name}" for name in [*missing, *(name for name in names if not is_defined(name))]]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_is_there(page: str) -> None:
    texts = quoted(read_page(page))
    assert len(texts) > 100
    assert not {text: faults for text in texts if (faults := faults_of(text))}


def test_names_that_are_not_there_are_found() -> None:
    there = ["Engine.add", "attention/step/table.py: StepTable", "attention/select/", "--enforce-eager", "ag_rs"]
    assert not [fault for text in there for fault in faults_of(text)]
    missing = {
        "Engine.jump": ["no Engine.jump"],
        "NoSuchClass": ["no NoSuchClass"],
        "attention/table.py": ["no file attention/table.py"],
        "attention/step/table.py: Stack": ["no Stack in attention/step/table.py"],
        "attention/chosen/": ["no file attention/chosen/"],
        "--such-option": ["no --such-option"],
        '"dcpmla.merge:merge_all"': ['no kernel "dcpmla.merge:merge_all"'],
        "launch/no_test.sh gpu": ["no file launch/no_test.sh"],
    }
    assert {text: faults_of(text) for text in missing} == missing


def test_the_rooms_are_those_of_the_package() -> None:
    """One table has all rooms with their floors, another the folders of the core that have no line of a room."""
    assert ROOMS.keys() == {room(module) for module in FILES if module != "dcpmla"}
    folders = {FILES[module].parent for module in CORE_MODULES if FILES[module].name != "__init__.py"}
    paths = {folder.relative_to(PACKAGE).as_posix().removesuffix("kernels").rstrip("/") for folder in folders}
    listed = {name.rstrip("/") for name in quoted(section_of_rooms())}
    assert not paths - listed - {"."}
