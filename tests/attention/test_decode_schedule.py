"""The split of decode's work over programs: the Hopper kernel's schedule and merge in torch, the portable kernel in
Triton's interpreter.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.triton import decode as mla_decode
from tests.support.backends import as_kernel, checked_call
from tests.support.decode_cases import SMALL, Case, check
from tests.support.examples import few
from tests.support.ranks import on_ranks
from tests.support.schedule_in_torch import HALF, LATENT, MOST_PARTS, ROWS, Pointer, schedule_in_torch
from tests.support.shared_memory import run_interpreted


class Doors:
    """`merge_ready` of a program."""

    def __init__(self) -> None:
        self.opened: tuple[list[int], list[int]] = ([], [])

    def index(self, merge: int) -> list[int]:
        return self.opened[merge]


@dataclass
class Batch:
    """Query tokens, each with the number of keys that it sees; a row of scores and values a key."""

    queries: list[int]
    seq_lens: Tensor
    num_heads: int
    scores: Tensor
    values: Tensor

    @classmethod
    def draw(cls, requests: list[tuple[int, int]], num_heads: int) -> "Batch":
        seq_lens = [max(0, keys - behind) for queries, keys in requests for behind in reversed(range(queries))]
        generator = torch.Generator().manual_seed(len(seq_lens))
        most = max([1, *seq_lens])
        scores = torch.randn(len(seq_lens) * num_heads, most, generator=generator) * 3
        values = torch.randn(len(requests), most, LATENT, generator=generator)
        return cls([queries for queries, _ in requests], torch.tensor([*seq_lens, 0]), num_heads, scores, values)

    def attend(self, request: int, first_row: int, num_rows: int, keys: slice) -> tuple[Tensor, Tensor]:
        """Output and LSE of rows over some of their request's keys."""
        rows = torch.arange(first_row, first_row + num_rows)
        position = torch.arange(keys.start, keys.stop)
        scores = self.scores[rows][:, position].masked_fill(
            position >= self.seq_lens[rows // self.num_heads, None], -torch.inf
        )
        lse = scores.logsumexp(1)
        return (scores - lse.nan_to_num(neginf=0.0)[:, None]).exp() @ self.values[request][position], lse


def run(batch: Batch, num_parts: int, is_ragged: bool) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Run all programs' segments, then all programs' merges, as the roles do both.

    Returns out, LSE, counters, and the tiles of each program.
    """
    start_loc = torch.tensor([0, *batch.queries]).cumsum(0)
    query_len = max(batch.queries)
    grid = -(-query_len * batch.num_heads // ROWS), num_parts
    hopper = schedule_in_torch(grid)
    num_partials = grid[0] * grid[1] * 2
    out, lse = torch.full((len(batch.scores) * LATENT,), torch.nan), torch.full((len(batch.scores),), torch.nan)
    partials = torch.full((num_partials * ROWS * LATENT,), torch.nan)
    partial_lses = torch.full((num_partials * ROWS,), torch.nan)
    counters = torch.zeros(grid[0] * grid[1], dtype=torch.int32)
    outputs = SimpleNamespace(
        out_ptr=Pointer(out),
        lse_ptr=Pointer(lse),
        mail=None,
        partials_ptr=Pointer(partials),
        partial_lses_ptr=Pointer(partial_lses),
        counters_ptr=Pointer(counters),
    )
    requests = Pointer(batch.seq_lens), Pointer(start_loc) if is_ragged else None, query_len, batch.num_heads
    num_reqs = len(batch.queries)
    works, tiles = {}, []
    for line, part in programs(grid):
        hopper.program[:] = line, part
        present = hopper.keep_gaps(*requests, line, num_reqs, max(32, num_reqs))
        work = hopper.cut(hopper.count_tiles(present, num_reqs, max(32, num_reqs)), num_reqs, present)
        walk, mine = hopper.start_walk(work), 0
        while walk.start < work.end:
            segment = hopper.find_segment(walk, work)
            if segment.is_any:
                first_row = int(segment.first_row)
                count = min(int(segment.num_rows), ROWS)
                keys = slice(int(walk.start - walk.begin), int(segment.stop - walk.begin))
                piece, piece_lse = batch.attend(int(walk.request), first_row, count, keys)
                if hopper.is_whole(walk, segment):
                    rows = slice(first_row, first_row + count)
                    out.view(-1, LATENT)[rows], lse[rows] = piece, piece_lse
                else:
                    begins = walk.start == walk.begin
                    at = int(hopper.find_partial(walk.start // work.size, begins, line)) * ROWS
                    assert partial_lses[at].isnan(), "a partial output is stored over another one"
                    partial_lses[at : at + count] = piece_lse
                    for half in range(2):
                        index = hopper.partial_at(at // ROWS, half, torch.arange(count)[:, None], torch.arange(HALF))
                        partials[index] = piece[:, half * HALF :][:, :HALF]
                    for _ in range(2):
                        hopper.arrive(outputs.counters_ptr, walk.begin, work)
                mine += int(segment.stop - walk.start)
                walk = hopper.finish_segment(walk, segment)
            walk = hopper.next_request(walk, segment, work)
        works[line, part] = walk, work
        tiles.append(mine)
    doors = {program: Doors() for program in works}
    for program in programs(grid):
        hopper.program[:] = program
        hopper.await_parts(*works[program], outputs.counters_ptr, doors[program])
    for program in programs(grid):
        hopper.program[:] = program
        for half in range(2):
            hopper.merge_parts(half, *works[program], outputs, doors[program])
    return out.view(-1, LATENT), lse, counters, tiles


def programs(grid: tuple[int, int]) -> Iterator[tuple[int, int]]:
    return itertools.product(range(grid[0]), range(grid[1]))


requests = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=7)


@given(requests=requests, num_heads=st.integers(1, 9), num_parts=st.integers(1, MOST_PARTS), is_uniform=st.booleans())
# A part that goes on with one and begins another.
@example(requests=[(1, 5), (1, 5), (1, 5)], num_heads=4, num_parts=4, is_uniform=True)
@example(requests=[(1, 40)], num_heads=4, num_parts=14, is_uniform=True)  # more rows than parts of them
# Gaps, so that no part has two requests.
@example(requests=[(1, 20), (1, 3), (1, 20)], num_heads=4, num_parts=8, is_uniform=True)
@example(requests=[(1, 7)] * 7, num_heads=4, num_parts=3, is_uniform=True)  # whole requests
@example(requests=[(1, 30)] * 5, num_heads=4, num_parts=4, is_uniform=True)  # whole ones would be too uneven
@example(requests=[(1, 4), (1, 0), (1, 4)], num_heads=1, num_parts=4, is_uniform=True)  # cuts where a request ends
@example(requests=[(1, 20), *[(4, 30)] * 4], num_heads=2, num_parts=5, is_uniform=False)  # a gap in the second line
@example(requests=[(1, 20), *[(4, 30)] * 4, (1, 9)], num_heads=2, num_parts=14, is_uniform=False)  # one in each
@example(requests=[(1, 0), (4, 3), (0, 7), (2, 20), (0, 0)], num_heads=3, num_parts=5, is_uniform=False)
def test_the_hopper_kernels_split_and_merge(
    requests: list[tuple[int, int]], num_heads: int, num_parts: int, is_uniform: bool
) -> None:
    """Each row is computed once, from every key that it sees; programs have about as many tiles; counters are reset."""
    if is_uniform:
        requests = [(requests[0][0], keys) for _, keys in requests]
    batch = Batch.draw(requests, num_heads)
    out, lse, counters, tiles = run(batch, num_parts, is_ragged=not is_uniform)
    assert not counters.any()
    with_gaps = sum(tiles) * 5 / 4 / len(tiles)
    for line in range(len(tiles) // num_parts):
        mine = tiles[line * num_parts : (line + 1) * num_parts]
        longer = 10 if num_parts < 2 * len(requests) else 4
        assert max(mine) <= max(2, math.ceil(max(sum(mine) / num_parts, with_gaps)) + longer)
    first_row = 0
    for request, num_queries in enumerate(batch.queries):
        num_rows = num_queries * num_heads
        rows = slice(first_row, first_row + num_rows)
        last = first_row // num_heads + num_queries - 1
        if num_rows and (num_keys := int(batch.seq_lens[last])):  # those without keys are another function's
            wanted, wanted_lse = batch.attend(request, first_row, num_rows, slice(0, num_keys))
            torch.testing.assert_close(out[rows], wanted, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(lse[rows], wanted_lse, atol=1e-5, rtol=1e-4)
        first_row += num_rows


INTERPRETED = st.builds(
    Case,
    requests=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 300)), min_size=1, max_size=5),
    num_heads=st.sampled_from([1, 3, 16, 20, 33]),
    is_sharded=st.booleans(),
    num_programs=st.integers(1, 2),
    **{name: st.just(value) for name, value in SMALL.items()},
)


@on_ranks(1, run_interpreted)
def test_the_portable_kernels_schedule_in_the_interpreter() -> None:
    @few
    @given(case=INTERPRETED, min_tiles=st.sampled_from([1, 2, 8]))
    @example(case=Case([(1, 320)] * 3, num_heads=3, num_programs=1, **SMALL), min_tiles=8)  # two cut requests in a part
    # Many parts of a request.
    @example(case=Case([(1, 300), (1, 100)], num_heads=20, num_programs=2, **SMALL), min_tiles=1)
    def check_one(case: Case, min_tiles: int) -> None:
        mla_decode.MIN_TILES = mla_decode.tl.constexpr(min_tiles)
        check(as_kernel(mla_decode.run, checked_call), case, "cpu")

    check_one()
