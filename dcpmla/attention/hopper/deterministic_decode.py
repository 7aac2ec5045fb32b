"""Decode attention in a fixed order on Hopper: the pipeline of `decode` over whole units (`units`).

`deterministic_reference.decode_deterministic` specifies it. Each unit stores a partial output; `deterministic_merge`
merges them.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dcpmla.attention.backends.calls import DecodeCall, request_bound
from dcpmla.attention.hopper.consumers import NUM_STAGES, SCORES, hand_factor, score_tiles, take_factor, value_tiles
from dcpmla.attention.hopper.convert import convert_rows
from dcpmla.attention.hopper.launch import describe_cache, describe_queries
from dcpmla.attention.hopper.paging import Paging, Queries, Tiles, load_queries
from dcpmla.attention.hopper.partials import add_partial, store_partial
from dcpmla.attention.hopper.pipeline import LOG2E, new_barriers, new_buffers, seen_by_rows
from dcpmla.attention.hopper.producers import copy_tiles
from dcpmla.attention.hopper.schedule import ROWS, Batch
from dcpmla.attention.hopper.stage_ring import await_ready, free_at
from dcpmla.attention.hopper.units import SPLIT, begin_unit, cut_units, find_units, next_units, start_units, unit_of
from dcpmla.attention.triton.deterministic_merge import Partials, TileForm, attend_and_merge
from dcpmla.comm.kernels import merge_tree

find_shares = gluon.jit(merge_tree.find_shares.fn)


@gluon.jit
def _produce(queries, keys, buffers, barriers, paging, work, IS_CONVERTED: gl.constexpr):
    """Fill the stages with queries and keys."""
    walk = start_units(work)
    num_loaded = 0
    while walk.left > 0:
        units = find_units(walk, work)
        if units.is_any:
            load_queries(queries, units.first_row, buffers, barriers, walk.num_segments)
            for number in range(walk.unit, units.stop):
                unit = unit_of(number, units, walk, work)
                place = (begin_unit(walk, unit), unit, buffers, barriers, paging, num_loaded)
                num_loaded = convert_rows(queries, keys, *place) if IS_CONVERTED else copy_tiles(queries, keys, *place)
        walk = next_units(walk, units)


@gluon.jit
def _consume_scores(buffers, barriers, partials_ptr, lses_ptr, spare_row, scale, value_scale, work):
    """Compute scores, probabilities, LSE, and the left half of each unit's output, split by split."""
    walk = start_units(work)
    num_done, num_handed = 0, 0
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    while walk.left > 0:
        units = find_units(walk, work)
        if units.is_any:
            seen = seen_by_rows(row, units, work.batch.lens_ptr, work.batch.num_heads)
            num_rows = gl.minimum(units.num_rows, ROWS)
            await_ready(barriers.queries, walk.num_segments)
            for number in range(walk.unit, units.stop):
                unit = unit_of(number, units, walk, work)
                merged_lse = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
                for first in range(unit.start, unit.stop, SPLIT):
                    tiles = first, gl.minimum(first + SPLIT, unit.stop)
                    numbers = num_done, num_handed
                    acc, lse, num_done, num_handed = score_tiles(
                        *tiles, unit, seen, scale, value_scale, buffers, barriers, *numbers
                    )
                    to = gl.where(first == unit.start, unit.row, spare_row)
                    store_partial(partials_ptr, to, 0, num_rows, num_rows, acc)
                    if first == unit.start:
                        merged_lse = lse
                    else:
                        share, other_share, merged_lse = find_shares(merged_lse, lse)
                        share = hand_factor(share, buffers, barriers, num_handed)
                        other_share = hand_factor(other_share, buffers, barriers, num_handed + 1)
                        add_partial(partials_ptr, unit.row, spare_row, 0, num_rows, share, other_share)
                        num_handed += 2
                gl.store(lses_ptr + unit.row + row, merged_lse, mask=row < num_rows)
            mbarrier.arrive(free_at(barriers.queries, walk.num_segments), count=1)
        walk = next_units(walk, units)


@gluon.jit
def _consume_values(buffers, barriers, partials_ptr, spare_row, work):
    """Compute the right half of each unit's output, from the probabilities and factors of `_consume_scores`."""
    walk = start_units(work)
    num_done, num_handed = 0, 0
    while walk.left > 0:
        units = find_units(walk, work)
        if units.is_any:
            num_rows = gl.minimum(units.num_rows, ROWS)
            for number in range(walk.unit, units.stop):
                unit = unit_of(number, units, walk, work)
                for first in range(unit.start, unit.stop, SPLIT):
                    tiles = first, gl.minimum(first + SPLIT, unit.stop)
                    numbers = num_done, num_handed
                    acc, num_done, num_handed = value_tiles(*tiles, unit, buffers, barriers, *numbers)
                    to = gl.where(first == unit.start, unit.row, spare_row)
                    store_partial(partials_ptr, to, 1, num_rows, num_rows, acc)
                    if first != unit.start:
                        share = take_factor(buffers, barriers, num_handed)
                        other_share = take_factor(buffers, barriers, num_handed + 1)
                        add_partial(partials_ptr, unit.row, spare_row, 1, num_rows, share, other_share)
                        num_handed += 2
            mbarrier.arrive(free_at(barriers.queries, walk.num_segments), count=1)
        walk = next_units(walk, units)


# As `decode_kernel`: sizes of a step are not specialized. The number of lanes is not either, because the code for all
# numbers of ranks must round alike.
@gluon.jit(
    do_not_specialize=[
        "table_stride",
        "rows_per_block",
        "block_size",
        "num_reqs",
        "query_len",
        "num_heads",
        "q_token_stride",
        "num_tile_lanes",
        "num_partials",
    ],
    do_not_specialize_on_alignment=["kv_scale_ptr"],
)
def deterministic_kernel(
    q_desc,
    q_pe_desc,
    kv_desc,
    k_pe_desc,
    rows_ptr,
    table_ptr,
    lens_ptr,
    index_ptr,
    start_ptr,
    partials_ptr,
    lses_ptr,
    first_rows_ptr,
    kv_scale_ptr,
    table_stride,
    rows_per_block,
    block_size,
    num_reqs,
    query_len,
    num_heads,
    q_token_stride,
    num_tile_lanes,
    num_partials,
    scale,
    ROW_STRIDE: gl.constexpr,
    REQS: gl.constexpr,
    IS_CONVERTED: gl.constexpr,
):
    """Compute the partial outputs of this program's units, for one tile of each request's query rows.

    Args:
        first_rows_ptr: First row of each request's partial outputs [num_reqs] (`cut_units`), written by one program.
        num_partials: Rows of partial outputs that there is memory for, and then ROWS more for each program.
        table_ptr, .., scale, ROW_STRIDE, .., IS_CONVERTED: As in `decode_kernel`.
    """
    batch = Batch(lens_ptr, start_ptr, query_len, num_heads, gl.program_id(0), gl.to_tensor(False))
    buffers = new_buffers(q_desc, q_pe_desc, NUM_STAGES, 1, HAS_LSES=False)
    barriers = new_barriers(NUM_STAGES, 1, Q_CONSUMERS=2, PROBS_CONSUMERS=1, IS_MERGED=False)
    work = cut_units(batch, num_reqs, num_tile_lanes, num_partials, first_rows_ptr, REQS)
    queries = Queries(q_desc, q_pe_desc, num_heads, q_token_stride)
    keys = rows_ptr if kv_desc is None else Tiles(kv_desc, k_pe_desc)
    table = table_ptr, table_stride, index_ptr, rows_per_block, block_size
    is_ds_mla: gl.constexpr = IS_CONVERTED and kv_scale_ptr is None
    paging = Paging(*table, ROW_STRIDE, None, False, is_ds_mla)
    program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    spare_row = num_partials + program * ROWS  # a unit of several splits stores the later ones there
    value_scale = 1.0
    if IS_CONVERTED and not is_ds_mla:  # one scale for all: keys and values are exact without it
        value_scale = gl.load(kv_scale_ptr)
        scale = scale * value_scale
    producer_warps: gl.constexpr = 4 if IS_CONVERTED else 1
    consumer_registers: gl.constexpr = 184 if IS_CONVERTED else 232
    producer_registers: gl.constexpr = 120 if IS_CONVERTED else 40
    gl.warp_specialize(
        [
            (_consume_scores, (buffers, barriers, partials_ptr, lses_ptr, spare_row, scale, value_scale, work)),
            (_consume_values, (buffers, barriers, partials_ptr, spare_row, work)),
            (_produce, (queries, keys, buffers, barriers, paging, work, IS_CONVERTED)),
        ],
        [4, producer_warps],
        [consumer_registers, producer_registers],
    )


def run(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute a `DecodeCall` with num_tile_lanes, for the calls that `backends` admits."""
    num_lines = -(-call.max_query_len * call.q.shape[1] // ROWS.value)
    num_processors = torch.cuda.get_device_properties(call.q.device).multi_processor_count
    grid = num_lines, max(1, num_processors // num_lines)
    form = TileForm(ROWS.value, is_permuted=True, num_spare_rows=grid[0] * grid[1] * ROWS.value)
    return attend_and_merge(call, lambda call, partials: _attend(call, partials, grid), form)


def _attend(call: DecodeCall, partials: Partials, grid: tuple[int, int]) -> None:
    """Compute the partial outputs by a grid of (lines, parts)."""
    num_reqs = call.num_segments
    assert call.num_tile_lanes is not None
    cache, queries = describe_cache(call), describe_queries(call)
    deterministic_kernel[grid](
        queries.latent,
        queries.rope,
        cache.latent,
        cache.rope,
        cache.rows,
        call.block_table,
        call.seq_lens,
        call.request_index,
        call.query_start_loc,
        partials.rows,
        partials.lses,
        partials.first_rows,
        call.kv_scale,
        call.block_table.stride(0),
        cache.rows_per_block,
        call.block_size,
        num_reqs,
        call.max_query_len,
        call.q.shape[1],
        queries.token_stride,
        call.num_tile_lanes,
        len(partials.lses),
        call.softmax_scale * LOG2E.value,
        ROW_STRIDE=cache.row_stride,
        REQS=request_bound(num_reqs),
        IS_CONVERTED=cache.is_converted,
        num_warps=4,
        enable_fp_fusion=False,  # a compiler may fuse in one variant and not in another
    )
