"""Custom ops (`torch.ops.dcpmla`): each is one node in a compiled graph, and a plain function elsewhere.

`@operator` turns a function, the reference, into a custom op. Of the arguments of `@operator`, `fake` makes results
without values, for tracing; `kernel` runs instead of the reference where the condition `runs` holds; `mutates_args`
names the arguments that are written. If `kernel` is given, the reference is plain torch, which specifies the kernel and
runs on any device. If it is not, the reference always runs, and may itself choose and launch kernels.

A parameter's type may be a NamedTuple class X, or X | None, and a field's type X. A schema has no tuples, so the custom
op has the fields as arguments, which the reference's signature does not repeat. Callers pass tuples by position.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

Result = TypeVar("Result")


def nothing() -> None:
    """Return None: the fake of operators that only write into their arguments."""


class Operator(Generic[Result]):
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
        reference: Callable[..., Result],
        fake: Callable[..., Any],
        kernel: str | None,
        runs: Callable[..., bool] | None,
        mutates_args: Sequence[str],
    ) -> None:
        self.reference, self.kernel = reference, kernel
        self._runs = None if runs is None else _take_named(runs, reference)
        self.__doc__ = reference.__doc__
        parameters = inspect.signature(reference).parameters
        self._tuples = {key: kind for key in parameters if (kind := _tuple_class(parameters[key].annotation))}
        self._names = tuple(parameters)
        self._num_fields = {key: len(_fields_of(kind)) for key, kind in self._tuples.items()}
        schema = torch.library.infer_schema(_with_fields(reference, self._tuples), mutates_args=mutates_args)
        run, fake = self._nest(self._run), self._nest(_take_named(fake, reference))
        self.op = torch.library.custom_op(f"dcpmla::{name}", run, mutates_args=mutates_args, schema=schema)
        self.op.register_fake(fake)

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or _get_current_dispatch_mode() is not None:
            return self.op(*(self._flatten(args) if self._tuples else args), **kwargs)
        return self._run(*args, **kwargs)

    def _flatten(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the arguments with the fields of tuples instead of tuples; for None, a None for each field."""
        fields: list[Any] = []
        for key, value in zip(self._names, args, strict=False):
            if key not in self._tuples:
                fields.append(value)
            else:
                fields.extend((None,) * self._num_fields[key] if value is None else _values_of(value))
        return fields

    def _nest(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the reference's parameters as a function of the custom op's arguments."""
        if not self._tuples:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            values, first = [], 0
            for key in self._names:
                if first == len(args):
                    break  # other parameters have defaults, or are named
                kind = self._tuples.get(key)
                fields = args[first : first + self._num_fields.get(key, 1)]
                is_none = all(field is None for field in fields)
                values.append(fields[0] if kind is None or is_none else _nested(kind, iter(fields)))
                first += len(fields)
            return function(*values, **kwargs)

        return call

    def _run(self, *args: Any, **kwargs: Any) -> Result:
        if self.kernel is not None and (
            _is_float_on_gpu(args[0]) if self._runs is None else self._runs(*args, **kwargs)
        ):
            return import_kernel(self.kernel)(*args, **kwargs)
        return self.reference(*args, **kwargs)


def operator(
    name: str,
    *,
    fake: Callable[..., Any],
    kernel: str | None = None,
    runs: Callable[..., bool] | None = None,
    mutates_args: Sequence[str] = (),
) -> Callable[[Callable[..., Result]], Operator[Result]]:
    """Return a decorator that makes a reference the `Operator` dcpmla::name.

    Args:
        fake: Function that returns tensors of the result's shapes, dtypes and strides. It has some of the operator's
            parameters, by name.
        kernel: Launcher of the kernel, "package.module:function", with the reference's parameters. It is imported when
            it runs first, because triton is installed on Linux only.
        runs: Function of some of the operator's parameters, like `fake`, that returns whether the kernel runs. By
            default it runs if the first argument is on a GPU, in bfloat16, float16 or float32.
        mutates_args: Names of the tensors that are written.
    """
    return lambda reference: Operator(name, reference, fake, kernel, runs, mutates_args)


@cache
def import_kernel(name: str) -> Callable[..., Any]:
    """Import the function that "package.module:function" names."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _is_float_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _tuple_class(annotation: Any) -> Any:
    """Return the NamedTuple class in an annotation `X` or `X | None`; None without one."""
    return next(filter(_is_tuple, (annotation, *get_args(annotation))), None)


def _is_tuple(kind: Any) -> bool:
    return hasattr(kind, "_fields")


@cache  # A compiled graph asks at each call of an operator.
def _hints_of(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(name, hints[name]) for name in kind._fields]


def _fields_of(kind: Any) -> list[tuple[str, Any]]:
    """Return the names and types of a NamedTuple class's fields; an inner tuple counts as its own fields."""
    return [each for field in _hints_of(kind) for each in (_fields_of(field[1]) if _is_tuple(field[1]) else [field])]


def _values_of(value: Any) -> list[Any]:
    """Return the values of a tuple's fields, in the order of `_fields_of`."""
    parts = (_values_of(field) if isinstance(field, tuple) and _is_tuple(field) else [field] for field in value)
    return [each for part in parts for each in part]


def _nested(kind: Any, values: Iterator[Any]) -> Any:
    """Return a tuple of a class from the values of `_values_of`."""
    return kind(*(_nested(hint, values) if _is_tuple(hint) else next(values) for _, hint in _hints_of(kind)))


def _with_fields(reference: Callable[..., Any], tuples: dict[str, Any]) -> Callable[..., Any]:
    """Return a function with the reference's signature and the fields of tuples instead of tuples.

    Fields have no defaults, because with torch 2.11 calls failed if mutated arguments had defaults and were None.
    """
    signature, parameters = inspect.signature(reference), []
    for parameter in signature.parameters.values():
        if (kind := tuples.get(parameter.name)) is None:
            parameters.append(parameter)
            continue
        for name, annotation in _fields_of(kind):
            annotation = annotation if parameter.annotation is kind else annotation | None
            parameters.append(inspect.Parameter(name, parameter.kind, annotation=annotation))

    def prototype(*args: Any) -> None:
        """Carry a signature to `infer_schema`."""

    prototype.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return prototype


def _take_named(function: Callable[..., Result], reference: Callable[..., Any]) -> Callable[..., Result]:
    """Wrap `function`, which has some of the reference's parameters, as a function of all parameters.

    Raises:
        ValueError: `function` has a parameter that the reference has not.
    """
    parameters, names = inspect.signature(reference).parameters, list(inspect.signature(function).parameters)
    if unknown := set(names) - set(parameters):
        raise ValueError(f"fake or runs takes {sorted(unknown)}; {reference.__name__} has {', '.join(parameters)}")
    defaults = {name: parameters[name].default for name in parameters}

    def call(*args: Any, **kwargs: Any) -> Result:
        values = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        return function(*(values[name] for name in names))

    return call
