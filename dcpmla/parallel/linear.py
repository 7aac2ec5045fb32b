"""Weights sharded over tensor-parallel ranks: each rank reads only its slice of a checkpoint tensor."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dcpmla.parallel.collectives import named
from dcpmla.parallel.quantized import AnyWeight


class Weight(Protocol):
    """A whole [rows, cols] or [rows] weight that can be sliced: a Tensor, or a tensor still on disk."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


@runtime_checkable
class QuantizedWeight(Weight, Protocol):
    """A [rows, cols] weight in 8 or 4 bits: indexing gives its values, `stored` its codes and scales."""

    def stored(self, rows: slice, cols: slice, /) -> AnyWeight: ...


class RowParallelLinear(nn.Linear):
    """A linear layer with input features sharded over the group: [T, in / size] -> [T, out], summed over the ranks.

    The sum is in the dtype of the input, as transformers' own tensor parallelism sums MLPs; the DCP exchange sums in
    float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: ProcessGroup,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features // dist.get_world_size(group), out_features, bias=bias, device=device, dtype=dtype)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        out = nn.functional.linear(input, self.weight)
        if dist.get_world_size(self.group) > 1:
            with named("all-reduce of a row-parallel linear", self.group):
                dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias


def shard(size: int, group: ProcessGroup) -> slice:
    """Return this rank's slice of a dim of the given size."""
    part = size // dist.get_world_size(group)
    return slice(dist.get_rank(group) * part, (dist.get_rank(group) + 1) * part)


def read_weight(weights: Mapping[str, Weight], name: str, shape: tuple[int, ...], *index: slice) -> Tensor:
    """Read a slice of a named weight's values, of a quantized one in float32; all of it without an index.

    Raises:
        ValueError: the weight is missing, has another shape, or is of no floating-point dtype.
    """
    return _read_values(_find(weights, name, shape), name, index)


def read_linear(
    weights: Mapping[str, Weight],
    name: str,
    shape: tuple[int, int],
    rows: slice = slice(None),
    cols: slice = slice(None),
) -> AnyWeight:
    """Read a slice of a named matrix [rows, cols] as the checkpoint has it.

    Returns:
        `BlockFp8` of e4m3 codes, where the slice begins and ends at multiples of 128 (or at the matrix's end) and no
        block of 128 x 128 has several scales; `GroupFp4` of e2m1 codes, where columns are cut at multiples of 32. Else
        the values, float32 or in the dtype of a weight that is not quantized.
    Raises:
        ValueError: as `read_weight`.
    """
    weight = _find(weights, name, shape)
    return (
        weight.stored(rows, cols) if isinstance(weight, QuantizedWeight) else _read_values(weight, name, (rows, cols))
    )


def _find(weights: Mapping[str, Weight], name: str, shape: tuple[int, ...]) -> Weight:
    if name not in weights:
        raise ValueError(f"checkpoint: tensor {name} is missing")
    weight = weights[name]
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"checkpoint: tensor {name} has shape {tuple(weight.shape)}; the model's config asks for {shape}"
        )
    return weight


def _read_values(weight: Weight, name: str, index: tuple[slice, ...]) -> Tensor:
    part = weight[index or (slice(None),)]
    if part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"checkpoint: tensor {name} has dtype {part.dtype}; weights may be float32, bfloat16, float16, or codes of "
            f"8 or 4 bits with their scales"
        )
    return part


def fill(parameter: nn.Parameter | Tensor | None, *parts: Tensor) -> None:
    """Fill a parameter with parts stacked along dim 0, converted to its dtype and device."""
    assert parameter is not None
    with torch.no_grad():
        for target, part in zip(parameter.split([part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(part)
