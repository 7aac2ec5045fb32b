"""Weights sharded over tensor-parallel ranks: each rank reads only its slice of a checkpoint tensor."""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dcpmla.parallel.collectives import named
from dcpmla.parallel.quantized import BLOCK


class Weight(Protocol):
    """A whole [rows, cols] or [rows] weight that can be sliced: a Tensor, or a tensor still on disk."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


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

    def partial(self, x):
        out = nn.functional.linear(x, self.weight)
        return out if self.bias is None or dist.get_rank(self.group) else out + self.bias

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


def cut(size: int, rank: int, num_ranks: int, in_blocks: bool = False) -> slice:
    """Return a rank's part of a dim, as even as it can be.

    Args:
        in_blocks: cut between the blocks of quantized weights, where there is one for every rank.
    """
    unit = BLOCK if in_blocks and size % BLOCK == 0 and size // BLOCK >= num_ranks else 1
    return slice(size // unit * rank // num_ranks * unit, size // unit * (rank + 1) // num_ranks * unit)


def read_weight(weights: Mapping[str, Weight], name: str, shape: tuple[int, ...], *index: slice) -> Tensor:
    """Read a slice of a named weight; all of it without an index.

    Raises:
        ValueError: the weight is missing, has another shape, or is quantized in a way that the mapping does not undo.
    """
    if name not in weights:
        raise ValueError(f"checkpoint: tensor {name} is missing")
    weight = weights[name]
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"checkpoint: tensor {name} has shape {tuple(weight.shape)}; the model's config asks for {shape}"
        )
    part = weight[index or (slice(None),)]
    if part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"checkpoint: tensor {name} has dtype {part.dtype}; attention weights may be float32, bfloat16, float16, "
            f"or float8_e4m3fn with a scale per block in {name}_scale_inv"
        )
    return part


def fill(parameter: nn.Parameter | Tensor | None, *parts: Tensor) -> None:
    """Fill a parameter with parts stacked along dim 0, converted to its dtype and device."""
    assert parameter is not None
    with torch.no_grad():
        for target, part in zip(parameter.split([part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(part)

class Linear(nn.Linear):
    def __init__(self, i, o, bias=False, device=None, dtype=None):
        super().__init__(i, o, bias=bias, device=device, dtype=dtype)
    def load(self, *parts):
        fill(self.weight, *parts)
def read_linear(weights, name, shape, rows=slice(None), cols=slice(None)):
    return read_weight(weights, name, shape, rows, cols)
