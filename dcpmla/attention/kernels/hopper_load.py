"""The loader of Hopper's decode kernel: queries and keys from memory into the stages that the other groups of warps have freed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from dcpmla.attention.kernels.hopper_merge import await_cut, barrier
from dcpmla.attention.kernels.hopper_split import HALF, KEYS, LATENT, ROWS, find_request, next_begin

ROPE = gl.constexpr(64)
NUM_STAGES = gl.constexpr(2)  # what shared memory has room for
# By their names from Triton 3.7 on, or those before.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _find_row(tile, table, rows_per_block, block_size):
    """Of the cache as one matrix, where a tile begins."""
    key = tile * KEYS
    return gl.load(table + key // block_size) * rows_per_block + key % block_size


@gluon.jit
def load_role(descs, buffers, ready, free, paging, counters_ptr, work, row_tile, IS_RAGGED: gl.constexpr):
    """The loader: a segment's queries, then its keys tile after tile into the stages that the others have freed."""
    table_ptr, table_stride, rows_per_block, block_size = paging
    q_desc, q_pe_desc, kv_desc, k_pe_desc = descs
    q_left, q_right, q_pe, k_left, k_right, k_pe = buffers
    q_ready, left_ready, right_ready, _, merge_ready = ready
    q_free, left_free, right_free, _ = free
    request, begin, start, end, _, granule, lens_ptr, start_ptr, query_len, num_heads = work
    num_segments, num_loaded, last, last_begin = 0, 0, 0, 0
    while start < end:
        first, num_rows, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            row = first * num_heads + row_tile * ROWS
            table = table_ptr + request.to(gl.int64) * table_stride
            first_tile, num_tiles = start - begin, stop - start
            mbarrier.wait(q_free, (num_segments & 1) ^ 1)
            mbarrier.expect(q_ready, ROWS * (LATENT + ROPE) * 2)
            tma_load(q_desc, [row, 0], q_ready, q_left.index(0))
            tma_load(q_desc, [row, HALF], q_ready, q_right.index(0))
            tma_load(q_pe_desc, [row, LATENT], q_ready, q_pe.index(0))
            num_segments += 1
            for tile in range(0, num_tiles):
                stage, phase = num_loaded % NUM_STAGES, (num_loaded // NUM_STAGES) & 1
                row = _find_row(first_tile + tile, table, rows_per_block, block_size)
                mbarrier.wait(left_free.index(stage), phase ^ 1)
                mbarrier.expect(left_ready.index(stage), KEYS * (HALF + ROPE) * 2)
                tma_load(kv_desc, [row, 0], left_ready.index(stage), k_left.index(stage))
                tma_load(k_pe_desc, [row, LATENT], left_ready.index(stage), k_pe.index(stage))
                mbarrier.wait(right_free.index(stage), phase ^ 1)
                mbarrier.expect(right_ready.index(stage), KEYS * HALF * 2)
                tma_load(kv_desc, [row, HALF], right_ready.index(stage), k_right.index(stage))
                num_loaded += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED)


@gluon.jit
def clear_behind(values, stage, num_keys):
    """Zero the rows of a stage's values [KEYS, HALF] behind the last key: what stands there may be NaN, and 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    quarters = reinterpret(values, values.dtype, [NUM_STAGES * 4, KEYS, HALF // 4], values.layout)  # each has 64 columns: a swizzle's width
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    for quarter in range(stage * 4, stage * 4 + 4):
        columns = quarters.index(quarter)
        columns.store(gl.where(gl.expand_dims(key, 1) < num_keys, columns.load(layout), 0.0))
    fence_async_shared()
    barrier()
