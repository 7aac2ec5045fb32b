"""The package's files: syntax trees, imports and floors. Each file is parsed once."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import dcpmla

PACKAGE = Path(dcpmla.__file__).parent
GROUND_FLOOR = 0  # its files are one room: pure math may use pure math
CORE = 3  # the last floor of the core


def metadata() -> dict[str, Any]:
    """Return what pyproject.toml declares of the package."""
    return tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]


def quoted(text: str) -> list[str]:
    """Return what a page writes in backticks, each on one line."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


def section_of_rooms() -> str:
    """Return the section of docs/structure.md that lists the rooms and their floors."""
    page = (PACKAGE.parent / "docs" / "structure.md").read_text()
    return page.partition("## Floors and rooms\n")[2].partition("\n## ")[0]


def read_rooms() -> dict[str, int]:
    """Return the floor of each first part of a module's name under dcpmla."""
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", section_of_rooms(), re.MULTILINE)
    return {re.sub(r"\.py$|/$", "", name): int(floor) for floor, names in rows for name in quoted(names)}


ROOMS = read_rooms()


def module_name(path: Path) -> str:
    """a/b/__init__.py -> dcpmla.a.b, a/b.py -> dcpmla.a.b"""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["dcpmla", *(parts[:-1] if parts[-1] == "__init__" else parts)])


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def syntax_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(syntax_of(module)))


def resolve(name: str) -> str:
    """Find the module that a dotted name lives in: `dcpmla.config.MLAConfig` -> `dcpmla.config`."""
    while name not in FILES:
        name = name.rpartition(".")[0]
    return name


def imported_names(module: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that nodes of a file import: statements, absolute or relative, and calls of `import_module`."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of the package that a file imports, wherever in the file."""
    return modules_of(imported_names(module, nodes_of(module)))


@cache
def uses_of(module: str) -> frozenset[str]:
    """Modules that a file imports when it runs, not for types alone, and those whose functions it names for `operator`
    and `import_kernel`.
    """
    blocks = [
        node for node in nodes_of(module) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    for_types = {id(node) for block in blocks for child in block.body for node in ast.walk(child)}
    nodes = [node for node in nodes_of(module) if id(node) not in for_types]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    kernels = {text.split(":")[0] for text in texts if re.fullmatch(r"dcpmla(\.\w+)+:\w+", text)}
    return modules_of(imported_names(module, nodes)) | kernels


def packages_of(module: str) -> set[str]:
    """Return the packages that a file imports but its own and Python's."""
    names = imported_names(module, nodes_of(module))
    return {name.split(".")[0] for name in names} - {"dcpmla"} - sys.stdlib_module_names


def modules_of(names: Iterable[str]) -> frozenset[str]:
    return frozenset(resolve(name) for name in names if name.split(".")[0] == "dcpmla")


def room(module: str) -> str:
    return module.split(".")[1]


def may_import(importer: str, imported: str) -> bool:
    """Rooms on floors below, and one's own; the ground floor is one room."""
    if imported == "dcpmla":
        return False  # the list of public names is above everything
    below, above = ROOMS[room(imported)], ROOMS[room(importer)]
    return (
        below < above or room(imported) == room(importer) or (above == below and above in (GROUND_FLOOR, ROOMS["cli"]))
    )


CORE_MODULES = [module for module in FILES if module != "dcpmla" and ROOMS[room(module)] <= CORE]
