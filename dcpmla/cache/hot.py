"""Rows of latents on the GPU that were selected lately, of a layer whose latents are all in host memory (`HotSet`).

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs; GPUs run the kernels of
`cache/hot_kernels.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.cache.carve import Described
from dcpmla.operators import is_on_gpu, nothing, operator

SCRATCH_BYTES = 256 << 20  # room for the rows of one call, which all layers use in turn
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
        """Return the maximum tokens of a call of `fetch_hot_rows`: a set and the scratch rows hold all that they can
        select, wherever it is. It is the same on all ranks.
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

    def places(self, rows: Tensor) -> Tensor:
        """Return the indices of rows in the pool."""
        num_rows = len(self.slot_of)
        return torch.where(rows < num_rows, rows + self.first_row, rows - num_rows + self.first_scratch)

    def is_hot(self, row_of: Tensor) -> Tensor:
        """Return which values of `row_of` name a row of the set."""
        return (row_of > 0) & (row_of <= len(self.slot_of))


@operator(
    "fetch_hot_rows",
    kernel="dcpmla.cache.hot_kernels:fetch_hot_rows",
    fake=lambda _hot, _latents, slots, _num_slots: torch.empty_like(slots),
    runs=is_on_gpu,
    mutates_args=("pool", "row_of", "slot_of", "last_used", "counts"),
)
def fetch_hot_rows(hot: HotSet, latents: Tensor, slots: Tensor, num_slots: Tensor) -> Tensor:
    """Return where the pool has the selected rows; copy those there that are not hot.

    They take the places of the rows that were not selected for longest, of equally old ones those with the lowest
    numbers. A row that this call selects keeps its place. What finds no place goes to the scratch rows.

    Args:
        latents: Cache of the layer [num_blocks, block_size, width], in the dtype of the pool, contiguous.
        slots: Slots of T tokens' selected rows [T, N] int32, contiguous; at most `max_tokens` tokens and
            `HotSizes.topk` slots each.
        num_slots: Number of each token's slots [T] int32; the others are undefined.
    Returns:
        The index in the pool of each selected row [T, N] int32, in the order of slots; 0 for undefined ones.
    """
    num_rows, now = len(hot.slot_of), hot.counts[0] + 1
    is_chosen = torch.arange(slots.shape[1], device=slots.device) < num_slots[:, None]
    chosen = slots[is_chosen].long()
    row_of = hot.row_of[chosen]
    is_hot = hot.is_hot(row_of)
    hot.last_used[row_of[is_hot].long() - 1] = now
    missed = _distinct(chosen[~is_hot])
    rows = _oldest((now - hot.last_used).clamp(max=MAX_AGE), len(missed))
    left = hot.slot_of[rows].long()
    hot.row_of[left[left > 0] - 1] = 0
    hot.slot_of[rows] = (missed[: len(rows)] + 1).int()
    hot.last_used[rows] = now
    rows = torch.cat([rows, torch.arange(num_rows, num_rows + len(missed) - len(rows), device=rows.device)])
    hot.row_of[missed] = (rows + 1).int()
    hot.pool[:, 0].view(torch.uint8)[hot.places(rows)] = latents.flatten(0, 1).view(torch.uint8)[missed]
    hot.counts.add_(torch.tensor([1, int(is_hot.sum()), len(missed), len(missed)], device=slots.device))
    table = torch.zeros_like(slots)
    table[is_chosen] = hot.places(hot.row_of[chosen] - 1).int()
    return table


@operator(
    "forget_hot_rows",
    kernel="dcpmla.cache.hot_kernels:forget_hot_rows",
    fake=nothing,
    runs=is_on_gpu,
    mutates_args=("row_of", "slot_of", "last_used"),
)
def forget_hot_rows(hot: HotSet, slots: Tensor) -> None:
    """Drop the copies of rows that are written again.

    Args:
        slots: Slots that are written [T] int64; -1 for none.
    """
    slots = slots[slots >= 0]
    row_of = hot.row_of[slots]
    rows = row_of[hot.is_hot(row_of)].long() - 1
    hot.slot_of[rows], hot.last_used[rows] = 0, 0
    hot.row_of[slots] = 0


def _distinct(slots: Tensor) -> Tensor:
    """Return each slot once, in the order in which they come first."""
    distinct, numbers = torch.unique(slots, return_inverse=True)
    index = torch.arange(len(slots), device=slots.device)
    first = torch.full_like(distinct, len(slots)).scatter_reduce(0, numbers, index, "amin")
    return slots[first.sort().values]


def _oldest(age: Tensor, num: int) -> Tensor:
    """Return up to num rows whose age is not 0, in order: the oldest, of equally old ones the first."""
    oldest = torch.sort(age, descending=True, stable=True).indices[: min(num, int((age > 0).sum()))]
    return oldest.sort().values
