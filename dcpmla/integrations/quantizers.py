"""Quantizations that a graph of torch.compile asks of vLLM's operators, rewritten as calls of this package's.

Operators are recognized by name and argument names (vLLM 0.33, and earlier versions that have them), so that nothing
of vLLM is imported. Most write into memory passed to them: in a functional graph such a call has an auto_functionalized
node (either version) around it, whose results are all of that memory. FlashInfer 0.6 registers no operators; vLLM's
operator for it makes scales in tiles of 8 x 4, a format that this package does not support.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dcpmla.attention.output.formats import GROUP_SIZES, OutputQuant
from dcpmla.cache.formats import FP8_MAX
from dcpmla.parallel.quantized import SMALLEST_AMAX

_aten, _ours = torch.ops.aten, torch.ops.dcpmla
_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2
Call = tuple[Node, OutputQuant]  # the arguments of `quantize_output`; a scale is a node


def rewrite_quantizations(graph: Graph, should: Callable[[Node, OutputQuant], bool]) -> None:
    """Replace, in place, calls of vLLM's operators by calls of ours with the same results.

    Args:
        should: Predicate of the arguments of `quantize_output`; a call is replaced if it returns True.
    """
    for node in list(graph.nodes):
        call = _as_ours(node)
        if call is not None and should(*call):
            with graph.inserting_before(node):
                _replace(node, *call)


def _as_ours(node: Node) -> Call | None:
    """Return the equivalent call of our operators; None for any other node, or a variant that ours lack."""
    if node.target in _FUNCTIONALIZED:
        name, arguments = str(node.args[0]), dict(node.kwargs)
    elif isinstance(node.target, torch._ops.OpOverload):
        arguments = {**node.kwargs, **dict(zip(names_of(node.target), node.args, strict=False))}
        name = str(node.target)
    else:
        return None
    read = _READERS.get(name)
    return read(arguments) if read else None


def _static_fp8(call: Mapping[str, Any]) -> Call | None:
    shape = call.get("group_shape")  # one-dimensional scales need it; -1 is all
    fits = shape is None or list(shape) == [-1, -1]
    return (call["input"], OutputQuant("fp8", call["scale"])) if fits else None


def _fp8_groups(call: Mapping[str, Any]) -> Call | None:
    is_ours = (call["eps"], call["fp8_min"], call["fp8_max"]) == (SMALLEST_AMAX, -FP8_MAX, FP8_MAX)
    if not is_ours or call["group_size"] not in GROUP_SIZES:
        return None
    columns = "tma" if call.get("dummy_is_tma_aligned") else "column"
    layout = columns if call.get("dummy_is_scale_transposed") else "row"
    return call["input"], OutputQuant("fp8_groups", None, call["group_size"], layout, call["scale_ue8m0"])


def _nvfp4(call: Mapping[str, Any]) -> Call | None:
    fits = call["is_sf_swizzled_layout"]
    return (call["input"], OutputQuant("nvfp4", call["input_scale"])) if fits else None


_READERS: dict[str, Callable[[Mapping[str, Any]], Call | None]] = {
    "_C.static_scaled_fp8_quant.default": _static_fp8,
    "_C.per_token_group_fp8_quant.default": _fp8_groups,
    "_C.scaled_fp4_quant.default": _nvfp4,
    "_C.scaled_fp4_quant.out": _nvfp4,
}


def _replace(node: Node, values: Node, quant: OutputQuant) -> None:
    """Replace a call by one of ours, unless no view of our results has the memory layout of its results."""
    wanted = [value for value in node.meta["val"] if value is not None]
    op, arguments = _ours.quantize_output.default, (values, *quant)
    views = [_view(has, wants) for has, wants in zip(value_of(op, *arguments), wanted, strict=False)]
    if any(view is None for view in views):
        return
    graph = node.graph
    new = insert(graph, op, *arguments)
    parts = [insert(graph, operator.getitem, new, index) for index in range(len(wanted))]
    for index, view in enumerate(views):
        for target, *rest in view or []:
            parts[index] = insert(graph, target, parts[index], *rest)
    first = len(node.meta["val"]) - len(wanted)  # a functionalized call's own result, None, comes before
    for user in list(node.users):
        user.replace_all_uses_with(parts[user.args[1] - first])  # type: ignore[index, operator]
        graph.erase_node(user)
    graph.erase_node(node)


def _view(has: Tensor, wants: Tensor) -> list[tuple[Any, ...]] | None:
    """Return the operators that view one tensor in the memory layout of another; None if none do."""
    steps: list[tuple[Any, ...]] = []
    if has.dtype != wants.dtype:
        if has.dtype.itemsize > wants.dtype.itemsize:
            return None
        steps.append((_aten.view.dtype, wants.dtype))  # vLLM has four scales of nvfp4 in an int32
        has = has.view(wants.dtype)
    if not _lies_as(has, wants) and has.ndim == 2:
        steps.append((_aten.permute.default, [1, 0]))  # the memory under scales whose columns are contiguous
        has = has.t()
    return steps if _lies_as(has, wants) else None


def _lies_as(a: Tensor, b: Tensor) -> bool:
    if a.ndim != b.ndim or a.device != b.device:
        return False
    return all(statically_known_true(x == y) for x, y in zip(_layout(a), _layout(b), strict=True))


def _layout(x: Tensor) -> Iterator[Any]:
    """Yield a tensor's sizes, then the strides of dims that have more than one index."""
    yield from x.shape
    yield from (
        0 if statically_known_true(size == 1) else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def insert(graph: Graph, target: Any, *args: Any) -> Node:
    """Insert a call, with its values, into a graph."""
    node = graph.call_function(target, args)
    node.meta["val"] = value_of(target, *args)
    return node


def value_of(target: Any, *args: Any) -> Any:
    """Return the values that a call's node would have, as fake tensors."""
    return target(*map_arg(args, lambda node: node.meta["val"]))


def names_of(op: Any) -> Iterator[str]:
    """Yield the names of an operator's arguments."""
    return (argument.name for argument in op._schema.arguments)
