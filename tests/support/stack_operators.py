"""Operators of a stack's steps, and of the parts that `bench layer` times."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dcpmla.bench.stack import Stack


def operators_of(stack: Stack) -> tuple[Counter[str], Counter[str]]:
    """Operators of a whole step of two layers, and of its parts together, without what the residual adds."""
    operations = stack.operations()
    with _Operators() as whole:
        operations["total"](0)
    with _Operators() as parts:
        for part in stack.parts:
            operations[part](0)
    return whole.names - Counter({"aten.add.Tensor": 2}), parts.names


class _Operators(TorchDispatchMode):
    """A counter of operators that compute or move; views are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns
        )
        if not is_view:
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))
