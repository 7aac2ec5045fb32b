"""From selected pools to selected tokens: each pool's tokens, and the tokens after the last whole pool.

A custom op (`torch.ops.dcpmla`). The torch code here specifies it and runs on CPUs; GPUs run the kernel of
`attention/pooled/kernels/expand.py`.
"""

import torch
from torch import Tensor

from dcpmla.attention.sparse.slots import SlotLayout, find_slots
from dcpmla.operators import nothing, operator


@operator(
    "expand_pools",
    kernel="dcpmla.attention.pooled.kernels.expand:expand_pools",
    fake=nothing,
    runs=lambda pools: pools.is_cuda,
    mutates_args=("positions", "slots", "num_slots"),
)
def expand_pools(
    pools: Tensor,
    seq_lens: Tensor,
    pool_size: int,
    layout: SlotLayout,
    positions: Tensor,
    slots: Tensor,
    num_slots: Tensor,
) -> None:
    """Select the tokens of pools and of each row's unfinished pool, and find the slots that this rank owns.

    Args:
        pools: Selected pools [T, K] int32, -1 after the last.
        seq_lens: Column of `SparseMetadata`.
        layout: Cache that slots are in.
        positions, slots, num_slots: Fields of `SelectedTokens` of at least K pool_size + pool_size - 1 columns;
            written.
    Source: transformers' GLM-5-Next.
    """
    column = torch.arange(positions.shape[1], device=pools.device)
    num_selected = (pools >= 0).sum(1, keepdim=True) * pool_size
    of_column = (column // pool_size).clamp(max=pools.shape[1] - 1).expand(len(pools), -1)
    selected = pools.gather(1, of_column) * pool_size + column % pool_size
    after, lens = column - num_selected, seq_lens[:, None]
    unfinished = torch.where(after < lens % pool_size, lens // pool_size * pool_size + after, -1)
    positions.copy_(torch.where(after < 0, selected, unfinished))
    find_slots(positions, layout, None, slots, num_slots)
