"""The scorer and the helper of Hopper's decode kernel; `mla_decode_hopper` says what each is for.

A segment is what a part has of one request. Each role, and the loader, walks the part's segments by itself, and
meets the others at
barriers in shared memory: `ready` ones say that a buffer is filled, `free` ones that it may be filled again. A
barrier alternates between two phases, hence the counts. These are the same in all threads (`uniform`), and so is a
stage's address: else the
tensor cores would wait for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dcpmla.attention.hopper.load import NUM_STAGES
from dcpmla.attention.hopper.merge import LN2, arrive, exp2, merge_cut, store_columns, store_partial
from dcpmla.attention.hopper.rows import lse_of_row, out_at, store_lse
from dcpmla.attention.hopper.split import HALF, KEYS, LATENT, ROWS, barrier, find_partial, find_request, next_begin

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)  # before 3.7


@gluon.jit
def here(buffer, index=0):
    """One of a buffer's places.

    Hidden from the compiler's first half, which would compute all addresses ahead and spill them.
    """
    return buffer.index(
        gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(index)], dtype=gl.int32, is_pure=False, pack=1
        )
    )


@gluon.jit
def _clear_behind(values, stage, num_keys):
    """Zero the rows of a stage's values [KEYS, HALF] behind the last key: what stands there may be NaN, and 0 x NaN is
    NaN.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    quarters = reinterpret(
        values, values.dtype, [NUM_STAGES * 4, KEYS, HALF // 4], values.layout
    )  # each has 64 columns: a swizzle's width
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    for quarter in range(stage * 4, stage * 4 + 4):
        columns = quarters.index(quarter)
        columns.store(gl.where(gl.expand_dims(key, 1) < num_keys, columns.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def start_scores(buffers, ready, tile, layout: gl.constexpr):
    """Queries times a tile's keys, in three products that run on."""
    q_left, q_right, q_pe, k_left, k_right, k_pe = buffers
    _, left_ready, right_ready, _, _ = ready
    num_stages: gl.constexpr = k_left.shape[0]
    stage, phase = tile % num_stages, (tile // num_stages) & 1
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout)
    mbarrier.wait(left_ready.index(stage), phase)
    scores = warpgroup_mma(here(q_left), here(k_left, stage).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(here(q_pe), here(k_pe, stage).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right_ready.index(stage), phase)
    return warpgroup_mma(here(q_right), here(k_right, stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _hand_over(scores, first_key, seen, scale, peak, total, handed, num_handed):
    """A tile's step of the online softmax: probabilities and the factor of what was summed before, also into the
    helper's buffers.
    """
    probs, factors, probs_ready, probs_free = handed
    num_seen, num_seen_by_all = seen
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
def score_role(
    buffers,
    handed,
    ready,
    free,
    outputs,
    scale,
    value_scale,
    work,
    row_tile,
    IS_RAGGED: gl.constexpr,
    IS_SENT: gl.constexpr,
):
    """The scorer: scores, probabilities, LSE, and the left half of the output. value_scale: what both halves are
    multiplied by.

    It could start a tile's scores before the values of the one before, so that the tensor cores never wait for its
    probabilities; but that keeps both tiles longer in their places, and what comes from memory waits more than is won.
    """
    k_left = buffers[3]
    q_ready, _, _, probs_ready, merge_ready = ready
    q_free, left_free, _, probs_free = free
    probs_ready, probs_free = probs_ready.index(0), probs_free.index(0)
    probs, factors = handed
    handed = probs, factors, probs_ready, probs_free
    dest, partials_ptr, partial_lse_ptr, counters_ptr = outputs
    request, begin, start, end, size, granule, lens_ptr, start_ptr, query_len, num_heads = work
    num_segments, num_done, num_handed, last, last_begin = 0, 0, 0, 0, 0
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    while start < end:
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            num_seen = gl.load(lens_ptr + first + (row_tile * ROWS + row) // num_heads, mask=row < num_rows, other=0)
            seen = num_seen, gl.load(lens_ptr + first + row_tile * ROWS // num_heads)
            peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            key = (start - begin) * KEYS
            mbarrier.wait(q_ready, num_segments & 1)
            for _tile in range(start, stop):
                stage = num_done % NUM_STAGES
                scores = warpgroup_mma_wait(0, deps=[start_scores(buffers, ready, num_done, SCORES)])
                weights, factor, peak, total = _hand_over(scores, key, seen, scale, peak, total, handed, num_handed)
                if key + KEYS > num_keys:
                    _clear_behind(k_left, stage, num_keys - key)
                product = warpgroup_mma(weights, here(k_left, stage), acc * gl.expand_dims(factor, 1), is_async=True)
                acc = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(left_free.index(stage), count=1)
                key += KEYS
                num_done += 1
                num_handed += 1
            is_any = total != 0
            total = gl.where(is_any, total, 1.0)
            inverse = value_scale / total
            mbarrier.wait(probs_free, (num_handed & 1) ^ 1)
            factors.store(inverse)
            mbarrier.arrive(probs_ready, count=1)
            num_handed += 1
            acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT)), 1)
            lse = gl.where(is_any, (peak * scale + gl.log2(total)) * LN2, -float("inf"))
            first_row = first * num_heads + row_tile * ROWS
            if stop - start == gl.cdiv(num_keys, KEYS):
                store_columns(dest, first_row, num_rows, 0, acc, buffers[0].index(0), IS_SENT)
                store_lse(dest, first_row, row, lse_of_row(lse, IS_SENT), row < num_rows, IS_SENT)
            else:
                partial = find_partial(gl.program_id(0), start == begin, row_tile)
                gl.store(partial_lse_ptr + partial * ROWS + row, lse)
                store_partial(partials_ptr, partial, 0, num_rows, acc)
                arrive(counters_ptr, begin // size, row_tile)
            mbarrier.arrive(q_free, count=1)
            num_segments += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    merge_cut(0, last, last_begin, work, outputs, merge_ready, row_tile, IS_RAGGED, IS_SENT)


@gluon.jit
def zero_empty(num_reqs, dest, work, row_tile, IS_RAGGED: gl.constexpr, IS_SENT: gl.constexpr):
    """(0, -inf) for the requests without keys that fall to this program: no part of the row of tiles is theirs.

    Zeros are not sent.
    """
    row = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    _, _, _, _, _, _, lens_ptr, start_ptr, query_len, num_heads = work
    column = gl.arange(0, LATENT, layout=gl.BlockedLayout([4], [32], [4], [0]))
    for request in range(gl.program_id(0), num_reqs, gl.num_programs(0)):
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        if num_keys == 0:
            first_row = first * num_heads + row_tile * ROWS
            if not IS_SENT:
                for empty in range(0, gl.minimum(num_rows, ROWS)):
                    at = out_at(dest, first_row, empty, column, IS_SENT)
                    gl.store(at, gl.full_like(column, 0, dtype=dest[0].dtype.element_ty))
            store_lse(dest, first_row, row, gl.full_like(row, -float("inf"), dtype=gl.float32), row < num_rows, IS_SENT)


@gluon.jit
def help_role(
    buffers, handed, ready, free, outputs, num_reqs, work, row_tile, IS_RAGGED: gl.constexpr, IS_SENT: gl.constexpr
):
    """The helper: the right half of the output, from the scorer's probabilities."""
    k_right = buffers[4]
    probs, factors = handed
    _, _, right_ready, probs_ready, merge_ready = ready
    q_free, _, right_free, probs_free = free
    probs_ready, probs_free = probs_ready.index(0), probs_free.index(0)
    dest, partials_ptr, _, counters_ptr = outputs
    request, begin, start, end, size, granule, lens_ptr, start_ptr, query_len, num_heads = work
    num_done, num_handed, last, last_begin = 0, 0, 0, 0
    while start < end:
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            for tile in range(start - begin, stop - begin):
                stage, phase = num_done % NUM_STAGES, (num_done // NUM_STAGES) & 1
                mbarrier.wait(probs_ready, num_handed & 1)
                weights = probs.load(WEIGHTS)
                factor = factors.load(gl.SliceLayout(1, OUTPUT))
                mbarrier.arrive(probs_free, count=1)
                num_handed += 1
                acc = acc * gl.expand_dims(factor, 1)
                mbarrier.wait(right_ready.index(stage), phase)
                if (tile + 1) * KEYS > num_keys:
                    _clear_behind(k_right, stage, num_keys - tile * KEYS)
                acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, here(k_right, stage), acc, is_async=True)])
                mbarrier.arrive(right_free.index(stage), count=1)
                num_done += 1
            mbarrier.wait(probs_ready, num_handed & 1)
            acc = acc * gl.expand_dims(factors.load(gl.SliceLayout(1, OUTPUT)), 1)
            mbarrier.arrive(probs_free, count=1)
            num_handed += 1
            if stop - start == gl.cdiv(num_keys, KEYS):
                store_columns(
                    dest, first * num_heads + row_tile * ROWS, num_rows, HALF, acc, buffers[1].index(0), IS_SENT
                )
            else:
                store_partial(partials_ptr, find_partial(gl.program_id(0), start == begin, row_tile), 1, num_rows, acc)
                arrive(counters_ptr, begin // size, row_tile)
            mbarrier.arrive(q_free, count=1)
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    zero_empty(
        num_reqs, dest, work, row_tile, IS_RAGGED, IS_SENT
    )  # while the other parts of the last request come to their end
    merge_cut(1, last, last_begin, work, outputs, merge_ready, row_tile, IS_RAGGED, IS_SENT)
