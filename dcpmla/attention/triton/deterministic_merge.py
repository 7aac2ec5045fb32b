"""The merge of the partial outputs of decode in a fixed order: splits of a lane in order, then lanes by a tree.

The kernels that compute them store the rows of a unit's tile group by group of 16 columns: all rows of a group come
before the next group.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.backends.calls import DETERMINISTIC_ROWS, DecodeCall
from dcpmla.attention.backends.deterministic_reference import SPLIT_TILES
from dcpmla.comm.kernels.merge_tree import merge_pair, merge_tree
from dcpmla.ownership import TILE

GROUP = tl.constexpr(16)  # columns of a group
SPLIT = tl.constexpr(SPLIT_TILES)
_TILE = tl.constexpr(TILE)


class Partials(NamedTuple):
    """Memory for partial outputs.

    Attributes:
        rows: Partial outputs [N, L], float32, and spare rows after them (`TileForm.num_spare_rows`).
        lses: LSE of each [N], float32.
        first_rows: First row of each segment [num_segments], int32: n, or -1 - n if a lane has the rows of one unit.
    """

    rows: Tensor
    lses: Tensor
    first_rows: Tensor


class TileForm(NamedTuple):
    """The form in which a kernel stores partial outputs.

    Attributes:
        num_rows: Query rows of a tile.
        is_permuted: Whether the columns of a group are in the order of `hopper.partials.store_partial`.
        num_spare_rows: Rows that it needs where a lane has the rows of one unit.
    """

    num_rows: int
    is_permuted: bool = False
    num_spare_rows: int = 0


@triton.jit
def count_units(num_tiles, num_tile_lanes):
    """Return the number of units of each request, by its tiles: a unit has up to SPLIT tiles of one lane."""
    full = tl.maximum(num_tiles - 1, 0) // (num_tile_lanes * SPLIT)  # splits before the last
    return full * num_tile_lanes + tl.minimum(num_tile_lanes, num_tiles - full * num_tile_lanes * SPLIT)


@triton.jit
def measure(index, batch):
    """Return the first query token of one segment or a vector of segments, its query rows and its keys.

    batch: lens_ptr, start_ptr, query_len and num_heads of `deterministic_decode_kernel`.
    """
    lens_ptr, start_ptr, query_len, num_heads = batch
    first = index * query_len
    if start_ptr is not None:
        first = tl.load(start_ptr + index)
        query_len = tl.load(start_ptr + index + 1) - first
    num_keys = tl.load(lens_ptr + tl.maximum(first + query_len - 1, 0))
    return first, query_len * num_heads, tl.where(query_len > 0, tl.maximum(num_keys, 0), 0)


@triton.jit
def offset_of(first_row, num_rows, row, column, LATENT: tl.constexpr):
    """Return the offset of an element of the num_rows rows of a unit's tile, whose first row is first_row."""
    return first_row.to(tl.int64) * LATENT + (column // GROUP * num_rows + row) * GROUP + column % GROUP


@triton.jit(do_not_specialize=["num_segments", "query_len", "num_heads"])
def merge_classes_kernel(
    partials_ptr,
    lses_ptr,
    first_rows_ptr,
    lens_ptr,
    start_ptr,
    out_ptr,
    lse_ptr,
    num_segments,
    query_len,
    num_heads,
    LANES: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    IS_PERMUTED: tl.constexpr,
):
    """Merge the partial outputs of one query row: the splits of each lane in order, then the lanes by a tree.

    ROWS, IS_PERMUTED: Form of the partial outputs (`TileForm`).
    """
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
    each, column = tl.arange(0, LANES), tl.arange(0, LATENT)
    num_tiles = tl.where(row < num_rows, tl.cdiv(num_keys, _TILE), 0)  # none: a row of padding
    out_ptr += tl.program_id(0).to(tl.int64) * LATENT
    lse_ptr += tl.program_id(0)
    if num_tiles == 0:
        tl.store(out_ptr + column, tl.zeros([LATENT], tl.float32))
        tl.store(lse_ptr, -float("inf"))
        return
    out = tl.zeros([LANES, LATENT], tl.float32)
    lse = tl.full([LANES], -float("inf"), tl.float32)
    first_row = tl.load(first_rows_ptr + segment)
    num_units = count_units(num_tiles, LANES)
    if first_row < 0:
        first_row, num_units = -1 - first_row, tl.minimum(num_tiles, LANES)
    in_tile, tile_row = row % ROWS, row // ROWS * ROWS
    tile_rows = tl.minimum(num_rows - tile_row, ROWS)
    for begin in range(0, num_units, LANES):
        is_unit = begin + each < num_units
        unit_row = first_row + (begin + each) * num_rows + tile_row
        at = offset_of(unit_row[:, None], tile_rows, in_tile, column[None, :], LATENT)
        part = tl.load(partials_ptr + at, mask=is_unit[:, None], other=0.0)
        part_lse = tl.load(lses_ptr + unit_row + in_tile, mask=is_unit, other=-float("inf"))
        out, lse = merge_pair(out, lse, part, part_lse)
    out, lse = merge_tree(out, lse)
    if IS_PERMUTED:
        place = column % GROUP
        column += place // 4 * 2 + place // 2 % 2 * 8 + place % 2 - place
    tl.store(out_ptr + tl.arange(0, 1)[:, None] + column[None, :], out)
    tl.store(lse_ptr + tl.arange(0, 1), lse)


def attend_and_merge(
    call: DecodeCall, attend: Callable[[DecodeCall, Partials], None], form: TileForm
) -> tuple[Tensor, Tensor]:
    """Compute a `DecodeCall` with num_tile_lanes in two launches.

    Args:
        attend: Function that stores the partial outputs.
        form: Form in which it does.
    """
    out, lse = call.new_output()
    num_tokens, num_heads, latent = out.shape
    num_tile_lanes = call.num_tile_lanes
    if num_tokens == 0:
        return out, lse
    assert num_tile_lanes is not None
    max_splits = triton.cdiv(call.block_table.shape[1] * call.block_size, num_tile_lanes * TILE * SPLIT_TILES)
    num_least = num_tokens * num_heads * num_tile_lanes  # one row for each lane
    num_partials = max(num_least, min(num_least * max_splits, DETERMINISTIC_ROWS))
    num_spare = form.num_spare_rows if num_partials < num_least * max_splits else 0
    partials = Partials(
        torch.empty(num_partials + num_spare, latent, dtype=torch.float32, device=out.device),
        torch.empty(num_partials, dtype=torch.float32, device=out.device),
        torch.empty(call.num_segments, dtype=torch.int32, device=out.device),
    )
    attend(call, partials)
    merge_classes_kernel[(num_tokens * num_heads,)](
        *partials,
        call.seq_lens,
        call.query_start_loc,
        out,
        lse,
        call.num_segments,
        call.max_query_len,
        num_heads,
        LANES=num_tile_lanes,
        LATENT=latent,
        ROWS=form.num_rows,
        IS_PERMUTED=form.is_permuted,
        num_warps=4,
        enable_fp_fusion=False,  # a compiler may fuse in one variant and not in another
    )
    return out, lse
