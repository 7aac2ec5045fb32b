"""The loader of Hopper's decode kernel: what comes from memory, and when the other parts of a request are done."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dcpmla.attention.hopper.merge import await_cut
from dcpmla.attention.hopper.split import HALF, KEYS, LATENT, ROWS, find_request, next_begin

ROPE = gl.constexpr(64)
NUM_STAGES = gl.constexpr(2)  # what shared memory has room for
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.7


@gluon.jit
def find_row(tile, table, rows_per_block, block_size):
    """Of the cache as one matrix, where a tile begins."""
    key = tile * KEYS
    return gl.load(table + key // block_size) * rows_per_block + key % block_size


@gluon.jit
def load_role(descs, buffers, ready, free, paging, counters_ptr, work, row_tile, IS_RAGGED: gl.constexpr):
    """A segment's queries, then its keys tile after tile into the stages that the others have freed."""
    table_ptr, table_stride, rows_per_block, block_size = paging
    q_desc, q_pe_desc, kv_desc, k_pe_desc = descs
    q_left, q_right, q_pe, k_left, k_right, k_pe = buffers
    num_stages: gl.constexpr = k_left.shape[0]
    size: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    q_ready, left_ready, right_ready, _, merge_ready = ready
    q_free, left_free, right_free, _ = free
    request, begin, start, end, _, granule, lens_ptr, start_ptr, query_len, num_heads = work
    num_segments, num_loaded, last, last_begin = 0, 0, 0, 0
    while start < end:
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            q_row = first * num_heads + row_tile * ROWS
            table = table_ptr + request.to(gl.int64) * table_stride
            first_tile, num_tiles = start - begin, stop - start
            mbarrier.wait(q_free, (num_segments & 1) ^ 1)
            mbarrier.expect(q_ready, ROWS * (LATENT + ROPE) * size)
            tma_load(q_desc, [q_row, 0], q_ready, q_left.index(0))
            tma_load(q_desc, [q_row, HALF], q_ready, q_right.index(0))
            tma_load(q_pe_desc, [q_row, LATENT], q_ready, q_pe.index(0))
            num_segments += 1
            for tile in range(0, num_tiles):
                stage, phase = num_loaded % num_stages, (num_loaded // num_stages) & 1
                row = find_row(first_tile + tile, table, rows_per_block, block_size)
                mbarrier.wait(left_free.index(stage), phase ^ 1)
                mbarrier.expect(left_ready.index(stage), KEYS * (HALF + ROPE) * size)
                tma_load(kv_desc, [row, 0], left_ready.index(stage), k_left.index(stage))
                tma_load(k_pe_desc, [row, LATENT], left_ready.index(stage), k_pe.index(stage))
                mbarrier.wait(right_free.index(stage), phase ^ 1)
                mbarrier.expect(right_ready.index(stage), KEYS * HALF * size)
                tma_load(kv_desc, [row, HALF], right_ready.index(stage), k_right.index(stage))
                num_loaded += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED)
