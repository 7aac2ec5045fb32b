"""The schedule of Hopper's decode kernel, in the manner of stream-K: how programs share the key tiles of a batch.

The key tiles of all requests form one line, which is cut into equal parts, one for each program. Each part of a request
that is cut stores a partial output (`outputs`). If that costs few tiles, the line has gaps between requests, so that
cuts fall between requests, or so that no part holds more than one request.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.compat import aggregate

ROWS = gl.constexpr(64)  # query rows of a tile
KEYS = gl.constexpr(64)  # keys of a tile
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)  # columns of a latent or an output per group of warps
ROPE = gl.constexpr(64)
MIN_TILES = gl.constexpr(2)  # tiles of a part: with fewer, partial outputs cost more than a shorter part saves
# Tiles by which a part may grow, at most by half, to save one partial output, or two: about their cost.
CUT_TILES = gl.constexpr(4)
TWO_CUTS_TILES = gl.constexpr(10)


@aggregate
class Batch:
    """The requests of a launch, and this program's line of their work.

    A line has one tile of each request's query rows; there is a line for each tile of the longest request. The tile
    rotates from request to request, so that the only tiles of short requests are spread over the lines.

    Programs of all lines that read the same keys at the same time share the loads. So if few requests are short,
    lines keep gaps in place of missing tiles, and stay in step.
    """

    lens_ptr: gl.tensor  # int32 [T], keys that each query token sees
    start_ptr: gl.base_value  # int32 [num_reqs + 1], first query token of each request; None: each has query_len tokens
    query_len: gl.tensor
    num_heads: gl.tensor
    line: gl.tensor
    has_gaps: gl.tensor


@aggregate
class Work:
    """This program's part of the line: tiles [start, end), counted from the front of the line.

    `size` and `granule` are the same for all parts: the number of tiles of a part, and the number to a multiple of
    which each request's tiles are padded in the line.
    """

    num_reqs: gl.tensor  # requests of the launch
    request: gl.tensor  # the first request of this part
    begin: gl.tensor  # position of its first tile
    start: gl.tensor
    end: gl.tensor
    size: gl.tensor
    granule: gl.tensor
    batch: Batch


@gluon.jit
def uniform(x):
    """Return an int32 that is the same in all threads, in a form from which the compiler can infer that.

    The compiler keeps values that depend on it in uniform registers.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def measure(index, batch):
    """Return the first query token of one request or a vector of requests, and its numbers of query tokens and keys."""
    query_len = batch.query_len
    first = index * query_len
    if batch.start_ptr is not None:
        first = gl.load(batch.start_ptr + index)
        query_len = gl.load(batch.start_ptr + index + 1) - first
    num_keys = gl.load(batch.lens_ptr + gl.maximum(first + query_len - 1, 0))
    return first, query_len, gl.where(query_len > 0, gl.maximum(num_keys, 0), 0)


@gluon.jit
def _look_up(index, batch):
    """Look up one request or a vector of requests.

    Returns the first query row of this line's tile, and the request's number of rows from there on and of keys: 0
    where no rows are left, or the keys of a gap.
    """
    first, query_len, num_keys = measure(index, batch)
    above = (batch.line + index) % gl.num_programs(0) * ROWS
    num_rows = query_len * batch.num_heads - above
    return first * batch.num_heads + above, num_rows, gl.where((num_rows > 0) | batch.has_gaps, num_keys, 0)


@gluon.jit
def find_request(index, batch):
    """Return `_look_up` of one request, in uniform registers."""
    first_row, num_rows, num_keys = _look_up(index, batch)
    return uniform(first_row), uniform(num_rows), uniform(num_keys)


@gluon.jit
def keep_gaps(lens_ptr, start_ptr, query_len, num_heads, line, num_reqs, REQS: gl.constexpr):
    """Return the `Batch` of a launch, with gaps if they are no more than a fifth of its lines."""
    batch = Batch(lens_ptr, start_ptr, query_len, num_heads, line, gl.to_tensor(True))
    if start_ptr is not None:  # else all requests have a tile in each line
        index = gl.arange(0, REQS, layout=gl.BlockedLayout([REQS // 32], [32], [4], [0]))
        _, lens, num_keys = measure(gl.minimum(index, num_reqs - 1), batch)
        num_tiles = gl.where(index < num_reqs, gl.cdiv(num_keys, KEYS), 0)
        work = gl.sum(num_tiles * gl.cdiv(lens * num_heads, ROWS), 0)
        room = gl.sum(num_tiles, 0) * gl.num_programs(0)
        batch = Batch(lens_ptr, start_ptr, query_len, num_heads, line, 5 * (room - work) <= room)
    return batch


@gluon.jit
def count_tiles(batch, num_reqs, REQS: gl.constexpr):
    """Return the number of key tiles of all requests, int32 [REQS], whole in each warp; gaps count."""
    index = gl.arange(0, REQS, layout=gl.BlockedLayout([REQS // 32], [32], [4], [0]))
    _, _, num_keys = _look_up(gl.minimum(index, num_reqs - 1), batch)
    return gl.where(index < num_reqs, gl.cdiv(num_keys, KEYS), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def cut(num_tiles, num_reqs, batch):
    """Cut the line of all requests' tiles (`count_tiles`) into parts; return this program's `Work`."""
    num_parts = gl.num_programs(1)
    even_size = gl.maximum(gl.cdiv(gl.sum(num_tiles, 0), num_parts), MIN_TILES)
    # An equal number of parts for each request, or of whole requests for each part.
    piece = gl.maximum(gl.cdiv(gl.max(num_tiles, 0), gl.maximum(num_parts // num_reqs, 1)), MIN_TILES)
    size = piece * gl.cdiv(num_reqs, num_parts)
    longer = gl.where(num_parts < 2 * num_reqs, TWO_CUTS_TILES, CUT_TILES)  # whole requests leave no partial outputs
    is_aligned = size <= even_size + gl.minimum(longer, even_size // 2)
    granule = gl.where(is_aligned, piece, 1)
    size = gl.where(is_aligned, size, even_size)
    ends = gl.associative_scan(gl.cdiv(num_tiles, granule) * granule, 0, _add)
    start = gl.program_id(1) * size
    request = gl.sum((ends <= start).to(gl.int32), 0)
    begin = gl.max(gl.where(ends <= start, ends, 0), 0)
    end = gl.minimum(start + size, gl.max(ends, 0))
    return Work(
        num_reqs=num_reqs,
        request=uniform(request),
        begin=uniform(begin),
        start=uniform(start),
        end=uniform(end),
        size=uniform(size),
        granule=uniform(granule),
        batch=batch,
    )


@aggregate
class Walk:
    """Position of a role on its way over the segments of its part."""

    request: gl.tensor
    begin: gl.tensor  # position of the request's first tile
    start: gl.tensor  # first tile of the part that is left
    last: gl.tensor  # request of the previous segment, and the position of its first tile
    last_begin: gl.tensor
    num_segments: gl.tensor  # number of segments that are finished


@aggregate
class Segment:
    """One request's tiles in a part: [`Walk.start`, stop) of the line."""

    first_row: gl.tensor  # results of `find_request`
    num_rows: gl.tensor
    num_keys: gl.tensor
    stop: gl.tensor
    is_any: gl.tensor  # False: the part has no tiles of the request, or a gap
    num_tile_lanes: gl.base_value  # None: the tiles are adjacent (`units.Unit`)
    is_new: gl.base_value  # whether the producer loads the queries with its keys; False: they are there already


@gluon.jit
def start_walk(work):
    """Return the position before a part's first request."""
    none = gl.to_tensor(0)
    return Walk(work.request, work.begin, work.start, none, none, none)


@gluon.jit
def find_segment(walk, work):
    """Return the part's segment of the present request."""
    first_row, num_rows, num_keys = find_request(walk.request, work.batch)
    stop = gl.minimum(walk.begin + gl.cdiv(num_keys, KEYS), work.end)
    return Segment(first_row, num_rows, num_keys, stop, (walk.start < stop) & (num_rows > 0), None, True)


@gluon.jit
def first_key(tile, segment):
    """Return the position of a tile's first key: tile n of the request, or of the unit's lane."""
    if segment.num_tile_lanes is not None:
        tile = tile * segment.num_tile_lanes + segment.this_class
    return tile * KEYS


@gluon.jit
def is_whole(walk, segment):
    """Return whether the part has all tiles of the request; else other parts have the rest."""
    return segment.stop - walk.start == gl.cdiv(segment.num_keys, KEYS)


@gluon.jit
def finish_segment(walk, segment):
    """Return the position after the tiles of a segment."""
    return Walk(walk.request, walk.begin, segment.stop, walk.request, walk.begin, walk.num_segments + 1)


@gluon.jit
def next_request(walk, segment, work):
    """Return the position at the next request."""
    begin = walk.begin + gl.cdiv(gl.cdiv(segment.num_keys, KEYS), work.granule) * work.granule
    start = gl.maximum(walk.start, begin)
    return Walk(walk.request + 1, begin, start, walk.last, walk.last_begin, walk.num_segments)


@gluon.jit
def sharing_parts(begin, num_keys, work):
    """Return the first part that has tiles of a request, and how many parts have."""
    first_part = begin // work.size
    return first_part, (begin + gl.cdiv(num_keys, KEYS) - 1) // work.size - first_part + 1


@gluon.jit
def num_shared(work, last_begin):
    """Count the requests that other parts may share: this part's first request, and its last if different."""
    return (work.start < work.end).to(gl.int32) + (work.begin < last_begin).to(gl.int32)
