"""The three groups of warps in Hopper's decode kernel; `mla_decode_hopper` says what each is for, `hopper_split` how programs share work.

A segment is what a part has of one request. Each role walks the part's segments by itself, and meets the others at barriers in shared
memory: `ready` ones say that a buffer is filled, `free` ones that it may be filled again. A barrier alternates between two phases, hence
the counts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dcpmla.attention.kernels.hopper_split import (
    HALF,
    KEYS,
    LATENT,
    LN2,
    ROWS,
    arrive,
    barrier,
    exp2,
    find_request,
    find_slot,
    merge_cut,
    store_half,
)

ROPE = gl.constexpr(64)
NUM_STAGES = gl.constexpr(2)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.7


@gluon.jit
def load_role(descs, buffers, ready, free, table_ptr, table_stride, rows_per_block, block_size, work, row_tile, IS_RAGGED: gl.constexpr):
    """The loader: a segment's queries, then its keys tile after tile into the stages that the others have freed."""
    q_desc, q_pe_desc, kv_desc, k_pe_desc = descs
    q_left, q_right, q_pe, k_left, k_right, k_pe = buffers
    q_ready, left_ready, right_ready, _ = ready
    q_free, left_free, right_free, _ = free
    request, begin, start, end, _, lens_ptr, start_ptr, query_len, num_heads = work
    num_segments, num_loaded = 0, 0
    while start < end:
        first, num_rows, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            row = first * num_heads + row_tile * ROWS
            table = table_ptr + request.to(gl.int64) * table_stride
            key = (start - begin) * KEYS
            block = gl.load(table + key // block_size)
            mbarrier.wait(q_free, (num_segments & 1) ^ 1)
            mbarrier.expect(q_ready, ROWS * (LATENT + ROPE) * 2)
            tma_load(q_desc, [row, 0], q_ready, q_left)
            tma_load(q_desc, [row, HALF], q_ready, q_right)
            tma_load(q_pe_desc, [row, LATENT], q_ready, q_pe)
            num_segments += 1
            for _tile in range(start, stop):
                stage, phase = num_loaded % NUM_STAGES, (num_loaded // NUM_STAGES) & 1
                row = block * rows_per_block + key % block_size
                key += KEYS
                block = gl.load(table + key // block_size, mask=key < num_keys, other=0)  # ahead of the waits
                mbarrier.wait(left_free.index(stage), phase ^ 1)
                mbarrier.expect(left_ready.index(stage), KEYS * (HALF + ROPE) * 2)
                tma_load(kv_desc, [row, 0], left_ready.index(stage), k_left.index(stage))
                tma_load(k_pe_desc, [row, LATENT], left_ready.index(stage), k_pe.index(stage))
                mbarrier.wait(right_free.index(stage), phase ^ 1)
                mbarrier.expect(right_ready.index(stage), KEYS * HALF * 2)
                tma_load(kv_desc, [row, HALF], right_ready.index(stage), k_right.index(stage))
                num_loaded += 1
            start = stop
        begin += gl.cdiv(num_keys, KEYS)
        request += 1


@gluon.jit
def _clear_behind(values, num_keys):
    """Zero the rows of a tile's values [KEYS, HALF] behind the last key: what stands there may be NaN, and 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    for quarter in gl.static_range(4):
        columns = values.slice(quarter * (HALF // 4), HALF // 4, 1)
        columns.store(gl.where(gl.expand_dims(key, 1) < num_keys, columns.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _start_scores(buffers, ready, num_tiles):
    """Queries times a tile's keys, in three products that run on."""
    q_left, q_right, q_pe, k_left, k_right, k_pe = buffers
    _, left_ready, right_ready, _ = ready
    stage, phase = num_tiles % NUM_STAGES, (num_tiles // NUM_STAGES) & 1
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    mbarrier.wait(left_ready.index(stage), phase)
    scores = warpgroup_mma(q_left, k_left.index(stage).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(q_pe, k_pe.index(stage).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right_ready.index(stage), phase)
    return warpgroup_mma(q_right, k_right.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _hand_over(scores, first_key, num_seen, num_seen_by_all, scale, peak, total, handed, num_handed):
    """A tile's step of the online softmax: probabilities and the factor of what was summed before, also into the helper's buffers."""
    probs, factors, probs_ready, probs_free = handed
    if first_key + KEYS > num_seen_by_all:
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(gl.expand_dims(num_seen, 1) > gl.expand_dims(key, 0), scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    shift = gl.where(new_peak == -float("inf"), 0.0, new_peak) * scale  # -inf - -inf is NaN
    factor = exp2(peak * scale - shift)
    prob = exp2(scores * scale - gl.expand_dims(shift, 1))
    total = total * factor + gl.sum(prob, 1)
    weights = prob.to(probs.dtype)
    mbarrier.wait(probs_free, (num_handed & 1) ^ 1)
    probs.store(weights)
    factors.store(factor)
    mbarrier.arrive(probs_ready, count=1)
    return gl.convert_layout(weights, WEIGHTS), gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT)), new_peak, total


@gluon.jit
def score_role(buffers, handed, ready, free, outputs, scale, work, row_tile, IS_RAGGED: gl.constexpr, OVERLAPS: gl.constexpr):
    """The scorer: scores, probabilities, LSE, and the left half of the output.

    A tile's product with the values is started before the next tile's scores. Where it OVERLAPS it is waited for behind their start, so
    the tensor cores go from one to the other; else before, so the loader has the values' place while the next tile is still to come.
    """
    k_left = buffers[3]
    q_ready, _, _, probs_ready = ready
    q_free, left_free, _, probs_free = free
    probs, factors = handed
    handed = probs, factors, probs_ready, probs_free
    out_ptr, lse_ptr, partials_ptr, partial_lse_ptr, counters_ptr = outputs
    request, begin, start, end, size, lens_ptr, start_ptr, query_len, num_heads = work
    num_segments, num_tiles, num_handed, last, last_begin = 0, 0, 0, 0, 0
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    while start < end:
        first, num_rows, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            num_seen = gl.load(lens_ptr + first + (row_tile * ROWS + row) // num_heads, mask=row < num_rows, other=0)
            num_seen_by_all = gl.load(lens_ptr + first + row_tile * ROWS // num_heads)
            peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            key = (start - begin) * KEYS
            mbarrier.wait(q_ready, num_segments & 1)
            scores = warpgroup_mma_wait(0, deps=[_start_scores(buffers, ready, num_tiles)])
            weights, factor, peak, total = _hand_over(scores, key, num_seen, num_seen_by_all, scale, peak, total, handed, num_handed)
            for _tile in range(start + 1, stop):
                stage = num_tiles % NUM_STAGES
                acc = acc * gl.expand_dims(factor, 1)
                product = warpgroup_mma(weights, k_left.index(stage), acc, is_async=True)
                if not OVERLAPS:
                    acc = warpgroup_mma_wait(0, deps=[product])
                    mbarrier.arrive(left_free.index(stage), count=1)
                num_tiles += 1
                num_handed += 1
                key += KEYS
                scores = _start_scores(buffers, ready, num_tiles)
                if OVERLAPS:
                    acc = warpgroup_mma_wait(3, deps=[product])  # all but the three of the scores
                    mbarrier.arrive(left_free.index(stage), count=1)
                scores = warpgroup_mma_wait(0, deps=[scores])
                weights, factor, peak, total = _hand_over(scores, key, num_seen, num_seen_by_all, scale, peak, total, handed, num_handed)
            mbarrier.arrive(q_free, count=1)
            stage = num_tiles % NUM_STAGES
            if key + KEYS > num_keys:
                _clear_behind(k_left.index(stage), num_keys - key)
            acc = warpgroup_mma(weights, k_left.index(stage), acc * gl.expand_dims(factor, 1), is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(left_free.index(stage), count=1)
            is_any = total != 0
            total = gl.where(is_any, total, 1.0)
            inverse = 1.0 / total
            mbarrier.wait(probs_free, num_handed & 1)
            factors.store(inverse)
            mbarrier.arrive(probs_ready, count=1)
            num_tiles += 1
            num_handed += 2
            acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT)), 1)
            lse = gl.where(is_any, (peak * scale + gl.log2(total)) * LN2, -float("inf"))
            first_row = first * num_heads + row_tile * ROWS
            if stop - start == gl.cdiv(num_keys, KEYS):
                store_half(out_ptr, first_row, num_rows, 0, acc)
                gl.store(lse_ptr + first_row + row, lse, mask=row < num_rows)
            else:
                slot = find_slot(start // size, start == begin, row_tile)
                gl.store(partial_lse_ptr + slot * ROWS + row, lse)
                store_half(partials_ptr, slot * ROWS, ROWS, 0, acc)
                arrive(counters_ptr, begin // size, row_tile)
            num_segments += 1
            last, last_begin = request, begin
            start = stop
        begin += gl.cdiv(num_keys, KEYS)
        request += 1
    merge_cut(0, last, last_begin, work, outputs, row_tile, IS_RAGGED)


@gluon.jit
def _zero_empty(num_reqs, outputs, work, row_tile, IS_RAGGED: gl.constexpr):
    """(0, -inf) for the requests without keys that fall to this program: no part of the row of tiles is theirs."""
    out_ptr, lse_ptr, _, _, _ = outputs
    _, _, _, _, _, lens_ptr, start_ptr, query_len, num_heads = work
    column = gl.arange(0, LATENT, layout=gl.BlockedLayout([4], [32], [4], [0]))
    for request in range(gl.program_id(0), num_reqs, gl.num_programs(0)):
        first, num_rows, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        if num_keys == 0:
            first_row = first * num_heads + row_tile * ROWS
            out_row_ptr = out_ptr + first_row.to(gl.int64) * LATENT
            for row in range(0, gl.minimum(num_rows, ROWS)):
                gl.store(out_row_ptr + row * LATENT + column, gl.full_like(column, 0, dtype=out_ptr.dtype.element_ty))
                gl.store(lse_ptr + first_row + row, -float("inf"))


@gluon.jit
def help_role(num_reqs, buffers, handed, ready, free, outputs, work, row_tile, IS_RAGGED: gl.constexpr):
    """The helper: the right half of the output, from the scorer's probabilities."""
    k_right = buffers[4]
    probs, factors = handed
    _, _, right_ready, probs_ready = ready
    _, _, right_free, probs_free = free
    out_ptr, _, partials_ptr, _, counters_ptr = outputs
    request, begin, start, end, size, lens_ptr, start_ptr, query_len, num_heads = work
    num_tiles, num_handed, last, last_begin = 0, 0, 0, 0
    _zero_empty(num_reqs, outputs, work, row_tile, IS_RAGGED)
    while start < end:
        first, num_rows, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            for tile in range(start - begin, stop - begin):
                stage, phase = num_tiles % NUM_STAGES, (num_tiles // NUM_STAGES) & 1
                mbarrier.wait(probs_ready, num_handed & 1)
                weights = probs.load(WEIGHTS)
                factor = factors.load(gl.SliceLayout(1, OUTPUT))
                mbarrier.arrive(probs_free, count=1)
                num_handed += 1
                acc = acc * gl.expand_dims(factor, 1)
                mbarrier.wait(right_ready.index(stage), phase)
                if (tile + 1) * KEYS > num_keys:
                    _clear_behind(k_right.index(stage), num_keys - tile * KEYS)
                acc = warpgroup_mma(weights, k_right.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(right_free.index(stage), count=1)
                num_tiles += 1
            mbarrier.wait(probs_ready, num_handed & 1)
            acc = acc * gl.expand_dims(factors.load(gl.SliceLayout(1, OUTPUT)), 1)
            mbarrier.arrive(probs_free, count=1)
            num_handed += 1
            if stop - start == gl.cdiv(num_keys, KEYS):
                store_half(out_ptr, first * num_heads + row_tile * ROWS, num_rows, 1, acc)
            else:
                store_half(partials_ptr, find_slot(start // size, start == begin, row_tile) * ROWS, ROWS, 1, acc)
                arrive(counters_ptr, begin // size, row_tile)
            last, last_begin = request, begin
            start = stop
        begin += gl.cdiv(num_keys, KEYS)
        request += 1
    merge_cut(1, last, last_begin, work, outputs, row_tile, IS_RAGGED)
