"""From selected pools to selected tokens: each pool's tokens, and the tokens after the last whole pool.

A custom op (`torch.ops.dcpmla`). The torch code here specifies it and runs on CPUs; GPUs run the kernel of
`attention/layers/pooled/kernels/expand.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.select.slots import SlotLayout, find_slots
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.operators import is_on_gpu, nothing, operator


@operator(
    "expand_pools",
    kernel="dcpmla.attention.layers.pooled.kernels.expand:expand_pools",
    fake=nothing,
    runs=is_on_gpu,
    mutates_args=("positions", "slots", "num_slots"),
)
def expand_pools(
    pools: Tensor, seq_lens: Tensor, pool_size: int, layout: SlotLayout, selection: SelectedTokens
) -> None:
    """Select the tokens of pools and of each row's unfinished pool, and find the slots that this rank owns.

    Args:
        pools: Selected pools [T, K] int32, -1 after the last. With pools of one token -1 may be anywhere.
        seq_lens: Column of `SparseMetadata`.
        layout: Cache that slots are in.
        selection: Selection of at least K pool_size + pool_size - 1 columns, written.
    Source: transformers' GLM-5-Next.
    """
    positions = selection.positions
    column = torch.arange(positions.shape[1], device=pools.device)
    of_column = pools.repeat_interleave(pool_size, 1)
    of_column = F.pad(of_column, (0, len(column) - of_column.shape[1]), value=-1)
    after, lens = column - (of_column >= 0).sum(1, keepdim=True), seq_lens[:, None]
    is_unfinished = (after >= 0) & (after < lens % pool_size)
    unfinished = torch.where(is_unfinished, lens // pool_size * pool_size + after, -1)
    positions.copy_(torch.where(of_column >= 0, of_column * pool_size + column % pool_size, unfinished))
    find_slots(layout, selection)
