"""The schedule of decode in a fixed order on Hopper: units of work, and the units of each program.

A unit has one tile of query rows of a request and up to SPLIT_TILES tiles of keys of one lane, so its arithmetic is
the same whatever else a launch computes. The units of a request are numbered split by split, and lane by lane in a
split: unit j is in lane j % num_tile_lanes. Programs take equal parts of the line of all requests' units, and whole
units.

Each unit has rows of memory of its own for its partial output, if there is room; else a lane of a request is one unit,
which merges its splits in memory one by one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.backends.deterministic_reference import SPLIT_TILES
from dcpmla.attention.hopper.compat import aggregate
from dcpmla.attention.hopper.schedule import KEYS, ROWS, measure, uniform
from dcpmla.attention.triton import deterministic_merge

SPLIT = gl.constexpr(SPLIT_TILES)
_UNIT_TILES = gl.constexpr(2)  # about the cost of a unit without its tiles, in tiles
count_units = gluon.jit(deterministic_merge.count_units.fn)


@aggregate
class UnitWork:
    """This program's units: `number` units from unit `unit` of a request on."""

    batch: gl.base_value  # `schedule.Batch`
    num_reqs: gl.tensor
    num_tile_lanes: gl.tensor
    has_rows: gl.tensor  # whether each unit has rows of its own
    request: gl.tensor
    unit: gl.tensor
    row: gl.tensor  # first row of the request's partial outputs
    number: gl.tensor


@aggregate
class UnitWalk:
    """Position of a role on its way over the units of its program, request by request."""

    request: gl.tensor
    unit: gl.tensor
    row: gl.tensor  # first row of the request's partial outputs
    left: gl.tensor  # units of the program that are left
    num_segments: gl.tensor  # number of tiles of queries that are finished
    start: gl.tensor  # first tile of a unit (`schedule.Walk`)
    begin: gl.tensor


@aggregate
class RequestUnits:
    """The program's units [`UnitWalk.unit`, stop) of a request, in its line."""

    first_row: gl.tensor  # first query row, and the rows and keys of the request from there on
    num_rows: gl.tensor
    num_keys: gl.tensor
    num_units: gl.tensor  # units of the request
    request_rows: gl.tensor  # query rows of the request
    stop: gl.tensor
    is_any: gl.tensor  # False: no units, or no rows in this program's line


@aggregate
class Unit:
    """A unit: tiles [start, stop) of a lane. The first fields are as in `schedule.Segment`."""

    first_row: gl.tensor
    num_rows: gl.tensor
    num_keys: gl.tensor
    num_tile_lanes: gl.tensor
    is_new: gl.base_value
    start: gl.tensor
    stop: gl.tensor
    this_class: gl.tensor
    row: gl.tensor  # first row of its partial output


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _at(values, position, index):
    """Return the element of a vector at a position as a scalar. index: All positions."""
    return gl.sum(gl.where(index == position, values, 0), 0)


@gluon.jit
def cut_units(batch, num_reqs, num_tile_lanes, num_partials, first_rows_ptr, REQS: gl.constexpr):
    """Cut the line of all requests' units; return this program's `UnitWork`.

    One program stores the first row of each request's partial outputs for the merge: n, or -1 - n if a lane has the
    rows of one unit.

    Args:
        num_partials: Number of rows of partial outputs that there is memory for.
    """
    index = gl.arange(0, REQS, layout=gl.BlockedLayout([REQS // 32], [32], [4], [0]))
    _, query_len, num_keys = measure(gl.minimum(index, num_reqs - 1), batch)
    num_rows = gl.where(index < num_reqs, query_len * batch.num_heads, 0)
    num_tiles = gl.where(num_rows > 0, gl.cdiv(num_keys, KEYS), 0)
    split_units = count_units(num_tiles, num_tile_lanes)
    has_rows = gl.sum(split_units * num_rows, 0) <= num_partials
    units = gl.where(has_rows, split_units, gl.minimum(num_tiles, num_tile_lanes))
    weights = num_tiles + units * _UNIT_TILES
    ends = gl.associative_scan(weights, 0, _add)
    row_ends = gl.associative_scan(units * num_rows, 0, _add)
    if (gl.program_id(0) == 0) & (gl.program_id(1) == 0):
        rows = row_ends - units * num_rows
        gl.store(first_rows_ptr + index, gl.where(has_rows, rows, -1 - rows), mask=index < num_reqs)

    size = gl.maximum(gl.cdiv(gl.max(ends, 0), gl.num_programs(1)), 1)
    start = gl.program_id(1) * size
    request = gl.sum((ends <= start).to(gl.int32), 0)
    unit = _cut_request(start, request, ends, weights, units, index)
    last = gl.sum((ends <= start + size).to(gl.int32), 0)
    last_unit = _cut_request(start + size, last, ends, weights, units, index)
    first_number = gl.sum(gl.where(index < request, units, 0), 0) + unit
    number = gl.sum(gl.where(index < last, units, 0), 0) + last_unit - first_number
    row = _at(row_ends - units * num_rows, request, index)
    return UnitWork(
        batch=batch,
        num_reqs=num_reqs,
        num_tile_lanes=num_tile_lanes,
        has_rows=uniform(has_rows.to(gl.int32)),
        request=uniform(request),
        unit=uniform(unit),
        row=uniform(row),
        number=uniform(number),
    )


@gluon.jit
def _cut_request(at, request, ends, weights, units, index):
    """Return the first unit of a request that begins at or after a position of the line: units weigh the same."""
    weight = _at(weights, request, index)
    begin = _at(ends, request, index) - weight
    return gl.cdiv((at - begin) * _at(units, request, index), gl.maximum(weight, 1))


@gluon.jit
def start_units(work):
    """Return the position before a program's first unit."""
    none = gl.to_tensor(0)
    return UnitWalk(work.request, work.unit, work.row, work.number, none, none, none)


@gluon.jit
def find_units(walk, work):
    """Return the program's units of the present request."""
    batch = work.batch
    first, query_len, num_keys = measure(walk.request, batch)
    request_rows, num_keys = uniform(query_len * batch.num_heads), uniform(num_keys)
    above = batch.line * ROWS
    num_tiles = gl.where(request_rows > 0, gl.cdiv(num_keys, KEYS), 0)
    num_units = gl.minimum(num_tiles, work.num_tile_lanes)
    num_units = gl.where(work.has_rows != 0, count_units(num_tiles, work.num_tile_lanes), num_units)
    stop = gl.minimum(num_units, walk.unit + walk.left)
    rows = uniform(first * batch.num_heads) + above, request_rows - above, num_keys
    return RequestUnits(*rows, num_units, request_rows, stop, (walk.unit < stop) & (above < request_rows))


@gluon.jit
def unit_of(number, units, walk, work):
    """Return a unit of a request by its number."""
    num_tile_lanes = work.num_tile_lanes
    this_class, start = number % num_tile_lanes, number // num_tile_lanes * SPLIT
    stop = gl.cdiv(gl.cdiv(units.num_keys, KEYS) - this_class, num_tile_lanes)
    stop = gl.where(work.has_rows != 0, gl.minimum(start + SPLIT, stop), stop)
    row = walk.row + number * units.request_rows + work.batch.line * ROWS
    rows = units.first_row, units.num_rows, units.num_keys
    return Unit(*rows, num_tile_lanes, False, start, stop, this_class, row)


@gluon.jit
def begin_unit(walk, unit):
    """Return the position at the first tile of a unit."""
    place = walk.request, walk.unit, walk.row, walk.left, walk.num_segments
    return UnitWalk(*place, unit.start, walk.begin)


@gluon.jit
def next_units(walk, units):
    """Return the position at the next request."""
    row = walk.row + units.num_units * units.request_rows
    left = walk.left - gl.maximum(units.stop - walk.unit, 0)
    num_segments = walk.num_segments + units.is_any.to(gl.int32)
    return UnitWalk(walk.request + 1, gl.to_tensor(0), row, left, num_segments, walk.start, walk.begin)
