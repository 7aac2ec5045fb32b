"""How programs of Hopper's decode kernel share the work.

The key tiles of all requests stand in one row, which is cut into equal parts, a part a program. A request that a
cut goes through leaves a partial output from each of its parts (`hopper_merge`). Where that costs few tiles, requests
stand in the row with
gaps behind them, so that cuts fall between requests, or so that no part has more than one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # query rows of a tile
KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
MIN_TILES = gl.constexpr(2)  # of a part: below, partial outputs cost more than a shorter part saves
CUT_TILES = gl.constexpr(
    4
)  # by which a part may be longer for fewer cuts, half of it at most: about what a partial output costs
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name before Triton 3.7


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def uniform(x):
    """A number that is the same in all threads, so that the compiler knows it: it keeps what depends on it in uniform
    registers.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _look_up(index, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED: gl.constexpr):
    """Of one request or a vector of them: first query token, query rows from this tile of rows on, keys (none where no
    rows are left).
    """
    first = index * query_len
    if IS_RAGGED:
        first = gl.load(start_ptr + index)
        query_len = gl.load(start_ptr + index + 1) - first
    num_rows = query_len * num_heads - row_tile * ROWS
    num_keys = gl.load(lens_ptr + gl.maximum(first + query_len - 1, 0))
    return first, num_rows, gl.where(num_rows > 0, gl.maximum(num_keys, 0), 0)


@gluon.jit
def find_request(index, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED: gl.constexpr):
    """`_look_up` of one request."""
    first, num_rows, num_keys = _look_up(index, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
    return uniform(first), uniform(num_rows), uniform(num_keys)


@gluon.jit
def look_up_all(
    lens_ptr, start_ptr, num_reqs, query_len, num_heads, row_tile, REQS: gl.constexpr, IS_RAGGED: gl.constexpr
):
    """Key tiles of all requests [REQS], whole in each warp."""
    index = gl.arange(0, REQS, layout=gl.BlockedLayout([REQS // 32], [32], [4], [0]))
    known = gl.minimum(index, num_reqs - 1)
    _, _, num_keys = _look_up(known, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
    return gl.where(index < num_reqs, gl.cdiv(num_keys, KEYS), 0)


@gluon.jit
def cut(num_tiles, num_reqs):
    """This program's part of the row: its first request, where that one's tiles begin, where the part begins and ends.

    And what is the same for all parts: their size, and the granule of which each request takes a multiple of tiles
        in the row.
    """
    num_parts = gl.num_programs(0)
    even_size = gl.maximum(gl.cdiv(gl.sum(num_tiles, 0), num_parts), MIN_TILES)
    # As many parts for each request, or as many whole requests for each part.
    piece = gl.maximum(gl.cdiv(gl.max(num_tiles, 0), gl.maximum(num_parts // num_reqs, 1)), MIN_TILES)
    size = piece * gl.cdiv(num_reqs, num_parts)
    is_aligned = size <= even_size + gl.minimum(CUT_TILES, even_size // 2)
    granule = gl.where(is_aligned, piece, 1)
    size = gl.where(is_aligned, size, even_size)
    ends = gl.associative_scan(gl.cdiv(num_tiles, granule) * granule, 0, _add)
    start = gl.program_id(0) * size
    request = gl.sum((ends <= start).to(gl.int32), 0)
    begin = gl.max(gl.where(ends <= start, ends, 0), 0)
    end = gl.minimum(start + size, gl.max(ends, 0))
    return uniform(request), uniform(begin), uniform(start), uniform(end), uniform(size), uniform(granule)


@gluon.jit
def next_begin(begin, num_keys, granule):
    """Where the next request's tiles begin."""
    return begin + gl.cdiv(gl.cdiv(num_keys, KEYS), granule) * granule


@gluon.jit
def shared_parts(begin, num_keys, size):
    """The first part that has tiles of a request, and how many have."""
    first_part = begin // size
    return first_part, (begin + gl.cdiv(num_keys, KEYS) - 1) // size - first_part + 1


@gluon.jit
def num_shared(begin, start, end, last_begin):
    """Requests of a part that other parts may have tiles of: its first one, and its last where that is another."""
    return (start < end).to(gl.int32) + (begin < last_begin).to(gl.int32)


@gluon.jit
def find_partial(part, begins, row_tile):
    """Where a part leaves a partial output.

    It has two places: for a request that it goes on with, and for one that it begins.
    """
    return (row_tile * gl.num_programs(0) + part) * 2 + begins.to(gl.int32)
