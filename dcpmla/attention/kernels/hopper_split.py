"""How programs of Hopper's decode kernel share the work.

The key tiles of all requests stand in one row, which is cut into equal parts, a part a program. A request that a cut goes through leaves a
partial output from each of its parts; when all have arrived, these programs merge them, each some of the rows. Where that costs few tiles,
requests stand in the row with gaps behind them, so that cuts fall between requests, or so that no part has more than one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)  # query rows of a tile
KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
GROUP = gl.constexpr(16)  # columns that lie together in a partial output
MIN_TILES = gl.constexpr(2)  # of a part: below, partial outputs cost more than a shorter part saves
CUT_TILES = gl.constexpr(4)  # by which a part may be longer for fewer cuts: about what a partial output costs
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name before Triton 3.7


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def exp2(x):
    """In one instruction: gl.exp2 takes four more to keep denormal numbers, which nothing here needs."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def uniform(x):
    """A number that is the same in all threads, so that the compiler knows it: it keeps what depends on it in uniform registers."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _look_up(index, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED: gl.constexpr):
    """Of one request or a vector of them: first query token, query rows from this tile of rows on, keys (none where no rows are left)."""
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
def cut(lens_ptr, start_ptr, num_reqs, query_len, num_heads, row_tile, REQS: gl.constexpr, IS_RAGGED: gl.constexpr):
    """This program's part of the row: its first request, where that one's tiles begin, where the part begins and ends.

    And what is the same for all parts: their size, and the granule of which each request takes a multiple of tiles in the row.
    """
    layout: gl.constexpr = gl.BlockedLayout([REQS // 32], [32], [4], [0])  # whole in each warp
    index = gl.arange(0, REQS, layout=layout)
    _, _, num_keys = _look_up(gl.minimum(index, num_reqs - 1), lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
    num_tiles = gl.where(index < num_reqs, gl.cdiv(num_keys, KEYS), 0)
    num_parts = gl.num_programs(0)
    even_size = gl.cdiv(gl.sum(num_tiles, 0), num_parts)
    # As many parts for each request, or as many whole requests for each part.
    piece = gl.maximum(gl.cdiv(gl.max(num_tiles, 0), gl.maximum(num_parts // num_reqs, 1)), MIN_TILES)
    size = piece * gl.cdiv(num_reqs, num_parts)
    is_aligned = size <= even_size + CUT_TILES
    granule = gl.where(is_aligned, piece, 1)
    size = gl.where(is_aligned, size, gl.maximum(even_size, MIN_TILES))
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
def find_slot(part, begins, row_tile):
    """Where a part leaves a partial output. It has two places: for a request that it goes on with, and for one that it begins."""
    return (row_tile * gl.num_programs(0) + part) * 2 + begins.to(gl.int32)


@gluon.jit
def store_half(out_ptr, first_row, num_rows, half, acc):
    """Columns of a half, rows [first_row, first_row + num_rows) of [N, LATENT], from acc [ROWS, HALF]."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    first_ptr = out_ptr + first_row.to(gl.int64) * LATENT  # what is added to it fits into an instruction
    at = first_ptr + (gl.expand_dims(row * LATENT, 1) + gl.expand_dims(column, 0))
    gl.store(at, acc.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(row < num_rows, 1))


@gluon.jit
def partial_at(slot, half, row, column):
    """Where an element of a partial output lies: groups of columns, with all rows of one group before the next."""
    group = (slot * 2 + half) * (HALF // GROUP) + column // GROUP
    return (group * ROWS + row) * GROUP + column % GROUP


@gluon.jit
def store_partial(partials_ptr, slot, half, num_rows, acc):
    """A half of a partial output from acc [ROWS, HALF], as it lies in the registers of wgmma: a warp writes 512 bytes without gaps.

    So the columns of a group are out of order; `_in_order` mends that when all is merged.
    """
    values = acc.reshape([ROWS, HALF // GROUP, 2, 4, 2]).permute((1, 0, 3, 2, 4)).reshape([HALF // GROUP, ROWS * 4, 4])
    layout: gl.constexpr = values.type.layout
    group = gl.arange(0, HALF // GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    quarter = gl.arange(0, ROWS * 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = gl.expand_dims(gl.expand_dims(group * (ROWS * GROUP), 1) + gl.expand_dims(quarter * 4, 0), 2)
    at += gl.expand_dims(gl.expand_dims(column, 0), 1)
    is_row = gl.expand_dims(gl.expand_dims(quarter // 4 < num_rows, 0), 2)
    gl.store(partials_ptr + partial_at(slot, half, 0, 0) + at, values, mask=is_row)


@gluon.jit
def _in_order(values):
    """Columns of merged rows [N, HALF] as they belong."""
    rows: gl.constexpr = values.shape[0]
    return values.reshape([rows, HALF // GROUP, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, HALF])


@gluon.jit
def shared_parts(begin, num_keys, size):
    """The first part that has tiles of a request, and how many have."""
    first_part = begin // size
    return first_part, (begin + gl.cdiv(num_keys, KEYS) - 1) // size - first_part + 1


@gluon.jit
def counters_at(counters_ptr, first_part, row_tile):
    """A request that is cut has the counter of the part that it begins in."""
    return counters_ptr + row_tile * gl.num_programs(0) + first_part


@gluon.jit
def arrive(counters_ptr, first_part, row_tile):
    """Say that half of a partial output is in its place."""
    barrier()
    gl.atomic_add(counters_at(counters_ptr, first_part, row_tile), 1, sem="release", scope="gpu")


@gluon.jit
def _read(counter):
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED: gl.constexpr):
    """Open `merge_ready` for each request that this part shares with others, its first and its last, when all its parts have arrived.

    The last program to see that leaves the counter as it was found.
    """
    request, begin, start, end, size, _, lens_ptr, start_ptr, query_len, num_heads = work
    for merge in range(0, (start < end).to(gl.int32) + (begin < last_begin).to(gl.int32)):
        _, _, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        first_part, num_parts = shared_parts(begin, num_keys, size)
        if num_parts > 1:
            counter = counters_at(counters_ptr, first_part, row_tile)
            while _read(counter) < 2 * num_parts:
                pass
            mbarrier.arrive(merge_ready.index(merge), count=1)
            if gl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 3 * num_parts - 1:
                gl.store(counter, 0)
        request, begin = last, last_begin


@gluon.jit
def merge_cut(half, last, last_begin, work, outputs, merge_ready, row_tile, IS_RAGGED: gl.constexpr):
    """Merge half the columns of the requests that this part shares with others: its first, its last, both or none.

    To be called when all tiles of the part are done: a wait in between would make each part wait for the whole of the one before it.
    """
    request, begin, start, end, size, _, lens_ptr, start_ptr, query_len, num_heads = work
    for merge in range(0, (start < end).to(gl.int32) + (begin < last_begin).to(gl.int32)):
        first, num_rows, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        first_part, num_parts = shared_parts(begin, num_keys, size)
        if num_parts > 1:
            mbarrier.wait(merge_ready.index(merge), 0)
            mine = gl.program_id(0) - first_part
            num_mine = gl.cdiv(gl.minimum(num_rows, ROWS) - mine, num_parts)  # every num_parts-th row
            rows = first * num_heads + row_tile * ROWS + mine, num_mine
            if num_parts <= 2:
                _merge_rows(half, first_part, num_parts, mine, rows, outputs, row_tile, 16, 2)
            elif num_parts <= 8:
                _merge_rows(half, first_part, num_parts, mine, rows, outputs, row_tile, 8, 4)
            else:
                _merge_rows(half, first_part, num_parts, mine, rows, outputs, row_tile, 2, 16)
        request, begin = last, last_begin


@gluon.jit
def _merge_rows(half, first_part, num_parts, mine, rows, outputs, row_tile, AT_ONCE: gl.constexpr, PARTS: gl.constexpr):
    """Online over PARTS partial outputs at a time, for AT_ONCE rows at a time."""
    out_ptr, lse_ptr, partials_ptr, partial_lse_ptr, _ = outputs
    first_row, num_mine = rows
    layout: gl.constexpr = gl.BlockedLayout([AT_ONCE, PARTS // 2, 4], [1, 2, 16], [1, 1, 4], [2, 1, 0])
    by_part: gl.constexpr = gl.SliceLayout(2, layout)
    by_column: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    for base in range(0, num_mine, AT_ONCE):
        index = base + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_part))
        row = gl.expand_dims(mine + index * num_parts, 1)
        peak = gl.full([AT_ONCE], -float("inf"), gl.float32, gl.SliceLayout(1, by_part))
        total = gl.zeros([AT_ONCE], gl.float32, gl.SliceLayout(1, by_part))
        acc = gl.zeros([AT_ONCE, HALF], gl.float32, by_column)
        for other in range(0, num_parts, PARTS):
            part = gl.expand_dims(other + gl.arange(0, PARTS, layout=gl.SliceLayout(0, by_part)), 0)
            slot = find_slot(first_part + part, part == 0, row_tile)
            is_there = (part < num_parts) & gl.expand_dims(index < num_mine, 1)
            lse = gl.load(partial_lse_ptr + slot * ROWS + row, mask=is_there, other=-float("inf"))
            at = partial_at(gl.expand_dims(slot, 2), half, gl.expand_dims(row, 2), gl.expand_dims(gl.expand_dims(column, 0), 0))
            values = gl.load(partials_ptr + at, mask=gl.expand_dims(is_there, 2), other=0.0)
            new_peak = gl.maximum(peak, gl.max(lse, 1))
            shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf - -inf is NaN
            factor = exp2((peak - shift) * LOG2E)
            weights = exp2((lse - gl.expand_dims(shift, 1)) * LOG2E)
            total = total * factor + gl.sum(weights, 1)
            column_factor = gl.convert_layout(factor, gl.SliceLayout(1, by_column))
            acc = acc * gl.expand_dims(column_factor, 1) + gl.sum(values * gl.expand_dims(weights, 2), 1)
            peak = new_peak
        is_any = total != 0
        total = gl.where(is_any, total, 1.0)
        acc = _in_order(acc / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, by_column)), 1))
        if half == 0:
            lse = gl.where(is_any, peak + gl.log2(total) * LN2, -float("inf"))
            gl.store(lse_ptr + first_row + index * num_parts, lse, mask=index < num_mine)
        by_row: gl.constexpr = acc.type.layout
        index = gl.expand_dims(base + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_row)), 1)
        out_column = half * HALF + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, by_row)), 0)
        first_ptr = out_ptr + first_row.to(gl.int64) * LATENT
        gl.store(first_ptr + (index * num_parts * LATENT + out_column), acc.to(out_ptr.dtype.element_ty), mask=index < num_mine)
