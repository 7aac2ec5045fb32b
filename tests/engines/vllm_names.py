"""What a version of vLLM has moved, of the names that a folder of the plug-in takes from it: found in vLLM's files,
which need not be importable.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

Node = ast.stmt


class Name(NamedTuple):
    """A name of vLLM and the module that a file imports it from."""

    module: str
    name: str


def moved(tree: Path, folder: Path) -> list[str]:
    """Return a line for each name, method and argument that a folder of the plug-in uses and the tree of vLLM lacks.

    The folder's files import the names; METHODS in its names.py lists methods and their arguments.
    """
    imports = {local: name for path in sorted(folder.glob("*.py")) for local, name in imported(path).items()}
    lines = [f"{module}.{name} is gone" for module, name in imports.values() if not has(tree, Name(module, name))]
    for owner, methods in read_methods(folder / "names.py").items():
        label = f"{imports[owner].module}.{imports[owner].name}"
        for method, arguments in methods.items():
            function = member_of(tree, imports[owner], method)
            if function is None:
                lines.append(f"{label}.{method} is gone")
                continue
            taken = function.args
            names = {argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
            lines += [f"{label}.{method} has no argument {name}" for name in arguments if name not in names]
    return lines


def uncalled(tree: Path, module: str, names: tuple[str, ...]) -> list[str]:
    """Return a line for each method that a module of vLLM no longer calls."""
    text = source(tree, module)
    if text is None:
        return [f"{module} is gone"]
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    return [f"{module} no longer calls {name}" for name in names if name not in called]


def imported(path: Path) -> dict[str, Name]:
    """Return what a file imports from vLLM, by the names that it has in the file."""
    return {
        alias.asname or alias.name: Name(node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


def read_methods(path: Path) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return METHODS of a file by the names of its owners; none if there is no such file."""
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {key.id: ast.literal_eval(value) for key, value in pairs if isinstance(key, ast.Name)}
    return {}


def has(tree: Path, name: Name) -> bool:
    """Return whether a name can be imported: something that its module defines or imports, or a module."""
    return name.name in definitions(tree, name.module) or source(tree, f"{name.module}.{name.name}") is not None


def source(tree: Path, module: str) -> str | None:
    """Return the text of a module; None if the tree has no such module."""
    path = tree / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text() if file.is_file() else None


@cache
def definitions(tree: Path, module: str) -> dict[str, Node]:
    """Return the statements of a module that define or import something outside of functions and classes, by name."""
    names: dict[str, Node] = {}
    for node in _statements(ast.parse(source(tree, module) or "").body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return names


def _statements(body: list[Node]) -> Iterator[Node]:
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            for inner in getattr(node, field, ()):
                yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def members_of(tree: Path, name: Name) -> set[str]:
    """Return the names that a class assigns in its body: the members of an enumeration."""
    _, node = _definition(tree, name)
    body = node.body if isinstance(node, ast.ClassDef) else []
    assigned = [member for member in body if isinstance(member, ast.Assign)]
    return {target.id for member in assigned for target in member.targets if isinstance(target, ast.Name)}


def member_of(tree: Path, owner: Name, name: str) -> ast.FunctionDef | None:
    """Return a method of a class, or of the first class above it that implements it; or a function of a module."""
    module = f"{owner.module}.{owner.name}"
    if source(tree, module) is not None:
        _, node = _definition(tree, Name(module, name))
        return node if isinstance(node, ast.FunctionDef) else None
    queue = [owner]
    while queue:
        now = queue.pop(0)
        module, node = _definition(tree, now)
        if not isinstance(node, ast.ClassDef):
            continue
        own = [member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == name]
        if own and (now == owner or not _is_abstract(own[-1])):
            return own[-1]
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        queue += [Name(module, base.id) for base in bases if isinstance(base, ast.Name)]
    return None


def _is_abstract(function: ast.FunctionDef) -> bool:
    return isinstance(function.body[-1], ast.Raise) and "NotImplementedError" in ast.unparse(function.body[-1])


def _definition(tree: Path, name: Name) -> tuple[str, Node | None]:
    """Return the statement that defines a name, and its module, through imports."""
    while True:
        node = definitions(tree, name.module).get(name.name)
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            return name.module, node
        (alias,) = (alias for alias in node.names if (alias.asname or alias.name) == name.name)
        name = Name(node.module, alias.name)
