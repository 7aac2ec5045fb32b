"""The layout of a step of decodes on the device: numbers per row, computed from numbers per request."""

import torch

from dcpmla.attention.build import StepBuilder
from dcpmla.runtime.numbers import Numbers, Rows


def lay_out(numbers: Numbers, rows: Rows, steps: StepBuilder) -> None:
    """Write a batch's rows: the tokens of a request from its first position on, moved back by its rejected drafts. A
    request with fewer tokens than rows repeats the last one.

    Args:
        numbers: Numbers of the batch on the device.
        rows: Rows of the batch.
        steps: Builder of steps over the cache.
    """
    if rows.positions.is_cuda:
        from dcpmla.runtime.kernels import layout  # triton exists on Linux only

        layout.lay_out(numbers, rows, steps)
        return
    num_reqs, num_rows = len(numbers.num_tokens), len(rows.positions)
    owner = steps.owner
    index = torch.arange(num_rows // num_reqs)
    num_tokens = numbers.num_tokens[:, None]
    first = (numbers.first_position - numbers.num_rejected)[:, None]
    is_here = num_tokens > 0
    positions = (first + index.minimum(num_tokens - 1)).where(is_here, 0)
    seen = (positions + 1).where(is_here, 0)
    blocks = numbers.block_table.gather(1, positions // steps.block_tokens)
    offsets = positions % steps.block_tokens
    slots = blocks * steps.dcp.block_size + owner.local_index(offsets)
    is_mine = owner.rank_of(offsets) == owner.rank
    is_written = is_mine & (index < num_tokens) & steps.has_slots
    local = owner.local_seq_lens(seen)
    for column, values in zip(rows, (positions, slots.where(is_written, -1), local, seen), strict=True):
        column.copy_(values.flatten())
