"""Rows that are still terms: whatever takes them adds them, and their sum needs no memory of its own."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.operators import operator


class Terms(NamedTuple):
    """Rows [T, D] as terms that are not added yet.

    Attributes:
        rows: Terms [T k, D], the k terms of a row after one another.
        ids: int32 [T, k]; None for whole rows. A term whose id is outside [0, num_ids) is absent, and its memory is not
            read.
        num_ids: Number of ids.
    """

    rows: Tensor
    ids: Tensor | None = None
    num_ids: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """[T, D]."""
        return self.rows.shape if self.ids is None else (self.ids.shape[0], *self.rows.shape[1:])

    def add(self) -> Tensor:
        """Return rows [T, D], each the sum of its terms in their order, in float32 at least, rounded once."""
        rows, ids, num_ids = self
        if ids is None:
            return rows
        is_here = ((ids >= 0) & (ids < num_ids))[..., None]
        terms = torch.where(is_here, rows.unflatten(0, ids.shape), 0).to(torch.promote_types(rows.dtype, torch.float32))
        return functools.reduce(torch.add, terms.unbind(1)).to(rows.dtype)


Partial = Tensor | Terms  # a rank's share [T, D] of a sum over ranks


def whole(partial: Partial) -> Tensor:
    """Return rows [T, D]."""
    return add_terms(*partial) if isinstance(partial, Terms) else partial


@operator(
    "add_terms",
    kernel="dcpmla.comm.kernels.terms:add_terms",
    fake=lambda rows, ids, num_ids: rows.new_empty(Terms(rows, ids, num_ids).shape),
)
def add_terms(rows: Tensor, ids: Tensor | None, num_ids: int) -> Tensor:
    """Return `Terms.add`."""
    return Terms(rows, ids, num_ids).add()
