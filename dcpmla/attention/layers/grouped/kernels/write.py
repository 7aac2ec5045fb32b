"""Triton kernel that writes keys and values, with its launcher; `layers/grouped/attention.py` specifies it."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["block_size"])
def write_kernel(
    rows_ptr,
    slots_ptr,
    cache_ptr,
    rows_stride_token,
    rows_stride_head,
    cache_stride_block,
    cache_stride_row,
    block_size,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the key and the value of one head; programs are (tokens, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        column = tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        row = tl.load(rows_ptr + token * rows_stride_token + head * rows_stride_head + column, mask=is_column)
        at = cache_ptr + slot // block_size * cache_stride_block + slot % block_size * cache_stride_row
        tl.store(at + head * WIDTH + column, row, mask=is_column)


def write_keys_values(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Compute `attention.write_keys_values` in one kernel; rows have any strides but contiguous columns."""
    num_tokens, num_heads, width = rows.shape
    if not num_tokens:
        return
    write_kernel[(num_tokens, num_heads)](
        rows,
        slots,
        cache,
        *rows.stride()[:2],
        *cache.stride()[:2],
        cache.shape[1],
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        num_warps=1,
    )
