"""The producer of Hopper's decode kernel: it copies queries and keys into shared memory, stage after stage.

`copy_tiles` is for one warp, and copies tiles by TMA. `copy_rows` is for four warps, and gathers single rows, as sparse
attention selects them. `convert.convert_rows` is for caches of 8 bits. `produce` calls one of the three for each
segment.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.compat import barrier, copy_async, tma_load
from dcpmla.attention.hopper.convert import convert_rows
from dcpmla.attention.hopper.paging import find_keys, find_row, find_table, load_queries, point_to
from dcpmla.attention.hopper.partials import await_parts
from dcpmla.attention.hopper.schedule import (
    HALF,
    KEYS,
    LATENT,
    ROPE,
    find_segment,
    finish_segment,
    first_key,
    next_request,
    start_walk,
)
from dcpmla.attention.hopper.stage_ring import await_free, ready_at

COLUMNS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread


@gluon.jit
def _copy_columns(buffer, keys_ptr, first: gl.constexpr):
    """Start copies of columns of keys into a buffer [KEYS, N]: N columns from `first` on."""
    column = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, COLUMNS))
    copy_async(buffer, gl.expand_dims(keys_ptr, 1) + (first + gl.expand_dims(column, 0)))


@gluon.jit
def copy_tiles(queries, keys, walk, segment, buffers, barriers, paging, num_loaded):
    """Copy the queries of a segment, then its tiles of keys, by TMA; return the number of tiles loaded so far."""
    size: gl.constexpr = keys.half_desc.dtype.primitive_bitwidth // 8
    table = find_table(walk.request, paging)
    first_tile, num_tiles = walk.start - walk.begin, segment.stop - walk.start
    if segment.is_new:
        load_queries(queries, segment.first_row, buffers, barriers, walk.num_segments)
    for tile in range(0, num_tiles):
        row = find_row(first_key(first_tile + tile, segment), table, paging)
        stage = await_free(barriers.left, num_loaded)
        left_ready = ready_at(barriers.left, num_loaded)
        mbarrier.expect(left_ready, KEYS * (HALF + ROPE) * size)
        tma_load(keys.half_desc, [row, 0], left_ready, buffers.k_left.index(stage))
        tma_load(keys.rope_desc, [row, 0], left_ready, buffers.k_pe.index(stage))
        await_free(barriers.right, num_loaded)
        right_ready = ready_at(barriers.right, num_loaded)
        mbarrier.expect(right_ready, KEYS * HALF * size)
        tma_load(keys.half_desc, [row, HALF], right_ready, buffers.k_right.index(stage))
        num_loaded += 1
    return num_loaded


@gluon.jit
def copy_rows(queries, rows_ptr, walk, segment, buffers, barriers, paging, num_loaded):
    """Copy the queries of a segment by TMA, then its keys row by row, by cp.async; return the tiles loaded so far."""
    by_key: gl.constexpr = gl.SliceLayout(1, COLUMNS)
    table = find_table(walk.request, paging)
    tile, stop = walk.start - walk.begin, segment.stop - walk.begin
    found = find_keys(tile, stop, segment, table, rows_ptr, paging, by_key)
    load_queries(queries, segment.first_row, buffers, barriers, walk.num_segments)
    while tile < stop:
        keys_ptr = point_to(found, rows_ptr, paging)
        found = find_keys(tile + 1, stop, segment, table, rows_ptr, paging, by_key)
        stage = await_free(barriers.left, num_loaded)
        _copy_columns(buffers.k_left.index(stage), keys_ptr, 0)
        if buffers.k_pe is not None:
            _copy_columns(buffers.k_pe.index(stage), keys_ptr, LATENT)
        await_free(barriers.right, num_loaded)
        _copy_columns(buffers.k_right.index(stage), keys_ptr, HALF)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()  # all threads fence before one thread signals the arrival
        mbarrier.arrive(ready_at(barriers.left, num_loaded), count=1)
        mbarrier.arrive(ready_at(barriers.right, num_loaded), count=1)
        num_loaded += 1
        tile += 1
    return num_loaded


@gluon.jit
def produce(queries, keys, buffers, barriers, paging, counters_ptr, work, IS_CONVERTED: gl.constexpr):
    """Fill the stages with queries and keys, then wait for other parts of the requests that this part shares."""
    walk = start_walk(work)
    num_loaded = 0
    while walk.start < work.end:
        segment = find_segment(walk, work)
        if segment.is_any:
            place = (walk, segment, buffers, barriers, paging, num_loaded)
            if paging.row_stride is None:
                num_loaded = copy_tiles(queries, keys, *place)
            elif IS_CONVERTED:
                num_loaded = convert_rows(queries, keys, *place)
            else:
                num_loaded = copy_rows(queries, keys, *place)
            walk = finish_segment(walk, segment)
        walk = next_request(walk, segment, work)
    await_parts(walk, work, counters_ptr, barriers.merge_ready)
