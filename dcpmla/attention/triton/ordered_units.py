"""Kernel of decode attention in a fixed order, launched by `ordered_decode`.

The work is cut into units: a tile of query rows, a class of key tiles, and a split of SPLIT_TILES tiles of that class.
A unit's arithmetic is the same whatever else a launch computes. Programs take units in turn, the first splits of all
requests first. Each unit has a slot of memory for its partial output if there are enough slots; else a row tile's class
has one slot, and each split waits for the split before it and merges itself into the slot. A second kernel merges
splits in order, then classes by a tree: the same merges in both cases.
"""

import triton
import triton.language as tl

from dcpmla.attention.ordered_reference import SPLIT_TILES
from dcpmla.attention.triton.keys import load_keys
from dcpmla.attention.triton.ordered_merge import measure, merge_into
from dcpmla.comm.kernels.merge_tree import LN_2
from dcpmla.ownership import TILE

_TILE, _SPLIT = tl.constexpr(TILE), tl.constexpr(SPLIT_TILES)


@triton.jit
def _attend(q, q_pe, cache, table_ptr, tiles, num_keys, num_seen, scale, KEYS: tl.constexpr, ROPE: tl.constexpr):
    """Attend to some tiles of a class; return out [ROWS, LATENT] and lse [ROWS], float32.

    Args:
        cache: cache_ptr, its strides of blocks and of rows, and block_size.
        table_ptr: Row of the block table.
        tiles: First tile of the class, the end, the class, and the number of classes.
        num_keys, num_seen: Keys of the segment, and of each row [ROWS].
        scale: Softmax scale times log2(e).
    """
    cache_ptr, stride_block, stride_row, block_size = cache
    begin, end, this_class, num_classes = tiles
    ROWS: tl.constexpr = q.shape[0]
    LATENT: tl.constexpr = q.shape[1]
    PARTS: tl.constexpr = _TILE // KEYS
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    for part in range(begin * PARTS, end * PARTS):
        tile = part // PARTS * num_classes + this_class
        position = tile * _TILE + (part - part // PARTS * PARTS) * KEYS + tl.arange(0, KEYS)
        is_key = position < num_keys
        block = tl.load(table_ptr + position // block_size, mask=is_key, other=0)
        at = cache_ptr + block.to(tl.int64) * stride_block + (position % block_size).to(tl.int64) * stride_row
        kv_c, k_pe = load_keys(at, is_key, q.dtype, KEYS, LATENT, ROPE)
        scores = tl.dot(q, tl.trans(kv_c))
        scores = tl.dot(q_pe, tl.trans(k_pe), scores) * scale
        scores = tl.where(position[None, :] < num_seen[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        factor = tl.exp2(peak - shift)
        probs = tl.exp2(scores - shift[:, None])
        total = tl.fma(total, factor, tl.sum(probs, 1))
        acc = tl.dot(probs.to(q.dtype), kv_c, acc * factor[:, None])
        peak = new_peak
    is_any = total != 0
    total = tl.where(is_any, total, 1.0)
    lse = tl.where(is_any, (peak + tl.log2(total)) * LN_2, -float("inf"))
    return acc * tl.div_rn(1.0, total)[:, None], lse


# Sizes of a step change: if specialized on them, Triton would recompile while requests wait. It must not specialize on
# the number of classes either, because the code for all numbers of ranks must round alike.
@triton.jit(
    do_not_specialize=[
        "table_stride",
        "block_size",
        "num_segments",
        "query_len",
        "num_heads",
        "num_classes",
        "num_lines",
        "slot_rows",
        "num_slots",
    ],
    do_not_specialize_on_alignment=["kv_scale_ptr"],
)
def ordered_decode_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
    table_ptr,
    lens_ptr,
    index_ptr,
    start_ptr,
    partials_ptr,
    lses_ptr,
    first_slots_ptr,
    progress_ptr,
    kv_scale_ptr,
    q_stride_token,
    q_stride_head,
    q_pe_stride_token,
    q_pe_stride_head,
    cache_stride_block,
    cache_stride_row,
    table_stride,
    block_size,
    num_segments,
    query_len,
    num_heads,
    num_classes,
    num_lines,
    slot_rows,
    num_slots,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Compute the partial outputs of all units. scale includes log2(e).

    start_ptr is None where each segment has query_len query tokens. Program 0 stores the first slot of each segment, -1
    if its splits share a slot. progress_ptr counts the splits that such a slot has.
    """
    row, column, rope = tl.arange(0, ROWS), tl.arange(0, LATENT), tl.arange(0, ROPE)
    batch = (lens_ptr, start_ptr, query_len, num_heads)
    cache = (cache_ptr, cache_stride_block, cache_stride_row, block_size)
    if kv_scale_ptr is not None:
        scale *= tl.load(kv_scale_ptr)

    index = tl.arange(0, SEGMENTS)
    _, all_rows, all_keys = measure(tl.minimum(index, num_segments - 1), batch)
    # Units of a split of each segment, and its number of splits.
    all_units = tl.where(index < num_segments, tl.cdiv(all_rows, ROWS) * num_classes, 0)
    all_splits = tl.cdiv(all_keys, num_classes * _TILE * _SPLIT)
    slot_ends = tl.cumsum(all_units * all_splits, 0)
    num_units = tl.max(slot_ends, 0)
    has_slots = num_units <= num_slots
    if tl.program_id(0) == 0:
        first_slots = tl.where(has_slots, slot_ends - all_units * all_splits, -1)
        tl.store(first_slots_ptr + index, first_slots, mask=index < num_segments)

    unit, split, base = tl.program_id(0), 0, 0
    count = tl.sum(tl.where(all_splits > 0, all_units, 0), 0)
    while unit < num_units:
        while unit >= base + count:
            base += count
            split += 1
            count = tl.sum(tl.where(all_splits > split, all_units, 0), 0)
        ends = tl.cumsum(tl.where(all_splits > split, all_units, 0), 0)
        segment = tl.sum((ends <= unit - base).to(tl.int32), 0)
        in_segment = unit - base - tl.max(tl.where(ends <= unit - base, ends, 0), 0)
        first, num_rows, num_keys = measure(segment, batch)
        num_lines_here = tl.cdiv(num_rows, ROWS)
        # Neighbouring programs read the same keys.
        line, this_class = in_segment % num_lines_here, in_segment // num_lines_here
        first_row, num_rows = first * num_heads + line * ROWS, num_rows - line * ROWS

        is_row = row < num_rows
        token, head = (first_row + row) // num_heads, (first_row + row) % num_heads
        num_seen = tl.load(lens_ptr + token, mask=is_row, other=0)
        q_row = q_ptr + token.to(tl.int64) * q_stride_token + head.to(tl.int64) * q_stride_head
        q = tl.load(q_row[:, None] + column[None, :], mask=is_row[:, None], other=0.0)
        pe_row = q_pe_ptr + token.to(tl.int64) * q_pe_stride_token + head.to(tl.int64) * q_pe_stride_head
        q_pe = tl.load(pe_row[:, None] + rope[None, :], mask=is_row[:, None], other=0.0)
        table = segment
        if index_ptr is not None:
            table = tl.load(index_ptr + segment)
        num_tiles = tl.cdiv(tl.maximum(tl.cdiv(num_keys, _TILE) - this_class, 0), num_classes)
        tiles = (split * _SPLIT, tl.minimum((split + 1) * _SPLIT, num_tiles), this_class, num_classes)
        row_ptr = table_ptr + table.to(tl.int64) * table_stride
        out, lse = _attend(q, q_pe, cache, row_ptr, tiles, num_keys, num_seen, scale, KEYS, ROPE)
        if kv_scale_ptr is not None:
            out *= tl.load(kv_scale_ptr)

        own_slot = (segment * num_lines + line) * num_classes + this_class
        slot = own_slot
        if has_slots:
            num_splits = tl.cdiv(num_keys, num_classes * _TILE * _SPLIT)
            first_slot = tl.max(tl.where(index < segment, slot_ends, 0), 0)
            slot = first_slot + (line * num_classes + this_class) * num_splits + split
        merges = (split > 0) & (num_units > num_slots)
        if merges:
            slot = num_slots + tl.program_id(0)
        at = slot.to(tl.int64) * slot_rows + row
        tl.store(partials_ptr + at[:, None] * LATENT + column[None, :], out, mask=is_row[:, None])
        if merges:
            while tl.atomic_add(progress_ptr + own_slot, 0, sem="acquire", scope="gpu") < split:
                pass
            tl.debug_barrier()
            own_at = own_slot.to(tl.int64) * slot_rows + row
            lse = merge_into(partials_ptr, lses_ptr, own_at, at, lse, is_row, LATENT)
            at = own_at
        tl.store(lses_ptr + at, lse, mask=is_row)
        if num_units > num_slots:
            tl.debug_barrier()  # all threads store before one thread signals the arrival
            tl.atomic_xchg(progress_ptr + own_slot, split + 1, sem="release", scope="gpu")
        unit += tl.num_programs(0)
