"""The windows of tokens as a selection.

A custom op (`torch.ops.dcpmla`). The torch code here specifies it and runs on CPUs; GPUs run the kernel of
`attention/windowed/kernels/select.py`.
"""

import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.operators import nothing, operator


@operator(
    "select_window",
    kernel="dcpmla.attention.windowed.kernels.select:select_window",
    fake=nothing,
    runs=lambda seq_lens: seq_lens.is_cuda,
    mutates_args=("positions", "slots", "num_slots"),
)
def select_window(
    block_table: Tensor,
    request: Tensor,
    seq_lens: Tensor,
    block_size: int,
    dcp_rank: int,
    dcp_size: int,
    interleave: int,
    positions: Tensor,
    slots: Tensor,
    num_slots: Tensor,
) -> None:
    """Select the last tokens up to each token, and find the slots of this rank's tokens among them.

    Args:
        block_table, request, seq_lens: Columns of `SparseMetadata`.
        positions, slots, num_slots: Fields of `SelectedTokens`, written. The width of positions is the window.
    """
    window, layout = positions.shape[1], (dcp_size, dcp_rank, interleave)
    column = torch.arange(window, device=positions.device)
    last = seq_lens[:, None] - 1
    positions.copy_((last - column).clamp(min=-1))
    # A rank's tokens of a window are neighbours among its tokens.
    first = ownership.local_seq_lens((seq_lens - window).clamp(min=0), *layout)
    num_slots.copy_(ownership.local_seq_lens(seq_lens, *layout) - first)
    index = first[:, None] + column
    blocks = block_table[request.long()].gather(1, (index // block_size).clamp(max=block_table.shape[1] - 1))
    slots.copy_(blocks * block_size + index % block_size)
