"""Functions of rows on CPUs, a row apart, for the deterministic mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def by_rows(function: Callable[..., Any], *rows: Tensor) -> Any:
    """Return function(*rows) of tensors [T, ...], one tensor or a tuple; on CPUs each row is computed apart.

    torch computes the last elements of a tensor, and strided ones, by other code, which may round otherwise.
    """
    if rows[0].is_cuda or len(rows[0]) == 0:
        return function(*rows)
    results = [function(*(part[index : index + 1].clone() for part in rows)) for index in range(len(rows[0]))]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
