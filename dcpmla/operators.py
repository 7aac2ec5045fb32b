"""Custom ops (`torch.ops.dcpmla`): one node each in a compiled graph, plain functions elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

Result = TypeVar("Result")
Fake = TypeVar("Fake", bound=Callable[..., Any])


class Operator(Generic[Result]):
    """A function, and the custom op of it, which has no gradients.

    torch's dispatcher takes a custom op through Python, up to 150 us a call on a slow CPU where arguments are mutated,
    and a layer has a dozen. So calls go through it only where they are traced, where a mode watches what is
    dispatched, or where a gradient must be refused.

    Attributes:
        op: the custom op.
    """

    def __init__(self, name: str, function: Callable[..., Result], mutates_args: Sequence[str]) -> None:
        self.op = torch.library.custom_op(f"dcpmla::{name}", function, mutates_args=mutates_args)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or _get_current_dispatch_mode() is not None:
            return self.op(*args, **kwargs)
        return self._function(*args, **kwargs)

    def register_fake(self, fake: Fake) -> Fake:
        """Take a function that makes tensors of the shapes and dtypes that come back; return it."""
        self.op.register_fake(fake)
        return fake


def operator(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Result]], Operator[Result]]:
    """Return a decorator that makes a function the `Operator` dcpmla::name.

    Args:
        mutates_args: the tensors that it writes into.
    """
    return lambda function: Operator(name, function, mutates_args)
