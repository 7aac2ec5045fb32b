"""The rows of latents that a device has of a layer whose latents are all in host memory (`HotSet`), and their sizes."""

from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.cache.carve import Described

SCRATCH_BYTES = 256 << 20  # of the rows of one call, which all layers use in turn
MAX_AGE = 127  # fetches; rows that were not selected for as many or more are equally old


class HotSizes(NamedTuple):
    """The sizes of the hot sets of a model's layers on one rank.

    Attributes:
        num_layers: Number of layers, each with a set of its own.
        num_rows: Rows of each set.
        topk: Maximum rows that one token selects.
        width: Elements of a row.
        dtype: Dtype of the elements.
    """

    num_layers: int
    num_rows: int
    topk: int
    width: int
    dtype: torch.dtype

    @property
    def max_tokens(self) -> int:
        """Return the maximum tokens of a call of `fetch_hot_rows`, the same on all ranks: a set and the scratch rows
        hold every selection of theirs, even if one rank owns all of it.
        """
        row_bytes = self.width * self.dtype.itemsize
        return max(1, self.num_rows // self.topk, SCRATCH_BYTES // (self.topk * row_bytes))

    def tensors(self, num_slots: int) -> list[Described]:
        """Return the shapes and dtypes of the fields of all layers' sets, over caches of num_slots rows: the pool, then
        row_of, slot_of, last_used and counts of each layer.
        """
        num_scratch = max(0, self.max_tokens * self.topk - self.num_rows)
        return [
            ((self.num_layers * self.num_rows + num_scratch, 1, self.width), self.dtype),
            ((self.num_layers, num_slots), torch.int32),
            ((self.num_layers, self.num_rows), torch.int32),
            ((self.num_layers, self.num_rows), torch.int64),
            ((self.num_layers, 4), torch.int64),
        ]


class HotSet(NamedTuple):
    """The hot rows of one layer on one rank: copies of some of the cache's rows, which are in host memory.

    Zeros are an empty set. A row of the set is numbered from 0; from num_rows on these are the scratch rows, which keep
    their content for one call.

    Attributes:
        pool: Rows of all layers' sets, one set after the other, then the scratch rows [N, 1, width].
        row_of: 1 + row of each slot of the cache [num_slots] int32; 0 for none. A value above num_rows is left over
            from a scratch row, and means none, too.
        slot_of: 1 + slot whose copy each row is [num_rows] int32; 0 for none.
        last_used: Number of the last call that selected each row [num_rows] int64; 0 for none.
        counts: Number of calls; of selected rows that were hot; of rows that were fetched; the last one again, ahead of
            it within a call [4] int64.
        first_row, first_scratch: Indices in the pool of row 0, and of the first scratch row.
        max_tokens: Maximum tokens of a call.
    """

    pool: Tensor
    row_of: Tensor
    slot_of: Tensor
    last_used: Tensor
    counts: Tensor
    first_row: int
    first_scratch: int
    max_tokens: int

    @classmethod
    def of(cls, sizes: HotSizes, tensors: list[Tensor]) -> "list[HotSet]":
        """Return each layer's set in tensors of `HotSizes.tensors`."""
        pool, row_of, slot_of, last_used, counts = tensors
        columns = zip(row_of, slot_of, last_used, counts, strict=True)
        num_rows, scratch = sizes.num_rows, sizes.num_layers * sizes.num_rows
        return [
            cls(pool, *of_layer, number * num_rows, scratch, sizes.max_tokens)
            for number, of_layer in enumerate(columns)
        ]

    def indices(self, rows: Tensor) -> Tensor:
        """Return the indices of rows in the pool."""
        num_rows = len(self.slot_of)
        return torch.where(rows < num_rows, rows + self.first_row, rows - num_rows + self.first_scratch)

    def is_hot(self, row_of: Tensor) -> Tensor:
        """Return which values of `row_of` name a row of the set."""
        return (row_of > 0) & (row_of <= len(self.slot_of))
