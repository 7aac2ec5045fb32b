"""The check that a function computes each row apart: with the same bits alone, in any batch and place, next to NaN."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def assert_rows_apart(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Check function(*rows) of tensors [T, ...], T at least 64, and return it."""
    whole, number = function(*rows), len(rows[0])
    order = torch.randperm(number, generator=torch.Generator().manual_seed(1)).to(rows[0].device)
    cases: list[Any] = [slice(at, at + 1) for at in (0, 1, number // 2, number - 1)]
    cases += [
        slice(at, at + size) for at, size in ((0, 2), (3, 5), (7, 16), (1, 33), (5, 58), (0, 64), (2, number - 3))
    ]
    for case in (*cases, order):
        _compare(function(*(part[case] for part in rows)), whole[case], case)
    poisoned = [part.clone() for part in rows]
    for part in poisoned:
        part[::3] = torch.nan
    _compare(function(*poisoned)[1::3], whole[1::3], "every third, next to NaN")
    return whole


def rows_differ(function: Callable[..., Tensor], *rows: Tensor) -> bool:
    try:
        assert_rows_apart(function, *rows)
    except AssertionError:
        return True
    return False


def _compare(got: Tensor, expected: Tensor, case: Any) -> None:
    differs = (got != expected).flatten(1).any(1)
    assert not differs.any(), f"row {int(differs.int().argmax())} differs, and {int(differs.sum()) - 1} more, in {case}"
