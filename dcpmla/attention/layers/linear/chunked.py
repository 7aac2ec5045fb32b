"""Kimi Delta Attention over long pieces of prompts, chunk by chunk, with flash-linear-attention's kernels.

The package `fla-core` is optional: without it such pieces go through the recurrence, token after token.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from dcpmla.attention.layers.linear.calls import DeltaCall, DeltaPieces, DeltaRequests
from dcpmla.attention.layers.linear.delta import delta_attention
from dcpmla.operators import nothing, operator

# Bytes for each element of the output: the rows that kernels read and write, decays in float32, products within chunks,
# and the memory before each chunk. The number is summed from shapes, not measured.
BYTES_PER_ELEMENT = 40


def takes_chunks(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether long pieces attend in chunks: on a GPU, in 16 bits, if flash-linear-attention is installed."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_library()


@cache
def has_library() -> bool:
    """Return whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


def touch_chunk_memory(out: Tensor) -> None:
    """Allocate and free the memory of `attend_in_chunks` for an output [T, h D], for memory profiling."""
    out.new_empty(out.numel() * BYTES_PER_ELEMENT, dtype=torch.uint8)


@operator(
    "delta_chunks",
    kernel="dcpmla.attention.layers.linear.kernels.chunks:attend_in_chunks",
    fake=nothing,
    mutates_args=("out", "recent", "memory"),
)
def attend_in_chunks(call: DeltaCall, pieces: DeltaPieces) -> None:
    """Attend with long pieces, as `delta_attention` does. A custom op; its kernels need `takes_chunks`.

    Source: Kimi Linear's report, section 3.1.
    """
    lens = pieces.start_loc.diff()
    requests = DeltaRequests(pieces.token, pieces.first_position, pieces.first_position + lens, pieces.state)
    delta_attention.reference(call, requests)
