"""Operators: when torch's dispatcher sees a call, when a kernel runs, and the entries of the package."""

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dcpmla
from dcpmla.operators import Operator, import_kernel, nothing, operator

PACKAGE = Path(dcpmla.__file__).parent
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "operators.py" and "dcpmla.operators import" in path.read_text()
]


MOST_PARAMETERS = 5  # more are fields of a NamedTuple


class Dispatched(TorchDispatchMode):
    """The names of the operators of this package that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "dcpmla":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@operator("add_of_tests_", fake=lambda _, x: torch.empty_like(x), mutates_args=("total",))
def add_(total: Tensor, x: Tensor) -> Tensor:
    """Add x to total; return their product."""
    total += x
    return total * x


@pytest.mark.parametrize(
    ("mode", "is_dispatched"),
    [(torch.inference_mode, False), (torch.no_grad, False), (torch.enable_grad, True), (Dispatched, True)],
)
def test_who_needs_the_dispatcher(mode: type, is_dispatched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, op = [], add_.op
    monkeypatch.setattr(add_, "op", lambda *args: calls.append(args) or op(*args))
    total, x = torch.ones(3), torch.full((3,), 2.0)
    with torch.no_grad(), mode() as seen:
        product = add_(total, x)
    assert (total.tolist(), product.tolist()) == ([3.0] * 3, [6.0] * 3)
    assert len(calls) == is_dispatched
    assert mode is not Dispatched or seen.names == ["dcpmla::add_of_tests_"]


def test_a_gradient_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="backward"):
        add_(torch.ones(3), x).sum().backward()


@torch.no_grad()
def test_a_graph_has_one_node() -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    total = torch.ones(3)
    product = torch.compile(lambda total, x: add_(total, x) + 1, backend=keep, fullgraph=True)(total, torch.ones(3))
    assert (total.tolist(), product.tolist()) == ([2.0] * 3, [3.0] * 3)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "dcpmla" in name] == ["dcpmla.add_of_tests_.default"]


def test_the_kernel_runs_where_the_entry_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    kernels = SimpleNamespace(scale=lambda *args: calls.append(args) or "from the kernel")
    monkeypatch.setitem(sys.modules, "kernels_of_tests", kernels)

    def scale(x: Tensor, factor: float, offset: float) -> Tensor:
        return x * factor + offset

    entry = {"fake": lambda x, *_: torch.empty_like(x), "kernel": "kernels_of_tests:scale"}
    scaled = operator("scale_of_tests", **entry, runs=lambda x, _, offset: x.dtype == torch.half and offset == 1)(scale)
    x = torch.ones(2)
    with torch.no_grad():
        assert scaled(x, 3.0, 1.0).tolist() == [4.0, 4.0]
        assert scaled(x.half(), 3.0, 2.0).tolist() == [5.0, 5.0]
        assert not calls
        assert scaled(x.half(), 3.0, 1.0) == "from the kernel"
        assert [call[1:] for call in calls] == [(3.0, 1.0)]
        by_default = operator("scale_of_tests_by_default", **entry)(scale)
        assert by_default(x, 3.0, 1.0).tolist() == [4.0, 4.0]  # on a CPU
    torch.library.opcheck(by_default.op, (x, 3.0, 2.0))


def test_the_shared_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats of at most 32 bits on a GPU."""
    monkeypatch.setitem(sys.modules, "kernels_of_tests", SimpleNamespace(double=lambda x: "kernel"))
    double = operator("double_of_tests", fake=nothing, kernel="kernels_of_tests:double")(_reference)
    taken = torch.bfloat16, torch.float16, torch.float32
    with torch.no_grad():
        for dtype in (*taken, torch.float64, torch.int32):
            for is_cuda in (True, False):
                x = SimpleNamespace(dtype=dtype, is_cuda=is_cuda)
                assert double(x) == ("kernel" if is_cuda and dtype in taken else "reference")


def _reference(x: Tensor) -> Tensor:
    return "reference"  # type: ignore[return-value]


def test_two_fields_of_one_name_are_refused() -> None:
    def scale(x: Tensor, scaled: Scaled) -> Tensor:
        return x

    with pytest.raises(ValueError, match="two arguments named 'x'"):
        operator("wrong_of_tests", fake=nothing)(scale)


class Scaled(NamedTuple):
    x: Tensor
    factor: float = 2.0


class Offset(NamedTuple):
    total: Tensor
    offset: int


def _empty_sum(scaled: Scaled, *_: object) -> Tensor:
    return torch.empty_like(scaled.x)


@operator("add_tuples_of_tests_", fake=_empty_sum, mutates_args=("total",))
def add_tuples_(scaled: Scaled, offset: Offset | None, sign: int) -> Tensor:
    """Scale x; add the offset to total, and total to the result."""
    out = sign * scaled.factor * scaled.x
    if offset is None:
        return out
    offset.total.add_(offset.offset)
    return out + offset.total


@pytest.mark.parametrize("mode", [torch.no_grad, Dispatched])
def test_fields_of_tuples_are_arguments_and_arrive_whole(mode: type) -> None:
    schema = "(Tensor x, float factor, Tensor(a2!)? total, SymInt? offset, SymInt sign) -> Tensor"
    assert str(add_tuples_.op._opoverload._schema) == f"dcpmla::add_tuples_of_tests_{schema}"
    for arguments in ((torch.ones(3), 2.0, torch.ones(3), 3, 1), (torch.ones(3), 2.0, None, None, -1)):
        torch.library.opcheck(add_tuples_.op, arguments)
    total = torch.ones(3)
    with torch.no_grad(), mode():
        assert add_tuples_(Scaled(torch.ones(3)), Offset(total, 3), 1).tolist() == [6.0] * 3
        assert add_tuples_(Scaled(torch.ones(3), 3.0), None, -1).tolist() == [-3.0] * 3
    assert total.tolist() == [4.0] * 3


class Shifted(NamedTuple):
    scaled: Scaled
    offset: Offset | None = None


@operator("shift_of_tests_", fake=lambda call: torch.empty_like(call.scaled.x), mutates_args=("total",))
def shift_(call: Shifted) -> Tensor:
    """Compute `add_tuples_` of one tuple."""
    assert type(call) is Shifted
    assert type(call.scaled) is Scaled
    return add_tuples_.reference(call.scaled, call.offset, 1)


@pytest.mark.parametrize("mode", [torch.no_grad, Dispatched])
def test_inner_tuples_are_flat_in_a_schema_and_may_be_none(mode: type) -> None:
    schema = "(Tensor x, float factor, Tensor(a2!)? total, SymInt? offset) -> Tensor"
    assert str(shift_.op._opoverload._schema) == f"dcpmla::shift_of_tests_{schema}"
    total = torch.ones(3)
    with torch.no_grad(), mode():
        assert shift_(Shifted(Scaled(torch.ones(3)), Offset(total, 3))).tolist() == [6.0] * 3
        assert shift_(Shifted(Scaled(torch.ones(3)))).tolist() == [2.0] * 3
    for arguments in ((torch.ones(3), 2.0, torch.ones(3), 3), (torch.ones(3), 2.0, None, None)):
        torch.library.opcheck(shift_.op, arguments)


@torch.no_grad()
def test_tuples_in_a_graph() -> None:
    def both(x: Tensor, total: Tensor) -> Tensor:
        return add_tuples_(Scaled(x, factor=3.0), Offset(total, 3), 1) + add_tuples_(Scaled(x), None, 1)

    total = torch.ones(3)
    result = torch.compile(both, backend="aot_eager", fullgraph=True)(torch.ones(3), total)
    assert (result.tolist(), total.tolist()) == ([9.0] * 3, [4.0] * 3)


def calls_in(tree: ast.Module) -> list[ast.Call]:
    """Return the calls of `operator` in a file, which are its entries."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "operator"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_entries(path: Path) -> None:
    """A kernel takes what the reference takes. Fakes and questions for a GPU are in entries alone."""
    if "import triton" in path.read_text():
        pytest.importorskip("triton")
    tree = ast.parse(path.read_text())
    calls = calls_in(tree)
    names = [ast.literal_eval(call.args[0]) for call in calls]
    module = import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    found = {value.op._name: value for value in vars(module).values() if isinstance(value, Operator)}
    for name in names:
        wanted = inspect.signature(found[name].reference)
        assert len(wanted.parameters) <= MOST_PARAMETERS, name
        assert all(parameter.default is parameter.empty for parameter in wanted.parameters.values()), name
        if (kernel := found[name].kernel) is not None:
            pytest.importorskip("triton")
            got = inspect.signature(import_kernel(kernel))
            assert [*got.parameters.values()] == [*wanted.parameters.values()], name
            assert got.return_annotation == wanted.return_annotation, name
    inside = {id(node) for call in calls for node in ast.walk(call)}
    outside = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in inside}
    assert "register_fake" not in outside
    assert not calls or "is_cuda" not in outside


def test_there_are_entries() -> None:
    assert sum(len(calls_in(ast.parse(path.read_text()))) for path in FILES) >= 40


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_fakes_keep_sizes_symbolic(path: Path) -> None:
    """`len` of a tensor is a number of the first batch, for which a compiled graph would then be made."""
    tree = ast.parse(path.read_text())
    fakes = [keyword.value for call in calls_in(tree) for keyword in call.keywords if keyword.arg == "fake"]
    names = {fake.id for fake in fakes if isinstance(fake, ast.Name)}
    bodies = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    called = [node.func for body in [*fakes, *bodies] for node in ast.walk(body) if isinstance(node, ast.Call)]
    assert not {name.id for name in called if isinstance(name, ast.Name)} & {"len", "int"}
