"""Tiles of a prefill program in shared memory, and the producer that fills them.

The last keys come first: only their tile has keys past a request's end or a causal bound, so that no later step
compares positions. In a fixed order (`deterministic_prefill`) the first keys come first. The rope part of a key is the
same for all heads and is read in place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.compat import aggregate, tma_load
from dcpmla.attention.hopper.stage_ring import Ring, allocate_mbarriers, await_free, new_ring, ready_at
from dcpmla.attention.triton import ragged

find_tile = gluon.jit(ragged.find_tile.fn)

NOPE, ROPE, VALUE = gl.constexpr(128), gl.constexpr(64), gl.constexpr(128)
QUERIES = gl.constexpr(128)  # queries per tile
ROWS = gl.constexpr(64)  # queries of a consumer
CONSUMERS = gl.constexpr(256)  # threads of both consumers
KEYS = gl.constexpr(128)  # keys per tile
NUM_STAGES = gl.constexpr(2)  # stages of keys and values, the maximum that fits into shared memory

TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))


@aggregate
class Buffers:
    """Tiles in shared memory."""

    q_nope: gl.shared_memory_descriptor  # [2, ROWS, NOPE], later the output
    q_pe: gl.shared_memory_descriptor  # [2, ROWS, ROPE]
    k_nope: gl.shared_memory_descriptor  # [stages, KEYS, NOPE]
    k_pe: gl.shared_memory_descriptor  # [stages, KEYS, ROPE]
    v: gl.shared_memory_descriptor  # [stages, KEYS, VALUE]


@aggregate
class Barriers:
    """Rings of keys and of values, and an mbarrier of the queries, which are loaded once.

    Each thread of the consumers frees a stage by itself. One thread for all would have to wait for a barrier of its
    warps first, which takes up to 3 % of the kernel's time.
    """

    q_ready: gl.shared_memory_descriptor
    keys: Ring
    values: Ring


@aggregate
class Work:
    """A program's queries and the keys that any of its queries sees. Both may be none."""

    head: gl.tensor
    first_row: gl.tensor  # row of the first query in q
    num_queries: gl.tensor  # queries of the request from there on; a program takes at most QUERIES
    first_query: gl.tensor  # index of the first query in its request, counted from the first key
    first_tile: gl.tensor  # tiles of keys before the first query's window, which the program skips
    key_start: gl.tensor  # row of the first key in k_nope, k_pe and v
    num_keys: gl.tensor
    num_tiles: gl.tensor
    is_causal: gl.constexpr


@gluon.jit
def new_tiles(dtype: gl.constexpr):
    """Allocate the tiles of a program and their mbarriers."""
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [2, ROWS, NOPE], TILE),
        gl.allocate_shared_memory(dtype, [2, ROWS, ROPE], TILE),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, NOPE], TILE),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, ROPE], TILE),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, VALUE], TILE),
    )
    barriers = Barriers(
        allocate_mbarriers(1, 1).index(0), new_ring(NUM_STAGES, 1, CONSUMERS), new_ring(NUM_STAGES, 1, CONSUMERS)
    )
    fence_async_shared()
    return buffers, barriers


@gluon.jit
def find_work(query_start_loc_ptr, key_start_loc_ptr, num_reqs, num_heads, window, IS_CAUSAL: gl.constexpr):
    """Return the program's `Work`. A request's last tile, which sees the most keys under a causal bound, runs first.

    Args:
        window: Number of last keys up to its own that a query may see; None for all.
    """
    head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    program = gl.num_programs(1) - 1 - gl.program_id(1)
    request, tile = find_tile(query_start_loc_ptr, num_reqs, program, QUERIES)
    first_query = tile * QUERIES
    first_row = gl.load(query_start_loc_ptr + request) + first_query
    num_queries = gl.where(head < num_heads, gl.load(query_start_loc_ptr + request + 1) - first_row, 0)
    key_start = gl.load(key_start_loc_ptr + request)
    num_keys = gl.where(num_queries > 0, gl.load(key_start_loc_ptr + request + 1) - key_start, 0)
    if IS_CAUSAL:
        num_keys = gl.minimum(num_keys, first_query + QUERIES)
    first_tile = gl.to_tensor(0)
    if window is not None:
        first_tile = gl.where(num_queries > 0, gl.maximum(first_query - window + 1, 0) // KEYS, 0)
        first_query -= first_tile * KEYS
        key_start += first_tile * KEYS
        num_keys -= first_tile * KEYS
    num_tiles = gl.cdiv(num_keys, KEYS)
    return Work(head, first_row, num_queries, first_query, first_tile, key_start, num_keys, num_tiles, IS_CAUSAL)


@gluon.jit
def produce(descs, strides, buffers, barriers, work, IS_FORWARD: gl.constexpr):
    """Copy the queries, then tiles of keys and values in the order of their use: the last ones first, or the first."""
    q_nope_desc, q_pe_desc, k_nope_desc, k_pe_desc, v_desc = descs
    q_stride_head, k_stride_head, v_stride_head = strides
    if work.num_tiles > 0:
        mbarrier.expect(barriers.q_ready, QUERIES * (NOPE + ROPE) * 2)
        for group in gl.static_range(2):
            row, column = work.first_row + group * ROWS, work.head * q_stride_head
            tma_load(q_nope_desc, [row, column], barriers.q_ready, buffers.q_nope.index(group))
            tma_load(q_pe_desc, [row, column + NOPE], barriers.q_ready, buffers.q_pe.index(group))
        for step in range(0, work.num_tiles + 1):
            if step < work.num_tiles:
                row = work.key_start + (step if IS_FORWARD else work.num_tiles - 1 - step) * KEYS
                stage, ready = await_free(barriers.keys, step), ready_at(barriers.keys, step)
                mbarrier.expect(ready, KEYS * (NOPE + ROPE) * 2)
                tma_load(k_nope_desc, [row, work.head * k_stride_head], ready, buffers.k_nope.index(stage))
                tma_load(k_pe_desc, [row, 0], ready, buffers.k_pe.index(stage))
            if step > 0:  # values of the previous tile, in the order in which the consumers multiply them
                row = work.key_start + (step - 1 if IS_FORWARD else work.num_tiles - step) * KEYS
                stage, ready = await_free(barriers.values, step - 1), ready_at(barriers.values, step - 1)
                mbarrier.expect(ready, KEYS * VALUE * 2)
                tma_load(v_desc, [row, work.head * v_stride_head], ready, buffers.v.index(stage))
