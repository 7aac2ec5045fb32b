"""The locations of a segment's queries and keys in memory, and the copy of the queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dcpmla.attention.hopper.compat import aggregate, tma_load
from dcpmla.attention.hopper.schedule import HALF, KEYS, LATENT, ROPE, ROWS, first_key, uniform
from dcpmla.attention.hopper.stage_ring import await_free, ready_at
from dcpmla.cache import shared_format

PAGE_ROWS = gl.constexpr(shared_format.PAGE_ROWS)


@aggregate
class Tiles:
    """TMA descriptors of keys; each part of a row is a matrix of its own.

    The rope part of shared keys is None.
    """

    half_desc: gl.base_value  # tiles of half a latent
    rope_desc: gl.base_value


@aggregate
class Queries:
    """TMA descriptors of queries.

    half_desc has the heads of all tokens as rows; or, with a token stride, the heads of one token, and tokens as
    columns, because heads may be farther apart in memory than tokens.
    """

    half_desc: gl.base_value  # tiles of half a latent
    rope_desc: gl.base_value
    num_heads: gl.tensor
    token_stride: gl.base_value  # columns of half_desc from token to token, or None


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
    row, column = first_row, 0
    if queries.token_stride is not None:
        row, column = first_row % queries.num_heads, first_row // queries.num_heads * queries.token_stride
    tma_load(queries.half_desc, [row, column], ready, buffers.q_left.index(0))
    tma_load(queries.half_desc, [row, column + HALF], ready, buffers.q_right.index(0))
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
def find_row(key, table, paging):
    """Return the row of the cache at which a tile of keys begins."""
    return gl.load(table + key // paging.block_size) * paging.rows_per_block + key % paging.block_size


@gluon.jit
def find_keys(tile, stop, segment, table, rows_ptr, paging, layout: gl.constexpr):
    """Return the keys' locations in a tile [KEYS] for `point_to`: pointers, or row numbers where the table has them.

    Past the last key of a segment, whose tiles end at `stop`, the table is undefined, so the last key or the last tile
    is returned again.
    """
    key = gl.arange(0, KEYS, layout=layout)
    if paging.is_sparse:
        last_key = gl.minimum(segment.num_keys, stop * KEYS) - 1
        location = gl.load(table + gl.minimum(tile * KEYS + key, last_key))
    else:
        row = find_row(first_key(gl.minimum(tile, stop - 1), segment), table, paging)
        location = rows_ptr + row.to(gl.int64) * paging.row_stride + key * paging.row_stride
    return location


@gluon.jit
def split_row(location):
    """Split numbers of rows into numbers of pages and of rows in a page."""
    location = location.to(gl.uint32)  # unsigned quotients are shifts
    return location // PAGE_ROWS, location % PAGE_ROWS


@gluon.jit
def point_to(location, rows_ptr, paging):
    """Return pointers to keys from `find_keys`.

    Pointers to single rows take two registers each, so they are computed when they are needed; other pointers differ
    by constants.
    """
    if paging.page_stride is not None:
        page, row = split_row(location)
        location = rows_ptr + page.to(gl.int64) * paging.page_stride + row * paging.row_stride
    elif paging.is_sparse:
        location = rows_ptr + location.to(gl.int64) * paging.row_stride
    return location
