"""Imports between files: floors, circles, packages of the core, families of models."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from importlib import import_module

from tests.support.launchers import ROOT
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


def test_a_floor_imports_only_floors_below() -> None:
    """Not inside a function, for types or by a kernel's name either."""
    modules = [module for module in FILES if module != "dcpmla"]
    assert not [module for module in modules if room(module) not in ROOMS], "modules on no floor"
    assert not [
        f"{module} (floor {ROOMS[room(module)]}) imports {imported}"
        for module in modules
        for imported in imports_of(module) | uses_of(module)
        if not may_import(module, imported)
    ]


def test_the_reader_of_imports_sees_them_all() -> None:
    assert "dcpmla.config" in imports_of("dcpmla.attention.mla.layer")
    assert "dcpmla.model.hopper.product" in imports_of("dcpmla.model.kernels.experts")  # `from package import module`
    assert "dcpmla.job.join" in imports_of("dcpmla.__main__")
    assert not may_import("dcpmla.cache.latent", "dcpmla.comm.exchange")
    assert not may_import("dcpmla.runtime.engine", "dcpmla.integrations.transformers")
    assert not may_import("dcpmla.merge", "dcpmla.parallel.mesh")
    assert not may_import("dcpmla.cli.generate", "dcpmla")
    assert may_import("dcpmla.attention.mla.decode", "dcpmla.comm.exchange")


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


def folder(module: str) -> str:
    """Return the folder of a file of attention/, or the file itself outside of folders; kernels are in their folder."""
    parts = module.removeprefix("dcpmla.attention.").split(".")
    return "/".join(parts[:2]) if parts[0] == "layers" else parts[0]


def test_a_folder_of_attention_stands_on_one_floor() -> None:
    """No folder imports one that imports it, not through others either."""
    modules = [module for module in FILES if module.startswith("dcpmla.attention.")]
    uses: dict[str, set[str]] = {folder(module): set() for module in modules}
    for module in modules:
        imported = {folder(each) for each in imports_of(module) if each.startswith("dcpmla.attention.")}
        uses[folder(module)] |= imported - {folder(module)}
    assert {"step", "mla", "select", "layers/compressed", "backends"} <= uses.keys()
    assert not circle_in(uses)


def test_circles_are_found() -> None:
    uses = {module: set(uses_of(module)) for module in FILES}
    assert "dcpmla.attention.triton.projections" in uses["dcpmla.attention.projections"]
    assert "dcpmla.comm.direct_reduce" in uses["dcpmla.comm.reduce"]  # inside a function
    assert "dcpmla.model.router" in imports_of("dcpmla.model.kernels.router") - uses["dcpmla.model.kernels.router"]
    uses["dcpmla.attention.triton.projections"].add("dcpmla.attention.projections")
    assert set(circle_in(uses)) == {"dcpmla.attention.triton.projections", "dcpmla.attention.projections"}


def test_the_core_needs_torch_triton_and_numpy_alone() -> None:
    optional = {  # used if installed
        "dcpmla.attention.backends.flashinfer": {"flashinfer"},
        "dcpmla.attention.layers.linear.kernels.chunks": {"fla"},
        "dcpmla.comm.reach": {"pynvml"},
    }
    needed = {"torch", "triton", "numpy"}
    excess = {module: packages_of(module) - needed - optional.get(module, set()) for module in CORE_MODULES}
    assert not {module: packages for module, packages in excess.items() if packages}


# Those who import DeepSeek-V4 files: the table of families, the benchmark of layers, the plug-in for vLLM.
V4_FILES = (
    r"dcpmla\.(attention\.layers\.compressed|bench\.compressed_stack|integrations\.families\.deepseek_v4|"
    r"integrations\.(vllm|external)\.compressed)"
)
V4_TABLES = {"dcpmla.integrations.families.table", "dcpmla.bench.layer", "dcpmla.integrations.vllm"}
V4_MODULES = {module for module in FILES if re.match(V4_FILES, module)}
V4_CLASSES = {node.name for module in V4_MODULES for node in nodes_of(module) if isinstance(node, ast.ClassDef)}


def family_questions(nodes: Iterable[ast.AST]) -> list[str]:
    """Lines that ask for a family: a model type that is compared, DeepSeek-V4's by name, an instance of its classes."""
    questions = []
    for node in nodes:
        is_named = isinstance(node, ast.Constant) and node.value == "deepseek_v4"
        text = ast.unparse(node) if is_named or isinstance(node, ast.Compare | ast.Call) else ""
        is_compared = isinstance(node, ast.Compare) and re.search(r"\.model_type\b", text)
        is_checked = isinstance(node, ast.Call) and text.startswith("isinstance(")
        if is_compared or is_named or (is_checked and V4_CLASSES & set(re.findall(r"\w+", text))):
            questions.append(text)
    return questions


def test_families_are_asked_for_in_their_files_alone() -> None:
    """What families write in conversations is in the tables of `serving/chat`."""
    modules, apart = FILES.keys() - V4_MODULES, ("dcpmla.integrations.families.", "dcpmla.serving.chat.")
    questions = {module: family_questions(nodes_of(module)) for module in modules if not module.startswith(apart)}
    assert not {module: texts for module, texts in questions.items() if texts}
    imports = {module: V4_MODULES & imports_of(module) for module in modules - V4_TABLES}
    assert not {module: imported for module, imported in imports.items() if imported}


def test_questions_for_a_family_are_found() -> None:
    assert {"CompressedConfig", "CompressedSpec"} <= V4_CLASSES
    source = """
if config.model_type in TYPES or name == "deepseek_v4": isinstance(x, (Decoder, CompressedSpec))
isinstance(x, Decoder)
"""
    assert set(family_questions(ast.walk(ast.parse(source)))) == {
        "config.model_type in TYPES",
        "'deepseek_v4'",
        "isinstance(x, (Decoder, CompressedSpec))",
    }


def in_kernels(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes inside of kernels."""
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            yield from ast.walk(function)


def constants_by_attribute(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the constants that kernels read as attributes of modules."""
    return [
        ast.unparse(node)
        for node in in_kernels(nodes)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"\w+\.[A-Z]\w*[A-Z_]", ast.unparse(node))
    ]


def test_kernels_import_constants_by_name() -> None:
    """Triton's key of a compiled kernel holds no constant that it reads as an attribute of a module."""
    constants = {module: constants_by_attribute(nodes_of(module)) for module in FILES}
    assert not {module: names for module, names in constants.items() if names}
    source = "@gluon.jit\ndef kernel():\n    return consumers.NUM_STAGES + NUM_PROBS"
    assert constants_by_attribute(ast.walk(ast.parse(source))) == ["consumers.NUM_STAGES"]


def variables_of_types(nodes: Iterable[ast.AST]) -> list[str]:
    """Return assignments of element types, in kernels, to names that are no constants."""
    return [
        ast.unparse(node)
        for node in in_kernels(nodes)
        if isinstance(node, ast.Assign)
        for value in (node.value.elts if isinstance(node.value, ast.Tuple) else [node.value])
        if isinstance(value, ast.Attribute) and value.attr in ("dtype", "element_ty", "scalar")
    ]


def test_types_in_kernels_are_constants() -> None:
    """Triton 3.6 takes no others; 3.9 does, with which most tests of kernels run."""
    variables = {module: variables_of_types(nodes_of(module)) for module in FILES}
    assert not {module: lines for module, lines in variables.items() if lines}
    source = "@triton.jit\ndef kernel(x):\n    at, type = 1, x.dtype.element_ty\n    kind: tl.constexpr = x.dtype"
    assert variables_of_types(ast.walk(ast.parse(source))) == ["at, type = (1, x.dtype.element_ty)"]


def unpickling_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names of modules and functions with which nodes of a file could read pickles."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    return {name for name in names if name in pickles or re.search(r"(^|_)object(_list)?$", name)}


def test_no_process_unpickles() -> None:
    """A pickle runs code where it is read. No process reads any, the HTTP process and its worker included."""
    unpickling = {module: unpickling_names(nodes_of(module)) for module in FILES}
    assert not {module: names for module, names in unpickling.items() if names}


_OF_OWNERS = {"dcp_rank", "dcp_size", "interleave", "cp_kv_cache_interleave_size"}


def takes_owner_in_parts(function: ast.FunctionDef) -> bool:
    """Return whether a function has two or three numbers of an `Owner` as parameters, whose order may be mistaken."""
    names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    return len(names & _OF_OWNERS) > 1


def test_owners_are_one_argument() -> None:
    """Not those of kernels, to which a launcher passes an owner's numbers in order (`*owner`)."""
    assert not [
        f"{module}:{node.lineno} {node.name}"
        for module in FILES
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef) and takes_owner_in_parts(node) and ".kernels." not in module
    ]


def test_owners_in_parts_are_found() -> None:
    code = "def a(x, dcp_rank, *, dcp_size): ...\ndef b(dcp_rank, dcp): ...\ndef c(rank, size): ..."
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    assert [takes_owner_in_parts(function) for function in functions] == [True, False, False]


def test_names_that_functions_of_tests_import_are_there() -> None:
    """Functions for GPUs alone import what they need when they run, which is not here."""
    missing = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = (isinstance(node, ast.ImportFrom) and node.module) or ""
            if module.startswith("tests.") and ".engines" not in module:
                files = ROOT / module.replace(".", "/")
                missing += [
                    f"{path.name}:{node.lineno}: {module} has no {alias.name}"
                    for alias in node.names
                    if not hasattr(import_module(module), alias.name) and not (files / f"{alias.name}.py").exists()
                ]
    assert not missing
