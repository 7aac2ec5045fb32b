"""The merge of the partial outputs of decode in a fixed order: splits of a class in order, then classes by a tree."""

import triton
import triton.language as tl

from dcpmla.attention.ordered_reference import SPLIT_TILES
from dcpmla.comm.kernels.merge_tree import merge_pair, merge_tree
from dcpmla.ownership import TILE

_SPLIT_KEYS = tl.constexpr(TILE * SPLIT_TILES)


@triton.jit
def measure(index, batch):
    """Return the first query token of one segment or a vector of segments, its query rows and its keys.

    batch: lens_ptr, start_ptr, query_len and num_heads of `ordered_decode_kernel`.
    """
    lens_ptr, start_ptr, query_len, num_heads = batch
    first = index * query_len
    if start_ptr is not None:
        first = tl.load(start_ptr + index)
        query_len = tl.load(start_ptr + index + 1) - first
    num_keys = tl.load(lens_ptr + tl.maximum(first + query_len - 1, 0))
    return first, query_len * num_heads, tl.where(query_len > 0, tl.maximum(num_keys, 0), 0)


@triton.jit
def merge_into(partials_ptr, lses_ptr, at, other_at, other_lse, is_row, LATENT: tl.constexpr):
    """Merge rows other_at [ROWS] of the partial outputs into rows at; return their merged lse, which is not stored.

    The rows go through registers part by part, because all columns of both would not fit.
    """
    COLUMNS: tl.constexpr = min(LATENT, 64)
    lse = tl.load(lses_ptr + at, mask=is_row, other=-float("inf"), cache_modifier=".cg")
    merged_lse = lse
    for begin in range(0, LATENT, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        out_ptrs, mask = partials_ptr + at[:, None] * LATENT + column, is_row[:, None]
        out = tl.load(out_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        other = tl.load(partials_ptr + other_at[:, None] * LATENT + column, mask=mask, other=0.0, cache_modifier=".cg")
        merged, merged_lse = merge_pair(out, lse, other, other_lse)
        tl.store(out_ptrs, merged, mask=mask)
    tl.debug_barrier()  # all threads have loaded the lse before one thread stores it
    return merged_lse


@triton.jit(do_not_specialize=["num_segments", "query_len", "num_heads", "num_lines", "slot_rows"])
def merge_classes_kernel(
    partials_ptr,
    lses_ptr,
    first_slots_ptr,
    lens_ptr,
    start_ptr,
    out_ptr,
    lse_ptr,
    num_segments,
    query_len,
    num_heads,
    num_lines,
    slot_rows,
    CLASSES: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the partial outputs of one query row: the splits of each class in order, then the classes by a tree."""
    token, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    segment = token // query_len
    if start_ptr is not None:  # the last segment that begins at or before the token
        low, high = 0, num_segments
        while low < high - 1:
            middle = (low + high) // 2
            if tl.load(start_ptr + middle) <= token:
                low = middle
            else:
                high = middle
        segment = low
    first, num_rows, num_keys = measure(segment, (lens_ptr, start_ptr, query_len, num_heads))
    row = (token - first) * num_heads + head
    each, column = tl.arange(0, CLASSES), tl.arange(0, LATENT)
    out = tl.zeros([CLASSES, LATENT], tl.float32)
    lse = tl.full([CLASSES], -float("inf"), tl.float32)
    num_splits = tl.where(row < num_rows, tl.cdiv(num_keys, CLASSES * _SPLIT_KEYS), 0)  # none: a row of padding
    first_slot = tl.load(first_slots_ptr + segment)
    slot = (segment * num_lines + row // ROWS) * CLASSES + each
    num_slots = tl.minimum(num_splits, 1)
    if first_slot >= 0:
        slot = first_slot + (row // ROWS * CLASSES + each) * num_splits
        num_slots = num_splits
    for split in range(num_slots):
        at = (slot + split).to(tl.int64) * slot_rows + row % ROWS
        part = tl.load(partials_ptr + at[:, None] * LATENT + column[None, :])
        out, lse = merge_pair(out, lse, part, tl.load(lses_ptr + at))
    out, lse = merge_tree(out, lse)
    at = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + at * LATENT + tl.arange(0, 1)[:, None] + column[None, :], out)
    tl.store(lse_ptr + at + tl.arange(0, 1), lse)
