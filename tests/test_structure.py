"""Imports between files: floors, circles, packages of the core, families of models."""

import ast
import re
from collections.abc import Iterable, Mapping, Set
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.sources import (
    CORE_MODULES,
    FILES,
    ROOMS,
    imports_of,
    may_import,
    nodes_of,
    packages_of,
    room,
    uses_of,
)


@pytest.mark.parametrize("module", [module for module in FILES if module != "dcpmla"])
def test_a_floor_imports_only_floors_below(module: str) -> None:
    """Not inside a function, for types or by a kernel's name either."""
    assert room(module) in ROOMS, f"{module} is on no floor"
    wrong = [imported for imported in imports_of(module) | uses_of(module) if not may_import(module, imported)]
    assert not wrong, f"{module} (floor {ROOMS[room(module)]}) imports {wrong}"


def test_the_reader_of_imports_sees_them_all() -> None:
    assert "dcpmla.config" in imports_of("dcpmla.attention.layer")
    assert "dcpmla.ownership" in imports_of("dcpmla.attention.build")  # `from dcpmla import ownership`
    assert "dcpmla.job.join" in imports_of("dcpmla.__main__")
    assert not may_import("dcpmla.cache.latent", "dcpmla.comm.exchange")
    assert not may_import("dcpmla.runtime.engine", "dcpmla.integrations.transformers")
    assert not may_import("dcpmla.merge", "dcpmla.parallel.mesh")
    assert not may_import("dcpmla.cli.generate", "dcpmla")
    assert may_import("dcpmla.attention.decode", "dcpmla.comm.exchange")


def circle_in(uses: Mapping[str, Set[str]]) -> list[str]:
    """Modules of a circle; each uses the next."""
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_imports_have_no_circle() -> None:
    """Imports inside functions count, and so do kernels by name: no kernel imports what specifies or launches it."""
    assert not circle_in({module: uses_of(module) for module in FILES})


def test_circles_are_found() -> None:
    uses = {module: set(uses_of(module)) for module in FILES}
    assert "dcpmla.attention.triton.projections" in uses["dcpmla.attention.projections"]
    assert "dcpmla.comm.direct_reduce" in uses["dcpmla.comm.reduce"]  # inside a function
    assert "dcpmla.model.router" in imports_of("dcpmla.model.kernels.router") - uses["dcpmla.model.kernels.router"]
    uses["dcpmla.attention.triton.projections"].add("dcpmla.attention.projections")
    assert set(circle_in(uses)) == {"dcpmla.attention.triton.projections", "dcpmla.attention.projections"}


@pytest.mark.parametrize("module", CORE_MODULES)
def test_the_core_needs_torch_triton_and_numpy_alone(module: str) -> None:
    optional = {  # used if installed
        "dcpmla.attention.flashinfer": {"flashinfer"},
        "dcpmla.attention.linear.kernels.chunks": {"fla"},
        "dcpmla.comm.reach": {"pynvml"},
    }
    assert packages_of(module) <= {"torch", "triton", "numpy"} | optional.get(module, set())


# Those who import DeepSeek-V4 files: the table of families, the benchmark of layers, the plug-in for vLLM.
V4_FILES = (
    r"dcpmla\.(attention\.compressed|bench\.compressed_stack|integrations\.families\.deepseek_v4|"
    r"integrations\.vllm\.compressed)"
)
V4_TABLES = {"dcpmla.integrations.families.table", "dcpmla.bench.layer", "dcpmla.integrations.vllm"}
V4_MODULES = {module for module in FILES if re.match(V4_FILES, module)}
V4_CLASSES = {node.name for module in V4_MODULES for node in nodes_of(module) if isinstance(node, ast.ClassDef)}


def family_questions(nodes: Iterable[ast.AST]) -> list[str]:
    """Lines that ask for a family: a model type that is compared, DeepSeek-V4's by name, an instance of its classes."""
    questions = []
    for node in nodes:
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        is_compared = isinstance(node, ast.Compare) and re.search(r"\.model_type\b", text)
        is_named = isinstance(node, ast.Constant) and node.value == "deepseek_v4"
        is_checked = isinstance(node, ast.Call) and text.startswith("isinstance(")
        if is_compared or is_named or (is_checked and V4_CLASSES & set(re.findall(r"\w+", text))):
            questions.append(text)
    return questions


@pytest.mark.parametrize("module", [module for module in FILES if module not in V4_MODULES])
def test_families_are_asked_for_in_their_files_alone(module: str) -> None:
    """What families write in conversations is in the tables of `serving/chat`."""
    if not module.startswith(("dcpmla.integrations.families.", "dcpmla.serving.chat.")):
        assert not family_questions(nodes_of(module))
    if module not in V4_TABLES:
        assert not V4_MODULES & imports_of(module)


def test_questions_for_a_family_are_found() -> None:
    assert {"CompressedConfig", "CompressedKind"} <= V4_CLASSES
    source = """
if config.model_type in TYPES or name == "deepseek_v4": isinstance(x, (Decoder, CompressedKind))
isinstance(x, Decoder)
"""
    assert set(family_questions(ast.walk(ast.parse(source)))) == {
        "config.model_type in TYPES",
        "'deepseek_v4'",
        "isinstance(x, (Decoder, CompressedKind))",
    }


@pytest.mark.parametrize("module", FILES)
def test_no_rank_unpickles(module: str) -> None:
    """A pickle runs code where it is read. Only the HTTP process reads pickles, and its own rank 0 wrote them."""
    nodes = nodes_of(module)
    names = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    unpickling = {name for name in names if name in pickles or re.search(r"(^|_)object(_list)?$", name)}
    assert unpickling <= ({"pickle"} if module == "dcpmla.serving.messages" else set())
