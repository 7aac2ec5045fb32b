"""Fetches of selected rows of latents from host memory.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs; GPUs run the kernels of
`cache/hot_kernels.py`.
"""

import torch
from torch import Tensor

from dcpmla.cache.hot_set import MAX_AGE, HotSet
from dcpmla.operators import is_on_gpu, nothing, operator


@operator(
    "fetch_hot_rows",
    kernel="dcpmla.cache.hot_kernels:fetch_hot_rows",
    fake=lambda _hot, _latents, slots, _num_slots: torch.empty_like(slots),
    runs=is_on_gpu,
    mutates_args=("pool", "row_of", "slot_of", "last_used", "counts"),
)
def fetch_hot_rows(hot: HotSet, latents: Tensor, slots: Tensor, num_slots: Tensor) -> Tensor:
    """Return where the pool has the selected rows; copy those there that are not hot.

    They replace the rows that were not selected for longest; of equally old rows, the lowest numbers go first. Rows
    that this call selects stay. If those are all, the others are copied to the scratch rows.

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
    hot.pool[:, 0].view(torch.uint8)[hot.indices(rows)] = latents.flatten(0, 1).view(torch.uint8)[missed]
    hot.counts.add_(torch.tensor([1, int(is_hot.sum()), len(missed), len(missed)], device=slots.device))
    table = torch.zeros_like(slots)
    table[is_chosen] = hot.indices(hot.row_of[chosen] - 1).int()
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
