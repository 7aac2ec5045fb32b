"""Sizes of functions."""

import ast
import re
from collections.abc import Iterator

from tests.support.sources import FILES, syntax_of

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
MOST_PARAMETERS, MOST_LINES = 12, 80
LARGE_FUNCTIONS: dict[str, str] = {}  # reasons


def large_functions(syntax: ast.Module) -> Iterator[str]:
    """Names of functions with too many parameters or lines, but for kernels."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = (*names, child.name) if isinstance(child, FUNCTIONS | ast.ClassDef) else names
            if isinstance(child, FUNCTIONS):
                decorators = " ".join(map(ast.unparse, child.decorator_list))
                is_long = child.end_lineno - child.lineno >= MOST_LINES
                has_many = len(parameters_of(child)) > MOST_PARAMETERS
                if not re.search(r"\bjit\b", decorators) and (is_long or has_many):
                    yield ".".join(inner)
            yield from visit(child, inner)

    yield from visit(syntax, ())


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of a function's parameters but self and cls."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [each.arg for each in listed if each is not None and each.arg not in ("self", "cls")]


def test_functions_are_small() -> None:
    large = {f"{module}.{name}" for module in FILES for name in large_functions(syntax_of(module))}
    assert not large - LARGE_FUNCTIONS.keys()
    unused = LARGE_FUNCTIONS.keys() - large
    assert not unused, f"{unused} are small: delete them from LARGE_FUNCTIONS"


def large(source: str) -> list[str]:
    return [*large_functions(ast.parse(source))]


def test_large_functions_are_found() -> None:
    few, many = (", ".join(f"x{i}" for i in range(number)) for number in (MOST_PARAMETERS, MOST_PARAMETERS + 1))
    short, long = ("".join(f"    {i}\n" for i in range(number)) for number in (MOST_LINES - 1, MOST_LINES))
    assert not large(f"class A:\n  def f(self, {few}):\n{short}")
    assert large(f"class A:\n  async def f(self, {many}): 0") == ["A.f"]
    assert large(f"def f(*, {few}, **rest):\n  def g({many}): 0") == ["f", "f.g"]
    assert large(f"def f():\n{long}") == ["f"]
    assert not large(f"@triton.jit(do_not_specialize=[])\ndef f({many}):\n{long}")
    assert large(f"@operator('f', fake=nothing)\ndef f({many}): 0") == ["f"]
