"""Where decode kernels leave partial rows of requests that are split over programs, until those programs merge them."""

import torch
from torch import Tensor

COUNTER_WORDS = 1024  # int32 counters at the front, all zero between calls
_ROWS_PER_PROCESSOR = 128  # partial rows that the programs on one multiprocessor leave at most: two tiles of 64
_WORDS_PER_ROW = 512 + 1  # a latent in float32, and its LSE


def decode_workspace(device: torch.device | str) -> Tensor | None:
    """Memory for `dcpmla.mla_decode` on a device; None where no kernel needs it.

    Calls that follow each other on one stream may share it (a step's layers, a graph's replays); calls that run at
    the same time may not.

    Returns:
        float32 [N], its counters zero and the rest uninitialized: 35 MB on an H200.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = torch.empty(COUNTER_WORDS + num_processors * _ROWS_PER_PROCESSOR * _WORDS_PER_ROW, device=device)
    workspace[:COUNTER_WORDS].zero_()
    return workspace


def num_programs(workspace: Tensor, rows: int) -> int:
    """Programs that may share a workspace when each leaves up to two partial outputs of so many rows."""
    return min(COUNTER_WORDS, (workspace.numel() - COUNTER_WORDS) // (2 * rows * _WORDS_PER_ROW))
