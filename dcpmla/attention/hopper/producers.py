"""The producers of Hopper's decode kernel: they copy queries and keys into shared memory, stage after stage.

`produce_tiles` is one warp that copies tiles by TMA. `produce_rows` is four warps that gather single rows, as sparse
attention selects them. (`convert.produce_converted` is for caches of 8 bits.) A producer ends by waiting for
the other parts of the requests that its part shares.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.compat import aggregate, barrier, copy_async, tma_load
from dcpmla.attention.hopper.outputs import await_parts
from dcpmla.attention.hopper.schedule import HALF, KEYS, LATENT, ROPE, ROWS, find_request, next_begin, uniform
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
    mbarrier.wait(barriers.q_free, (num_segments & 1) ^ 1)
    width: gl.constexpr = LATENT if queries.rope_desc is None else LATENT + ROPE
    mbarrier.expect(barriers.q_ready, ROWS * width * size)
    tma_load(queries.half_desc, [first_row, 0], barriers.q_ready, buffers.q_left.index(0))
    tma_load(queries.half_desc, [first_row, HALF], barriers.q_ready, buffers.q_right.index(0))
    if queries.rope_desc is not None:
        tma_load(queries.rope_desc, [first_row, 0], barriers.q_ready, buffers.q_pe.index(0))


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
def produce_tiles(queries, keys, buffers, barriers, paging, counters_ptr, work):
    """Copy the queries of each segment, then its tiles of keys, by TMA."""
    num_stages: gl.constexpr = buffers.k_left.shape[0]
    size: gl.constexpr = keys.half_desc.dtype.primitive_bitwidth // 8
    batch = work.batch
    request, begin, start = work.request, work.begin, work.start
    num_segments, num_loaded, last, last_begin = 0, 0, 0, 0
    while start < work.end:
        first_row, num_rows, num_keys = find_request(request, batch)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), work.end)
        if (start < stop) & (num_rows > 0):
            table = find_table(request, paging)
            first_tile, num_tiles = start - begin, stop - start
            load_queries(queries, first_row, buffers, barriers, num_segments)
            num_segments += 1
            for tile in range(0, num_tiles):
                stage, phase = num_loaded % num_stages, (num_loaded // num_stages) & 1
                row = _find_row(first_tile + tile, table, paging)
                mbarrier.wait(barriers.left_free.index(stage), phase ^ 1)
                left_ready = barriers.left_ready.index(stage)
                mbarrier.expect(left_ready, KEYS * (HALF + ROPE) * size)
                tma_load(keys.half_desc, [row, 0], left_ready, buffers.k_left.index(stage))
                tma_load(keys.rope_desc, [row, 0], left_ready, buffers.k_pe.index(stage))
                mbarrier.wait(barriers.right_free.index(stage), phase ^ 1)
                right_ready = barriers.right_ready.index(stage)
                mbarrier.expect(right_ready, KEYS * HALF * size)
                tma_load(keys.half_desc, [row, HALF], right_ready, buffers.k_right.index(stage))
                num_loaded += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, work)
        start = gl.maximum(start, begin)
        request += 1
    await_parts(last, last_begin, work, counters_ptr, barriers.merge_ready)


@gluon.jit
def produce_rows(queries, rows_ptr, buffers, barriers, paging, counters_ptr, work):
    """Copy the queries of each segment by TMA, then its keys row by row, by cp.async."""
    num_stages: gl.constexpr = buffers.k_left.shape[0]
    by_key: gl.constexpr = gl.SliceLayout(1, COLUMNS)
    batch = work.batch
    request, begin, start = work.request, work.begin, work.start
    num_segments, num_loaded, last, last_begin = 0, 0, 0, 0
    while start < work.end:
        first_row, num_rows, num_keys = find_request(request, batch)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), work.end)
        if (start < stop) & (num_rows > 0):
            table = find_table(request, paging)
            tile, last_key = start - begin, gl.minimum(num_keys, (stop - begin) * KEYS) - 1
            found = find_keys(tile, last_key, table, rows_ptr, paging, by_key)
            load_queries(queries, first_row, buffers, barriers, num_segments)
            num_segments += 1
            while tile * KEYS <= last_key:
                stage, phase = num_loaded % num_stages, (num_loaded // num_stages) & 1
                keys_ptr = point_to(found, rows_ptr, paging)
                found = find_keys(tile + 1, last_key, table, rows_ptr, paging, by_key)
                mbarrier.wait(barriers.left_free.index(stage), phase ^ 1)
                _copy_columns(buffers.k_left.index(stage), keys_ptr, 0)
                if buffers.k_pe is not None:
                    _copy_columns(buffers.k_pe.index(stage), keys_ptr, LATENT)
                mbarrier.wait(barriers.right_free.index(stage), phase ^ 1)
                _copy_columns(buffers.k_right.index(stage), keys_ptr, HALF)
                async_copy.commit_group()
                async_copy.wait_group(0)
                fence_async_shared()
                barrier()  # all threads fence before one thread signals the arrival
                mbarrier.arrive(barriers.left_ready.index(stage), count=1)
                mbarrier.arrive(barriers.right_ready.index(stage), count=1)
                num_loaded += 1
                tile += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, work)
        start = gl.maximum(start, begin)
        request += 1
    await_parts(last, last_begin, work, counters_ptr, barriers.merge_ready)
