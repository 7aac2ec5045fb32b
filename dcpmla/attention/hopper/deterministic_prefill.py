"""Multi-head attention in a fixed order on Hopper; `deterministic_reference.prefill_deterministic` specifies it.

The pipeline of `prefill` over a chunk of a request's keys, from the first tile to the last. Tiles are the same for all
queries, because chunks begin at multiples of a tile. Where a query does not see a key, the key's probability is zero
and changes no bit of the query's sums.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from dcpmla.attention.backends.deterministic_reference import DeterministicPrefillCall, Sums
from dcpmla.attention.backends.obstacles import is_matrix
from dcpmla.attention.hopper.compat import aggregate
from dcpmla.attention.hopper.pipeline import LN2, LOG2E
from dcpmla.attention.hopper.prefill import heads_side_by_side
from dcpmla.attention.hopper.prefill_consumers import clear_past, softmax, start_scores, start_values, store_rows
from dcpmla.attention.hopper.prefill_pipeline import (
    KEYS,
    NOPE,
    NUM_STAGES,
    PRODUCT,
    QUERIES,
    ROPE,
    ROW,
    ROWS,
    VALUE,
    find_tile,
    new_tiles,
    produce,
)
from dcpmla.attention.hopper.stage_ring import await_ready, describe, free_at


@aggregate
class ChunkWork:
    """A program's queries and the keys of the chunk that any of its queries sees."""

    head: gl.tensor
    first_row: gl.tensor  # row of the first query in q
    num_queries: gl.tensor  # queries of the request from there on; 0 if the chunk has no keys of the request
    last_key: gl.tensor  # last key of the chunk that the first query sees
    key_start: gl.tensor  # row of the first key in k_nope, k_pe and v
    num_keys: gl.tensor  # keys of the request in the chunk
    num_tiles: gl.tensor
    is_first: gl.tensor  # whether the chunk has the request's first keys
    is_last: gl.tensor  # whether it has the last ones


@aggregate
class CarriedSums:
    """Memory for the sums of all queries between chunks, float32."""

    acc_ptr: gl.tensor  # [T, h, VALUE]
    peak_ptr: gl.tensor  # [T, h]
    total_ptr: gl.tensor  # [T, h]


@gluon.jit
def _find_work(query_start_ptr, query_position_ptr, key_start_ptr, key_position_ptr, num_reqs):
    """Return the program's `ChunkWork`. A request's last tile, which sees the most keys, runs first."""
    program = gl.num_programs(1) - 1 - gl.program_id(1)
    request, tile = find_tile(query_start_ptr, num_reqs, program, QUERIES)
    first_query, query_start = tile * QUERIES, gl.load(query_start_ptr + request)
    num_queries = gl.load(query_start_ptr + request + 1) - query_start
    key_start = gl.load(key_start_ptr + request)
    num_keys = gl.load(key_start_ptr + request + 1) - key_start
    first_key = gl.load(key_position_ptr + request)
    offset = gl.load(query_position_ptr + request) - first_key  # query number i sees the keys up to number i + offset
    # Programs of rows before the first request have tiles below 0.
    num_left = gl.where((num_keys > 0) & (tile >= 0), num_queries - first_query, 0)
    num_seen = gl.maximum(gl.minimum(num_keys, first_query + QUERIES + offset), 0)
    num_tiles = gl.where(num_left > 0, gl.cdiv(num_seen, KEYS), 0)
    place = gl.program_id(0), query_start + first_query, num_left, first_query + offset
    return ChunkWork(*place, key_start, num_keys, num_tiles, first_key == 0, num_keys == num_queries + offset)


@gluon.jit
def _hide_unseen(scores, step, last):
    """Replace the scores of keys past the last one that each query sees by -inf."""
    key = step * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, PRODUCT))
    return gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(last, 1), scores, -float("inf"))


@gluon.jit
def _clear_values(step, buffers, work):
    """Zero the values past the request's last key in a tile that has arrived."""
    if (step + 1) * KEYS > work.num_keys:
        clear_past(buffers.v.index(step % NUM_STAGES), work.num_keys - step * KEYS)


@gluon.jit
def _attend(begin, end, sums, group: gl.constexpr, buffers, barriers, last, scale_log2, work, IS_MASKED: gl.constexpr):
    """Attend to tiles [begin, end), where the probabilities of tile begin - 1 wait for its values.

    sums: Sum of values, probabilities, peak and total so far.
    """
    acc, probs, peak, total = sums
    dtype: gl.constexpr = buffers.v.dtype
    for step in range(begin, end):
        scores = start_scores(group, buffers, barriers, step)
        acc = start_values(probs, buffers, step - 1, acc)
        scores = warpgroup_mma_wait(1, deps=[scores])
        async_copy.mbarrier_arrive(free_at(barriers.keys, step), increment_count=False)
        if IS_MASKED:
            scores = _hide_unseen(scores, step, last)
        next_probs, factor, peak, total = softmax(scores, peak, total, scale_log2, dtype)
        await_ready(barriers.values, step)  # see `prefill_consumers.consume`
        acc, probs = warpgroup_mma_wait(0, deps=[acc, probs])
        async_copy.mbarrier_arrive(free_at(barriers.values, step - 1), increment_count=False)
        if IS_MASKED:
            _clear_values(step, buffers, work)
        acc = acc * gl.expand_dims(factor, 1)
        probs = next_probs
    return acc, probs, peak, total


@gluon.jit
def _consume(group: gl.constexpr, buffers, barriers, carried, out_ptr, lse_ptr, num_heads, scale_log2, work):
    """Attend from half of the queries."""
    dtype: gl.constexpr = buffers.v.dtype
    row, column = gl.arange(0, ROWS, layout=ROW), gl.arange(0, VALUE, layout=gl.SliceLayout(0, PRODUCT))
    is_row = group * ROWS + row < work.num_queries
    at = (work.first_row + group * ROWS + row).to(gl.int64) * num_heads + work.head
    acc_ptrs = carried.acc_ptr + gl.expand_dims(at, 1) * VALUE + gl.expand_dims(column, 0)
    acc = gl.zeros([ROWS, VALUE], gl.float32, PRODUCT)
    peak = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    if (work.num_queries > 0) & (not work.is_first):
        acc = gl.load(acc_ptrs, mask=gl.expand_dims(is_row, 1), other=0.0)
        peak = gl.load(carried.peak_ptr + at, mask=is_row, other=0.0)
        total = gl.load(carried.total_ptr + at, mask=is_row, other=0.0)
    if work.num_tiles > 0:
        last = work.last_key + group * ROWS + row
        mbarrier.wait(barriers.q_ready, 0)
        scores = warpgroup_mma_wait(0, deps=[start_scores(group, buffers, barriers, 0)])
        async_copy.mbarrier_arrive(free_at(barriers.keys, 0), increment_count=False)
        probs, factor, peak, total = softmax(_hide_unseen(scores, 0, last), peak, total, scale_log2, dtype)
        acc = acc * gl.expand_dims(factor, 1)
        await_ready(barriers.values, 0)
        _clear_values(0, buffers, work)
        # All queries see all keys of the first tiles.
        num_whole = gl.minimum(work.last_key + group * ROWS + 1, work.num_keys) // KEYS
        middle = gl.minimum(gl.maximum(num_whole, 1), work.num_tiles)
        sums = acc, probs, peak, total
        role = group, buffers, barriers, last, scale_log2, work
        sums = _attend(1, middle, sums, *role, False)
        acc, probs, peak, total = _attend(middle, work.num_tiles, sums, *role, True)
        acc = warpgroup_mma_wait(0, deps=[start_values(probs, buffers, work.num_tiles - 1, acc)])
    if work.num_queries > 0:
        if work.is_last:
            acc = acc * gl.expand_dims(1.0 / total, 1)
            lse = (peak + gl.log2(total)) * LN2
            store_rows(group, acc, lse, buffers.q_nope.index(group), out_ptr, lse_ptr, num_heads, work)
        else:
            gl.store(acc_ptrs, acc, mask=gl.expand_dims(is_row, 1))
            gl.store(carried.peak_ptr + at, peak, mask=is_row)
            gl.store(carried.total_ptr + at, total, mask=is_row)


@gluon.jit(do_not_specialize=["num_reqs", "num_heads"])
def deterministic_prefill_kernel(
    q_nope_desc,
    q_pe_desc,
    k_nope_desc,
    k_pe_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    query_start_ptr,
    query_position_ptr,
    key_start_ptr,
    key_position_ptr,
    num_reqs,
    num_heads,
    q_stride_head,
    k_stride_head,
    v_stride_head,
    scale_log2,
):
    """Add a chunk's keys to the sums of one tile of queries of one head. The grid is (heads, tiles).

    A request's sums begin anew if its first keys are in the chunk. If its last keys are, results are stored instead.
    Descriptors, strides and scale_log2 are as in `prefill_kernel`.
    """
    buffers, barriers = new_tiles(v_desc.dtype)
    work = _find_work(query_start_ptr, query_position_ptr, key_start_ptr, key_position_ptr, num_reqs)
    carried = CarriedSums(acc_ptr, peak_ptr, total_ptr)
    descs = (q_nope_desc, q_pe_desc, k_nope_desc, k_pe_desc, v_desc)
    strides = (q_stride_head, k_stride_head, v_stride_head)
    gl.warp_specialize(
        [
            (_consume, (0, buffers, barriers, carried, out_ptr, lse_ptr, num_heads, scale_log2, work)),
            (_consume, (1, buffers, barriers, carried, out_ptr, lse_ptr, num_heads, scale_log2, work)),
            (produce, (descs, strides, buffers, barriers, work, True)),
        ],
        [4, 1],
        [240, 24],
    )


def run(call: DeterministicPrefillCall, out: Tensor, lse: Tensor, sums: Sums) -> None:
    """Compute `deterministic.attend_to_chunk` for calls that `obstacles.hopper_widths` admits, without a host sync."""
    num_tokens, num_heads, _ = call.q.shape
    num_reqs = len(call.query_start_loc) - 1
    q, k_nope, v = (_as_matrix(rows) for rows in (call.q, call.k_nope, call.v))
    heads = heads_side_by_side(q)
    deterministic_prefill_kernel[(num_heads, num_tokens // QUERIES.value + num_reqs)](
        describe(heads, ROWS.value, NOPE.value),
        describe(heads, ROWS.value, ROPE.value),
        describe(heads_side_by_side(k_nope), KEYS.value, NOPE.value),
        describe(_as_matrix(call.k_pe[:, None])[:, 0], KEYS.value, ROPE.value),
        describe(heads_side_by_side(v), KEYS.value, VALUE.value),
        out,
        lse,
        *sums,
        call.query_start_loc,
        call.query_position,
        call.key_start_loc,
        call.key_position,
        num_reqs,
        num_heads,
        q.stride(1),
        k_nope.stride(1),
        v.stride(1),
        call.softmax_scale * LOG2E.value,
        num_warps=4,
        enable_fp_fusion=False,  # a compiler may fuse in one variant and not in another
    )


def _as_matrix(rows: Tensor) -> Tensor:
    """Return rows [N, h, D], or a copy if TMA cannot read them in place."""
    return rows if is_matrix(rows) else rows.contiguous()
