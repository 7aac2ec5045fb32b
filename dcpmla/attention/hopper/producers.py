"""The copies of Hopper's decode kernel: a segment's queries and keys into shared memory, stage after stage.

`copy_tiles` is for one warp, and copies tiles by TMA. `copy_rows` is for four warps, and gathers single rows, as sparse
attention selects them. `convert.convert_rows` is for caches of 8 bits. `decode.produce` calls one of the three for each
segment.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.compat import aggregate, barrier, copy_async, tma_load
from dcpmla.attention.hopper.ring import await_free, ready_at
from dcpmla.attention.hopper.schedule import HALF, KEYS, LATENT, ROPE, ROWS, uniform
from dcpmla.cache import shared_format

PAGE_ROWS = gl.constexpr(shared_format.PAGE_ROWS)
COLUMNS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread


@aggregate
class Tiles:
    """TMA descriptors of queries or keys; each part of a row is a matrix of its own.

    The rope part of shared keys is None.
    """

    half_desc: gl.base_value  # tiles of half a latent
    rope_desc: gl.base_value


@aggregate
class Paging:
    """Layout of a request's keys in the rows of the cache."""

    table_ptr: gl.tensor  # int32 [num_tables, max_blocks]
    table_stride: gl.tensor
    index_ptr: gl.base_value  # int32 [num_reqs], row of the table of each request; None: its own number
    rows_per_block: gl.tensor  # stride of blocks, in rows
    block_size: gl.tensor
    row_stride: gl.constexpr  # elements of the pointer to the rows
    page_stride: gl.constexpr  # stride of fp8_ds_mla's pages of shared keys; None for other rows
    is_sparse: gl.constexpr  # the table holds numbers of rows
    is_ds_mla: gl.constexpr  # rows of fp8_ds_mla


@gluon.jit
def load_queries(queries, first_row, buffers, barriers, num_segments):
    """Start the copies of a segment's queries, once the consumers have released the previous ones."""
    size: gl.constexpr = queries.half_desc.dtype.primitive_bitwidth // 8
    await_free(barriers.queries, num_segments)
    ready = ready_at(barriers.queries, num_segments)
    width: gl.constexpr = LATENT if queries.rope_desc is None else LATENT + ROPE
    mbarrier.expect(ready, ROWS * width * size)
    tma_load(queries.half_desc, [first_row, 0], ready, buffers.q_left.index(0))
    tma_load(queries.half_desc, [first_row, HALF], ready, buffers.q_right.index(0))
    if queries.rope_desc is not None:
        tma_load(queries.rope_desc, [first_row, 0], ready, buffers.q_pe.index(0))


@gluon.jit
def find_table(request, paging):
    """Return a pointer to a request's row of the block table."""
    row = request
    if paging.index_ptr is not None:
        row = uniform(gl.load(paging.index_ptr + request))
    return paging.table_ptr + row.to(gl.int64) * paging.table_stride


@gluon.jit
def _find_row(tile, table, paging):
    """Return the row of the cache at which a tile of keys begins."""
    key = tile * KEYS
    return gl.load(table + key // paging.block_size) * paging.rows_per_block + key % paging.block_size


@gluon.jit
def find_keys(tile, last_key, table, rows_ptr, paging, layout: gl.constexpr):
    """Return the keys' locations in a tile [KEYS] for `point_to`: pointers, or row numbers where the table has them.

    Past the last key of a segment the table is undefined, so the last key or the last tile is returned again.
    """
    key = gl.arange(0, KEYS, layout=layout)
    if paging.is_sparse:
        found = gl.load(table + gl.minimum(tile * KEYS + key, last_key))
    else:
        row = _find_row(gl.minimum(tile, last_key // KEYS), table, paging)
        found = rows_ptr + row.to(gl.int64) * paging.row_stride + key * paging.row_stride
    return found


@gluon.jit
def split_row(found):
    """Split numbers of rows into numbers of pages and of rows in a page."""
    found = found.to(gl.uint32)  # unsigned quotients are shifts
    return found // PAGE_ROWS, found % PAGE_ROWS


@gluon.jit
def point_to(found, rows_ptr, paging):
    """Return pointers to keys from `find_keys`.

    Pointers to single rows take two registers each, so they are computed when they are needed; other pointers differ
    by constants.
    """
    if paging.page_stride is not None:
        page, row = split_row(found)
        found = rows_ptr + page.to(gl.int64) * paging.page_stride + row * paging.row_stride
    elif paging.is_sparse:
        found = rows_ptr + found.to(gl.int64) * paging.row_stride
    return found


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
    load_queries(queries, segment.first_row, buffers, barriers, walk.num_segments)
    for tile in range(0, num_tiles):
        row = _find_row(first_tile + tile, table, paging)
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
    tile = walk.start - walk.begin
    last_key = gl.minimum(segment.num_keys, (segment.stop - walk.begin) * KEYS) - 1
    found = find_keys(tile, last_key, table, rows_ptr, paging, by_key)
    load_queries(queries, segment.first_row, buffers, barriers, walk.num_segments)
    while tile * KEYS <= last_key:
        keys_ptr = point_to(found, rows_ptr, paging)
        found = find_keys(tile + 1, last_key, table, rows_ptr, paging, by_key)
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
