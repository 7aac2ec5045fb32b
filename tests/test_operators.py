"""Operators: when torch's dispatcher sees a call."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcpmla.operators import operator


class Dispatched(TorchDispatchMode):
    """The names of the operators of this package that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "dcpmla":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@operator("add_of_tests_", mutates_args=("total",))
def add_(total: Tensor, x: Tensor) -> Tensor:
    """Add x to total; return their product."""
    total += x
    return total * x


@add_.register_fake
def _(total: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("mode", "is_dispatched"),
    [(torch.inference_mode, False), (torch.no_grad, False), (torch.enable_grad, True), (Dispatched, True)],
)
def test_who_needs_the_dispatcher(mode: type, is_dispatched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, op = [], add_.op
    monkeypatch.setattr(add_, "op", lambda *args: calls.append(args) or op(*args))
    total, x = torch.ones(3), torch.full((3,), 2.0)
    with torch.no_grad(), mode():
        product = add_(total, x)
    assert (total.tolist(), product.tolist()) == ([3.0] * 3, [6.0] * 3)
    assert len(calls) == is_dispatched


@torch.no_grad()
def test_modes_see_operators() -> None:
    with Dispatched() as dispatched:
        add_(torch.ones(3), torch.ones(3))
    assert dispatched.names == ["dcpmla::add_of_tests_"]


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
