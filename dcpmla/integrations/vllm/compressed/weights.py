"""Weights in the form that this package's layers take. Nothing here imports vLLM."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dcpmla.integrations.external.indexer import rotated_first
from dcpmla.parallel.formats import Quantized, dequantize

_INDEXER = re.compile(r"\.attn\.indexer\.(wq_b\.weight|compressor\.(wkv\.weight|wgate\.weight|norm\.weight|ape))$")
_GROUPS = re.compile(r"\.attn\.wo_a\.(weight|scale|weight_scale_inv)$")


def reformatted(
    weights: Iterable[tuple[str, Tensor]], index_head_dim: int, rope_dim: int
) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a checkpoint with the rotated columns of indexers first, and with wo_a's values in place of
    its codes and scales.

    Quantized weights keep their scales, because an indexer's head is exactly one block of rows.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        if _INDEXER.search(name):
            yield name, _rotated_first(tensor, name.endswith(("ape", "norm.weight")), index_head_dim, rope_dim)
        elif (match := _GROUPS.search(name)) is not None:
            layer = parts.setdefault(name[: match.start()], {})
            layer["weight" if match[1] == "weight" else "scale"] = tensor
            if "weight" in layer and (layer["weight"].dtype != torch.float8_e4m3fn or "scale" in layer):
                yield name[: match.start()] + ".attn.wo_a.weight", _values(**layer)
        else:
            yield name, tensor


def _rotated_first(tensor: Tensor, has_columns: bool, head_dim: int, rope_dim: int) -> Tensor:
    """Return a tensor with its columns, or else its rows, reordered in each group of head_dim."""
    codes = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch moves few kinds of 8-bit floats
    if has_columns:
        return rotated_first(codes, head_dim, rope_dim).view(tensor.dtype)
    return rotated_first(codes.transpose(0, 1), head_dim, rope_dim).transpose(0, 1).contiguous().view(tensor.dtype)


def _values(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the values of a weight that may be in blocks of e4m3."""
    return weight if scale is None else dequantize(Quantized(weight, scale.float()), torch.bfloat16)


def joined(linears: list[Any]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return the function from rows [T, K] to the outputs of several linear layers of vLLM's.

    Layers with weights [N, K] in the dtype of the last one's are computed in one product: their weights become parts of
    one matrix. At most the first layer has another dtype, of a quantized weight.
    """
    dtype = linears[-1].weight.dtype
    parts = [linear for linear in linears if linear.weight.dtype == dtype]
    if len(parts) < 2:
        return lambda x: tuple(_output(linear(x)) for linear in linears)
    widths = [len(linear.weight) for linear in parts]
    whole = torch.cat([linear.weight.data for linear in parts])
    for linear, rows in zip(parts, whole.split(widths), strict=True):
        linear.weight.data = rows
    before = linears[: -len(parts)]

    def project(x: Tensor) -> tuple[Tensor, ...]:
        outputs = functional.linear(x, whole).split(widths, -1)
        return (*(_output(linear(x)) for linear in before), *outputs)

    return project


def _output(result: Any) -> Tensor:
    """Return the output of a linear layer of vLLM's, which may come with a bias."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output
