"""Custom ops (`torch.ops.dcpmla`): each is one node in a compiled graph, and a plain function elsewhere.

`@operator` turns a function, the reference, into a custom op. Of the arguments of `@operator`, `fake` makes results
without values, for tracing; `kernel` runs instead of the reference where the condition `runs` holds; `mutates_args`
names the arguments that are written. If `kernel` is given, the reference is plain torch, which specifies the kernel and
runs on any device. If it is not, the reference always runs, and may itself choose and launch kernels.

All these functions have the same parameters: at most five, passed by position, without defaults. An operator with more
arguments takes a NamedTuple, which is written once, documents them, and may have defaults. So a parameter's or a
field's type may be a NamedTuple class X, or X | None. A schema has no tuples: the custom op has the fields instead.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, TypeVarTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

Args = TypeVarTuple("Args")
Result = TypeVar("Result")
Layout = tuple[Any, tuple["Layout", ...]] | None  # a NamedTuple class, and its fields' layouts; None for other types


def nothing(*_: object) -> None:
    """Return None: the fake of operators that only write into their arguments."""


def is_on_gpu(*args: Any) -> bool:
    """Return whether an operator's first tensor is on a GPU."""
    return _first(args).is_cuda


def is_float_on_gpu(*args: Any) -> bool:
    """Return whether an operator's first tensor is on a GPU, in bfloat16, float16 or float32."""
    x = _first(args)
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _first(args: Any) -> Tensor:
    while isinstance(args, tuple):
        args = args[0]
    return args


class Operator(Generic[*Args, Result]):
    """A reference and its kernel, and the custom op of both, which has no gradients.

    To dispatch a custom op, torch runs Python: up to 150 us a call on a slow CPU if arguments are mutated, and a layer
    makes a dozen calls. So calls go through it only where they are traced, where a dispatch mode is active, or where
    gradients are enabled: there a backward pass raises the custom op's error.

    Attributes:
        op: The custom op.
        reference: The decorated function.
        kernel: Name of the kernel's launcher, "package.module:function"; None for none.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[[*Args], Result],
        fake: Callable[..., Any],
        kernel: str | None,
        runs: Callable[..., bool],
        mutates_args: Sequence[str],
    ) -> None:
        self.reference, self.kernel, self._runs = reference, kernel, runs
        self.__doc__ = reference.__doc__
        hints, result = get_type_hints(reference), inspect.signature(reference).return_annotation
        del hints["return"]
        self._layouts = tuple(map(_layout_of, hints.values()))
        schema = torch.library.infer_schema(_prototype(_flat(hints), result), mutates_args=mutates_args)
        self.op = torch.library.custom_op(
            f"dcpmla::{name}", self._nested(self._run), mutates_args=mutates_args, schema=schema
        )
        self.op.register_fake(self._nested(fake))

    def __call__(self, *args: *Args) -> Result:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or _get_current_dispatch_mode() is not None:
            return self.op(*self.flatten(*args))
        return self._run(*args)

    def flatten(self, *args: *Args) -> list[Any]:
        """Return the custom op's arguments: the fields of tuples instead of tuples, None for each field of a None."""
        return _flatten(args, self._layouts)

    def _nested(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the reference's parameters as a function of the custom op's arguments."""
        return lambda *fields: function(*_nest(iter(fields), self._layouts))

    def _run(self, *args: *Args) -> Result:
        if self.kernel is not None and self._runs(*args):
            return import_kernel(self.kernel)(*args)
        return self.reference(*args)


def operator(
    name: str,
    *,
    fake: Callable[..., Any],
    kernel: str | None = None,
    runs: Callable[..., bool] = is_float_on_gpu,
    mutates_args: Sequence[str] = (),
) -> Callable[[Callable[[*Args], Result]], Operator[*Args, Result]]:
    """Return a decorator that makes a reference the `Operator` dcpmla::name.

    Args:
        fake: Function that returns tensors of the result's shapes, dtypes and strides.
        kernel: Launcher of the kernel, "package.module:function". It is imported when it runs first, because triton is
            installed on Linux only.
        runs: Function that returns whether the kernel runs.
        mutates_args: Names of the tensors that are written.
    """
    return lambda reference: Operator(name, reference, fake, kernel, runs, mutates_args)


@cache
def import_kernel(name: str) -> Callable[..., Any]:
    """Import the function that "package.module:function" names."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _tuple_class(hint: Any) -> Any:
    """Return the NamedTuple class in a type `X` or `X | None`; None without one."""
    return next((kind for kind in (hint, *get_args(hint)) if hasattr(kind, "_fields")), None)


def _layout_of(hint: Any) -> Layout:
    kind = _tuple_class(hint)
    return None if kind is None else (kind, tuple(map(_layout_of, get_type_hints(kind).values())))


def _flatten(values: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
    fields: list[Any] = []
    for value, layout in zip(values, layouts, strict=True):
        if layout is None:
            fields.append(value)
        else:
            fields += _flatten((None,) * len(layout[1]) if value is None else value, layout[1])
    return fields


def _nest(fields: Iterator[Any], layouts: Sequence[Layout]) -> list[Any]:
    """Return the values whose fields `_flatten` returned."""
    return [next(fields) if layout is None else _tuple_of(layout[0], _nest(fields, layout[1])) for layout in layouts]


def _tuple_of(kind: Any, values: list[Any]) -> Any:
    return None if all(value is None for value in values) else kind(*values)


def _flat(hints: dict[str, Any]) -> dict[str, Any]:
    """Return names and types of the custom op's arguments.

    Raises:
        ValueError: Two arguments have one name.
    """
    fields: dict[str, Any] = {}
    for name, hint in hints.items():
        kind, inner = _tuple_class(hint), {name: hint}
        if kind is not None:
            inner = _flat(get_type_hints(kind))
            inner = inner if hint is kind else {field: each | None for field, each in inner.items()}
        if both := fields.keys() & inner.keys():
            raise ValueError(f"the operator has two arguments named {sorted(both)[0]!r}; rename a field")
        fields |= inner
    return fields


def _prototype(hints: dict[str, Any], result: Any) -> Callable[..., Any]:
    """Return a function that carries a signature to `infer_schema`.

    Its parameters have no defaults, because with torch 2.11 calls failed if mutated arguments had defaults and were
    None.
    """

    def prototype(*args: Any) -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=hint) for name, hint in hints.items()]
    prototype.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return prototype
