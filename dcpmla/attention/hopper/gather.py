"""Keys that lie anywhere, in pages of one row, as sparse attention picks them: where they are, and the loader of those
of 16 bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.load import NUM_STAGES, ROPE, find_row, tma_load
from dcpmla.attention.hopper.merge import await_cut
from dcpmla.attention.hopper.split import HALF, KEYS, LATENT, ROWS, barrier, find_request, next_begin

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # its name before Triton 3.7
COLUMNS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread


@gluon.jit
def find_keys(tile, keys, layout: gl.constexpr, ROW_WIDTH: gl.constexpr, IS_SPARSE: gl.constexpr):
    """Where the keys of a tile lie [KEYS], for `point_to`: pointers, which differ by constants; of pages of one row
    the rows' numbers.

    Behind the last of pages of one row that one again, and behind the last tile that tile: a table says nothing there.
    """
    cache_ptr, table, last_key, rows_per_block, block_size = keys
    key = gl.arange(0, KEYS, layout=layout)
    if IS_SPARSE:
        places = gl.load(table + gl.minimum(tile * KEYS + key, last_key))
    else:
        row = find_row(gl.minimum(tile, last_key // KEYS), table, rows_per_block, block_size)
        places = cache_ptr + row.to(gl.int64) * ROW_WIDTH + key * ROW_WIDTH
    return places


@gluon.jit
def point_to(places, cache_ptr, ROW_WIDTH: gl.constexpr, IS_SPARSE: gl.constexpr):
    """Pointers to the keys of a tile.

    Those to pages of one row are made when they are needed: they take two registers each.
    """
    if IS_SPARSE:
        places = cache_ptr + places.to(gl.int64) * ROW_WIDTH
    return places


@gluon.jit
def _copy_columns(buffer, rows_ptr, first: gl.constexpr):
    """Columns from first on of rows, as many as a buffer [KEYS, N] has."""
    column = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, COLUMNS))
    copy(buffer, gl.expand_dims(rows_ptr, 1) + (first + gl.expand_dims(column, 0)))


@gluon.jit
def gather_role(
    descs,
    cache_ptr,
    buffers,
    ready,
    free,
    paging,
    counters_ptr,
    work,
    row_tile,
    IS_RAGGED: gl.constexpr,
    ROW_WIDTH: gl.constexpr,
):
    """`load_role` with four warps: a segment's queries, then its keys row by row into the stages that the others have
    freed.
    """
    table_ptr, table_stride, rows_per_block, block_size = paging
    q_desc, q_pe_desc = descs
    q_left, q_right, q_pe, k_left, k_right, k_pe = buffers
    q_ready, left_ready, right_ready, _, merge_ready = ready
    q_free, left_free, right_free, _ = free
    request, begin, start, end, _, granule, lens_ptr, start_ptr, query_len, num_heads = work
    by_key: gl.constexpr = gl.SliceLayout(1, COLUMNS)
    num_segments, num_loaded, last, last_begin = 0, 0, 0, 0
    while start < end:
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            q_row = first * num_heads + row_tile * ROWS
            table = table_ptr + request.to(gl.int64) * table_stride
            tile, last_key = start - begin, gl.minimum(num_keys, (stop - begin) * KEYS) - 1
            keys = (cache_ptr, table, last_key, rows_per_block, block_size)
            places = find_keys(tile, keys, by_key, ROW_WIDTH, True)
            mbarrier.wait(q_free, (num_segments & 1) ^ 1)
            mbarrier.expect(q_ready, ROWS * (LATENT + ROPE) * 2)
            tma_load(q_desc, [q_row, 0], q_ready, q_left.index(0))
            tma_load(q_desc, [q_row, HALF], q_ready, q_right.index(0))
            tma_load(q_pe_desc, [q_row, LATENT], q_ready, q_pe.index(0))
            num_segments += 1
            while tile * KEYS <= last_key:
                stage, phase = num_loaded % NUM_STAGES, (num_loaded // NUM_STAGES) & 1
                rows_ptr = point_to(places, cache_ptr, ROW_WIDTH, True)
                places = find_keys(tile + 1, keys, by_key, ROW_WIDTH, True)
                mbarrier.wait(left_free.index(stage), phase ^ 1)
                _copy_columns(k_left.index(stage), rows_ptr, 0)
                _copy_columns(k_pe.index(stage), rows_ptr, LATENT)
                mbarrier.wait(right_free.index(stage), phase ^ 1)
                _copy_columns(k_right.index(stage), rows_ptr, HALF)
                async_copy.commit_group()
                async_copy.wait_group(0)
                fence_async_shared()
                barrier()  # all threads' fences before the one thread's arrival
                mbarrier.arrive(left_ready.index(stage), count=1)
                mbarrier.arrive(right_ready.index(stage), count=1)
                num_loaded += 1
                tile += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED)
