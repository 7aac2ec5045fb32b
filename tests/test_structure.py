"""The house: what may import what, the public names, the options, what is declared, and that importing it leaves the
process as it was.
"""

import argparse
import ast
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import dcpmla
from dcpmla.__main__ import build_parser
from dcpmla.integrations.engine_options import EngineOptions

PACKAGE = Path(dcpmla.__file__).parent
ROOMS = {  # first part of a module's name under dcpmla -> floor
    "config": 0,
    "fields": 0,
    "hf_quantization": 0,
    "ownership": 0,
    "merge": 0,
    "operators": 0,
    "upload": 0,
    "parallel": 1,
    "cache": 2,
    "comm": 2,
    "attention": 3,
    "model": 4,
    "runtime": 5,
    "planning": 5,
    "job": 5,
    "integrations": 6,
    "llm": 7,
    "extras": 7,
    "serving": 7,
    "cli": 7,
    "bench": 7,
    "__main__": 7,
}
GROUND_FLOOR = 0  # its files are one room: pure math may use pure math
CORE = ROOMS["attention"]  # the last floor of the core


def module_name(path: Path) -> str:
    """a/b/__init__.py -> dcpmla.a.b, a/b.py -> dcpmla.a.b"""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["dcpmla", *(parts[:-1] if parts[-1] == "__init__" else parts)])


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


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


def imports_of(module: str) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in the file."""
    names = imported_names(module, ast.walk(ast.parse(FILES[module].read_text())))
    yield from (resolve(name) for name in names if name.split(".")[0] == "dcpmla")


def uses_of(module: str) -> set[str]:
    """Modules that a file imports when it runs, not for types alone, and those whose functions it names for `operator`
    and `import_kernel`.
    """
    nodes = [*ast.walk(ast.parse(FILES[module].read_text()))]
    blocks = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_types = {id(node) for block in blocks for child in block.body for node in ast.walk(child)}
    nodes = [node for node in nodes if id(node) not in for_types]
    names = {resolve(name) for name in imported_names(module, nodes) if name.split(".")[0] == "dcpmla"}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return names | {text.split(":")[0] for text in texts if re.fullmatch(r"dcpmla(\.\w+)+:\w+", text)}


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


@pytest.mark.parametrize("module", [module for module in FILES if module != "dcpmla"])
def test_a_floor_imports_only_floors_below(module: str) -> None:
    assert room(module) in ROOMS, f"{module} is on no floor"
    wrong = [imported for imported in imports_of(module) if not may_import(module, imported)]
    assert not wrong, f"{module} (floor {ROOMS[room(module)]}) imports {wrong}"


def test_the_reader_of_imports_sees_them_all() -> None:
    assert "dcpmla.config" in set(imports_of("dcpmla.attention.layer"))
    assert "dcpmla.ownership" in set(imports_of("dcpmla.attention.build"))  # `from dcpmla import ownership`
    assert "dcpmla.job.join" in set(imports_of("dcpmla.__main__"))
    assert not may_import("dcpmla.cache.latent", "dcpmla.comm.exchange")
    assert not may_import("dcpmla.runtime.engine", "dcpmla.integrations.transformers")
    assert not may_import("dcpmla.merge", "dcpmla.parallel.mesh")
    assert not may_import("dcpmla.cli.generate", "dcpmla")
    assert may_import("dcpmla.attention.decode", "dcpmla.comm.exchange")


def circle_in(uses: Mapping[str, set[str]]) -> list[str]:
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
    uses = {module: uses_of(module) for module in FILES}
    assert "dcpmla.attention.triton.projections" in uses["dcpmla.attention.projections"]
    assert "dcpmla.comm.direct_reduce" in uses["dcpmla.comm.reduce"]  # inside a function
    assert "dcpmla.model.router" in set(imports_of("dcpmla.model.kernels.router")) - uses["dcpmla.model.kernels.router"]
    uses["dcpmla.attention.triton.projections"].add("dcpmla.attention.projections")
    assert set(circle_in(uses)) == {"dcpmla.attention.triton.projections", "dcpmla.attention.projections"}


CORE_MODULES = [module for module in FILES if module != "dcpmla" and ROOMS[room(module)] <= CORE]


@pytest.mark.parametrize("module", CORE_MODULES)
def test_the_core_uses_no_ring(module: str) -> None:
    """Not inside a function, for types or by a kernel's name either."""
    used = {*imports_of(module), *uses_of(module)}
    assert not {other for other in used if other == "dcpmla" or ROOMS[room(other)] > CORE}


@pytest.mark.parametrize("module", CORE_MODULES)
def test_the_core_needs_torch_triton_and_numpy_alone(module: str) -> None:
    names = imported_names(module, ast.walk(ast.parse(FILES[module].read_text())))
    found = {name.split(".")[0] for name in names} - {"dcpmla"} - sys.stdlib_module_names
    optional = {  # used if installed
        "dcpmla.attention.flashinfer": {"flashinfer"},
        "dcpmla.attention.linear.chunked": {"fla"},
        "dcpmla.comm.reach": {"pynvml"},
    }
    assert found <= {"torch", "triton", "numpy"} | optional.get(module, set())


# Files of DeepSeek-V4, and those that may import them: the table of families, the benchmark of layers.
V4_FILES = (
    r"dcpmla\.(attention\.compressed|bench\.compressed_stack|integrations\.families\.deepseek_v4|model\.(stream|mix))"
)
V4_TABLES = {"dcpmla.integrations.families.table", "dcpmla.bench.layer"}
V4_MODULES = {module for module in FILES if re.match(V4_FILES, module)}
V4_CLASSES = {
    node.name
    for module in V4_MODULES
    for node in ast.walk(ast.parse(FILES[module].read_text()))
    if isinstance(node, ast.ClassDef)
}


def family_questions(source: str) -> list[str]:
    """Lines that ask for a family: a model type that is compared, DeepSeek-V4's by name, an instance of its classes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        is_compared = isinstance(node, ast.Compare) and re.search(r"\.model_type\b", text)
        is_named = isinstance(node, ast.Constant) and node.value == "deepseek_v4"
        is_checked = isinstance(node, ast.Call) and text.startswith("isinstance(")
        if is_compared or is_named or (is_checked and V4_CLASSES & set(re.findall(r"\w+", text))):
            found.append(text)
    return found


@pytest.mark.parametrize("module", [module for module in FILES if module not in V4_MODULES])
def test_families_are_asked_for_in_their_files_alone(module: str) -> None:
    if not module.startswith("dcpmla.integrations.families."):
        assert not family_questions(FILES[module].read_text())
    kernels = {"dcpmla.model.kernels.mix", "dcpmla.model.kernels.streams"}  # DeepSeek-V4's, too
    if module not in V4_TABLES | kernels:
        assert not V4_MODULES & set(imports_of(module))


def test_questions_for_a_family_are_found() -> None:
    assert {"CompressedConfig", "StreamDecoder", "Connection"} <= V4_CLASSES
    assert family_questions('if config.model_type in TYPES or name == "deepseek_v4": pass') == [
        "config.model_type in TYPES",
        "'deepseek_v4'",
    ]
    assert family_questions("isinstance(x, (Decoder, StreamDecoder))")
    assert not family_questions("isinstance(x, Decoder)")


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
MOST_PARAMETERS, MOST_LINES = 12, 80
LARGE_FUNCTIONS = {  # values are reasons
    "dcpmla.attention.decode.mla_decode": "its keywords are the operator's fields, for users",
}


def large_functions(source: str) -> Iterator[str]:
    """Names of functions with too many parameters or lines, but for kernels and for schemas of operators."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = (*names, child.name) if isinstance(child, FUNCTIONS | ast.ClassDef) else names
            if isinstance(child, FUNCTIONS):
                decorators = " ".join(map(ast.unparse, child.decorator_list))
                is_kernel, is_operator = re.search(r"\bjit\b", decorators), decorators.startswith("operator(")
                parameters = parameters_of(child)
                is_long = child.end_lineno - child.lineno >= MOST_LINES
                if not is_kernel and (is_long or (len(parameters) > MOST_PARAMETERS and not is_operator)):
                    yield ".".join(inner)
            yield from visit(child, inner)

    yield from visit(ast.parse(source), ())


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of a function's parameters but self and cls."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [each.arg for each in listed if each is not None and each.arg not in ("self", "cls")]


def test_functions_are_small() -> None:
    large = {f"{module}.{name}" for module, path in FILES.items() for name in large_functions(path.read_text())}
    assert not large - LARGE_FUNCTIONS.keys()
    unused = LARGE_FUNCTIONS.keys() - large
    assert not unused, f"{unused} are small: delete them from LARGE_FUNCTIONS"


def test_large_functions_are_found() -> None:
    few, many = (", ".join(f"x{i}" for i in range(number)) for number in (MOST_PARAMETERS, MOST_PARAMETERS + 1))
    short, long = ("".join(f"    {i}\n" for i in range(number)) for number in (MOST_LINES - 1, MOST_LINES))
    assert not [*large_functions(f"class A:\n  def f(self, {few}):\n{short}")]
    assert [*large_functions(f"class A:\n  async def f(self, {many}): 0")] == ["A.f"]
    assert [*large_functions(f"def f(*, {few}, **rest):\n  def g({many}): 0")] == ["f", "f.g"]
    assert [*large_functions(f"def f():\n{long}")] == ["f"]
    assert not [*large_functions(f"@triton.jit(do_not_specialize=[])\ndef f({many}):\n{long}")]
    assert not [*large_functions(f"@operator('f', fake=nothing)\ndef f({many}): 0")]
    assert [*large_functions(f"@operator('f', fake=nothing)\ndef f({many}):\n{long}")] == ["f"]


def test_public_names() -> None:
    assert dcpmla.__all__ == [
        "LLM",
        "DCPConfig",
        "DCPMesh",
        "DecodeGraph",
        "Engine",
        "EngineOptions",
        "IndexerConfig",
        "LatentCache",
        "MLAAttention",
        "MLAConfig",
        "Placement",
        "SamplingParams",
        "StepBuilder",
        "StepMetadata",
        "StepRequests",
        "dcp_mla_decode",
        "dcp_mla_prefill",
        "init_mesh",
        "load_engine",
        "merge_partials",
        "mla_decode",
        "select_exchange",
    ]
    assert set(dcpmla.__all__) <= set(dir(dcpmla))
    with pytest.raises(AttributeError, match="module 'dcpmla' has no attribute 'LMM'"):
        dcpmla.LMM  # noqa: B018


@pytest.mark.parametrize("name", dcpmla.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(dcpmla, name)
    assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
    assert not thing.__doc__.startswith(f"{name}("), f"{name} has only the signature that dataclass wrote"
    public = (
        [member for key, member in vars(thing).items() if not key.startswith("_")] if inspect.isclass(thing) else []
    )
    for member in public:
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function):
            assert function.__doc__, f"{function.__qualname__} has no docstring"


@pytest.mark.parametrize("module", FILES)
def test_no_rank_unpickles(module: str) -> None:
    """A pickle runs code where it is read. Only the HTTP process reads pickles, and its own rank 0 wrote them."""
    nodes = [*ast.walk(ast.parse(FILES[module].read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    found = {name for name in names if name in pickles or re.search(r"(^|_)object(_list)?$", name)}
    assert found <= ({"pickle"} if module == "dcpmla.serving.messages" else set())


def subcommand(name: str) -> argparse.ArgumentParser:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices[name].filled()


def test_options_of_generate() -> None:
    options = [tuple(action.option_strings) for action in subcommand("generate")._actions]
    assert options == [
        ("-h", "--help"),
        ("--model",),
        ("--revision",),
        ("-tp", "--tensor-parallel-size"),
        ("-dcp", "--decode-context-parallel-size"),
        ("--cp-kv-cache-interleave-size",),
        ("--dcp-comm-backend",),
        ("--dcp-exchange-dtype",),
        ("--dcp-exchange-timeout",),
        ("--dcp-check-exchange",),
        ("--dcp-q-replicate",),
        ("--dcp-project-before-merge",),
        ("--kv-cache-dtype",),
        ("--kv-cache-scale",),
        ("--calculate-kv-scales",),
        ("--decode-query-dtype",),
        ("--index-cache-dtype",),
        ("--index-hadamard",),
        ("--attention-backend",),
        ("--prefill-backend",),
        ("--enable-expert-parallel",),
        ("--block-size",),
        ("--enable-prefix-caching", "--no-enable-prefix-caching"),
        ("--max-num-batched-tokens",),
        ("--max-num-seqs",),
        ("--max-prefill-ms",),
        ("--max-model-len",),
        ("--kv-cache-memory-bytes",),
        ("--gpu-memory-utilization",),
        ("--dtype",),
        ("--expert-dtype",),
        ("--load-format",),
        ("--speculative-method",),
        ("--num-speculative-tokens",),
        ("--enforce-eager",),
        ("--device",),
        ("--timeout",),
        ("--prompt",),
        ("--prompt-ids",),
        ("--prompt-file",),
        ("--output-file",),
        ("--max-new-tokens",),
        ("--temperature",),
        ("--top-p",),
        ("--top-k",),
        ("--seed",),
        ("--stop",),
        ("--stop-token-ids",),
        ("--json",),
        ("--logits",),
    ]


def test_every_field_has_an_option() -> None:
    options = {action.dest for action in subcommand("generate")._actions}
    missing = {field.name for field in (*fields(dcpmla.DCPConfig), *fields(EngineOptions))} - options
    assert missing == {"context_workspace_tokens"}


def test_importing_leaves_the_process_as_it_was() -> None:
    """torch comes first: its effects on a process are not this package's."""
    script = """
import json, logging, os, sys, threading, torch, torch.distributed
def state():
    return {
        "environment": dict(os.environ),
        "cuda": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_initialized(),
        "dtype": str(torch.get_default_dtype()),
        "seed": torch.random.initial_seed(),
        "rng": torch.random.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
        "num threads": torch.get_num_threads(),
        "path": list(sys.path),
        "logging": (logging.root.level, len(logging.root.handlers), logging.root.manager.disable),
        "threads": threading.active_count(),
    }
before = state()
import dcpmla
after = state()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps([changed, sorted(name for name in sys.modules if name.startswith("dcpmla."))]))
"""
    # A variable that the import sets is set in this process already, and would be inherited: hand down what Python
    # needs, no more.
    environment = {
        key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if key in os.environ
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    changed, imported = json.loads(result.stdout)
    assert changed == {}
    assert not [name for name in imported if ROOMS[room(name)] > CORE], "rings are imported on demand"


def test_types_are_for_users_too() -> None:
    assert (PACKAGE / "py.typed").is_file()


def metadata() -> dict[str, Any]:
    return tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]


def third_party() -> set[str]:
    """Collect the packages that any file imports, at its top or inside a function."""
    names: set[str] = set()
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").split(".")[0])
    return names - {"dcpmla"} - sys.stdlib_module_names


def test_what_is_imported_is_declared() -> None:
    distributions = {
        "huggingface_hub": "huggingface-hub",
        "fla": "fla-core",
        "pynvml": "nvidia-ml-py",
        "prometheus_client": "prometheus-client",
    }
    optional = {"flashinfer"}  # used if it is installed
    declared = [*metadata()["dependencies"], *itertools.chain(*metadata()["optional-dependencies"].values())]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
    missing = {distributions.get(name, name) for name in third_party() - optional} - names
    assert not missing


def test_the_core_is_what_an_installation_without_extras_brings() -> None:
    assert {Requirement(text).name for text in metadata()["dependencies"]} == {"torch", "triton", "numpy"}


def test_what_is_installed_is_what_is_declared() -> None:
    """Upper bounds hold, too: nothing is newer than the tested releases."""
    texts = [*metadata()["dependencies"], *metadata()["optional-dependencies"]["engine"]]
    requirements = [Requirement(text) for text in texts]
    assert {"torch", "numpy", "transformers"} <= {requirement.name for requirement in requirements}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(version(requirement.name), prereleases=True), requirement


def test_the_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", dcpmla.__version__)
