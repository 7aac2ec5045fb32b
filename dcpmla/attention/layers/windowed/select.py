"""The windows of tokens as a selection.

A custom op (`torch.ops.dcpmla`). The torch code here specifies it and runs on CPUs; GPUs run the kernel of
`attention/layers/windowed/kernels/select.py`.
"""

import torch
from torch import Tensor

from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.operators import is_on_gpu, nothing, operator


@operator(
    "select_window",
    kernel="dcpmla.attention.layers.windowed.kernels.select:select_window",
    fake=nothing,
    runs=is_on_gpu,
    mutates_args=("positions", "slots", "num_slots"),
)
def select_window(seq_lens: Tensor, layout: SlotLayout, selection: SelectedTokens) -> None:
    """Select the last tokens up to each token, and find the slots of this rank's tokens among them.

    Args:
        seq_lens: Column of `SparseMetadata`.
        layout: Cache that slots are in.
        selection: Selection, written. The width of positions is the window.
    """
    positions, slots, num_slots, _ = selection
    window, owner = positions.shape[1], layout.owner
    column = torch.arange(window, device=positions.device)
    last = seq_lens[:, None] - 1
    positions.copy_((last - column).clamp(min=-1))
    # A rank's tokens of a window are neighbours among its tokens.
    first = owner.local_seq_lens((seq_lens - window).clamp(min=0))
    num_slots.copy_(owner.local_seq_lens(seq_lens) - first)
    slots.copy_(layout.slots(first[:, None] + column))
