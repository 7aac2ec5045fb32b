"""Portable kernel of decode attention in a fixed order.

The work is cut into units: a tile of query rows, a lane of key tiles, and a split of SPLIT_TILES tiles of that lane.
A unit's arithmetic is the same whatever else a launch computes. Each unit has rows of memory of its own for its partial
output, if there is room; else a lane of a row tile is one unit, which merges its splits in memory one by one.
`deterministic_merge` merges splits in order, then lanes by a tree: the same merges in both cases.
"""

import triton
import triton.language as tl

from dcpmla.attention.triton.deterministic_merge import SPLIT, count_units, measure, offset_of
from dcpmla.attention.triton.keys import load_keys
from dcpmla.comm.kernels.merge_tree import LN_2, merge_pair
from dcpmla.ownership import TILE

_TILE = tl.constexpr(TILE)


@triton.jit
def _attend(q, q_pe, cache, table_ptr, tiles, num_keys, num_seen, scale, KEYS: tl.constexpr, ROPE: tl.constexpr):
    """Attend to some tiles of a lane; return out [ROWS, LATENT] and lse [ROWS], float32.

    Args:
        cache: cache_ptr, its strides of blocks and of rows, and block_size.
        table_ptr: Row of the block table.
        tiles: First tile of the lane, the end, the lane, and the number of lanes.
        num_keys, num_seen: Keys of the segment, and of each row [ROWS].
        scale: Softmax scale times log2(e).
    """
    cache_ptr, stride_block, stride_row, block_size = cache
    begin, end, this_class, num_tile_lanes = tiles
    ROWS: tl.constexpr = q.shape[0]
    LATENT: tl.constexpr = q.shape[1]
    PARTS: tl.constexpr = _TILE // KEYS
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    for part in range(begin * PARTS, end * PARTS):
        tile = part // PARTS * num_tile_lanes + this_class
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


@triton.jit
def _add_partial(partials_ptr, tile, lse, out, out_lse):
    """Merge out [ROWS, LATENT] into the rows that a unit has stored so far; return their merged lse.

    tile: First row and number of rows of the unit's tile.
    """
    ROWS: tl.constexpr = out.shape[0]
    LATENT: tl.constexpr = out.shape[1]
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, LATENT)[None, :]
    ptrs = partials_ptr + offset_of(tile[0], tile[1], row, column, LATENT)
    tl.debug_barrier()  # other threads may have stored what a thread loads
    stored = tl.load(ptrs, mask=row < tile[1], other=0.0, cache_modifier=".cg")
    merged, merged_lse = merge_pair(stored, lse, out, out_lse)
    tl.debug_barrier()
    tl.store(ptrs, merged, mask=row < tile[1])
    return merged_lse


# Sizes of a step change: if specialized on them, Triton would recompile while requests wait. It must not specialize on
# the number of lanes either, because the code for all numbers of ranks must round alike.
@triton.jit(
    do_not_specialize=[
        "table_stride",
        "block_size",
        "num_segments",
        "query_len",
        "num_heads",
        "num_tile_lanes",
        "num_partials",
    ],
    do_not_specialize_on_alignment=["kv_scale_ptr"],
)
def deterministic_decode_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
    table_ptr,
    lens_ptr,
    index_ptr,
    start_ptr,
    partials_ptr,
    lses_ptr,
    first_rows_ptr,
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
    num_tile_lanes,
    num_partials,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Compute the partial outputs of all units, which programs take in turn. scale includes log2(e).

    start_ptr is None where each segment has query_len query tokens. Program 0 stores the first row of each segment's
    partial outputs (`deterministic_merge.Partials`); there is memory for num_partials rows.
    """
    row, column, rope = tl.arange(0, ROWS), tl.arange(0, LATENT), tl.arange(0, ROPE)
    batch = (lens_ptr, start_ptr, query_len, num_heads)
    cache = (cache_ptr, cache_stride_block, cache_stride_row, block_size)
    if kv_scale_ptr is not None:
        scale *= tl.load(kv_scale_ptr)

    index = tl.arange(0, SEGMENTS)
    _, all_rows, all_keys = measure(tl.minimum(index, num_segments - 1), batch)
    all_rows = tl.where(index < num_segments, all_rows, 0)
    all_tiles = tl.where(all_rows > 0, tl.cdiv(all_keys, _TILE), 0)
    all_units = count_units(all_tiles, num_tile_lanes)
    has_rows = tl.sum(all_units * all_rows, 0) <= num_partials
    all_units = tl.where(has_rows, all_units, tl.minimum(all_tiles, num_tile_lanes))
    ends = tl.cumsum(all_units * tl.cdiv(all_rows, ROWS), 0)
    first_rows = tl.cumsum(all_units * all_rows, 0) - all_units * all_rows
    if tl.program_id(0) == 0:
        tl.store(first_rows_ptr + index, tl.where(has_rows, first_rows, -1 - first_rows), mask=index < num_segments)

    for unit in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        segment = tl.sum((ends <= unit).to(tl.int32), 0)
        in_segment = unit - tl.max(tl.where(ends <= unit, ends, 0), 0)
        first, all_num_rows, num_keys = measure(segment, batch)
        num_lines = tl.cdiv(all_num_rows, ROWS)
        # Neighbouring programs read the same keys.
        line, number = in_segment % num_lines, in_segment // num_lines
        first_row, num_rows = first * num_heads + line * ROWS, tl.minimum(all_num_rows - line * ROWS, ROWS)

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
        row_ptr = table_ptr + table.to(tl.int64) * table_stride

        this_class, begin = number % num_tile_lanes, number // num_tile_lanes * SPLIT
        end = tl.cdiv(tl.cdiv(num_keys, _TILE) - this_class, num_tile_lanes)
        if has_rows:
            end = tl.minimum(begin + SPLIT, end)
        partial_row = tl.sum(tl.where(index == segment, first_rows, 0), 0) + number * all_num_rows + line * ROWS
        lse = tl.full([ROWS], -float("inf"), tl.float32)
        for split in range(begin, end, SPLIT):
            tiles = (split, tl.minimum(split + SPLIT, end), this_class, num_tile_lanes)
            out, out_lse = _attend(q, q_pe, cache, row_ptr, tiles, num_keys, num_seen, scale, KEYS, ROPE)
            if kv_scale_ptr is not None:
                out *= tl.load(kv_scale_ptr)
            if split > begin:
                lse = _add_partial(partials_ptr, (partial_row, num_rows), lse, out, out_lse)
            else:
                at = offset_of(partial_row, num_rows, row[:, None], column[None, :], LATENT)
                tl.store(partials_ptr + at, out, mask=is_row[:, None])
                lse = out_lse
        tl.store(lses_ptr + partial_row + row, lse, mask=is_row)
