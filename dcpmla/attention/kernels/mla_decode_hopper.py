"""Decode attention for Hopper: wgmma over tiles of 64 query rows and 64 keys, keys brought by TMA, work cut evenly over multiprocessors.

A program is three groups of warps. The loader brings queries and keys. The scorer computes scores, probabilities and the left half of
the output; the helper computes the right half, from the scorer's probabilities. So the cache is read once, and each half of the output
fits into its group's registers. Programs that share a request wait for each other's partial outputs and merge them: they must run at
the same time, so the launch is cooperative.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcpmla.attention.kernels.hopper_load import NUM_STAGES, ROPE, load_role
from dcpmla.attention.kernels.hopper_merge import LOG2E
from dcpmla.attention.kernels.hopper_roles import help_role, score_role
from dcpmla.attention.kernels.hopper_rows import address_mail
from dcpmla.attention.kernels.hopper_split import HALF, KEYS, LATENT, ROWS, cut, look_up_all
from dcpmla.attention.workspace import COUNTER_WORDS, decode_workspace, num_programs


# Sizes of a step come and go: a variant for each kind of number in these would be compiled while requests wait.
@gluon.jit(do_not_specialize=["table_stride", "rows_per_block", "block_size", "num_reqs", "query_len", "num_heads", "rank", "num_rows"])
def decode_kernel(
    q_desc,
    q_pe_desc,
    kv_desc,
    k_pe_desc,
    table_ptr,
    lens_ptr,
    start_ptr,
    out_ptr,
    lse_ptr,
    counters_ptr,
    partials_ptr,
    table_stride,
    rows_per_block,
    block_size,
    num_reqs,
    query_len,
    num_heads,
    scale,
    addresses_ptr,
    state_ptr,
    rank,
    own_heads,
    num_rows,
    slot_bytes,
    REQS: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    IS_SENT: gl.constexpr,
):
    """Programs (parts, tiles of query rows). scale includes log2(e). IS_SENT: rows go to their owners (`hopper_rows`), not to out, lse."""
    row_tile = gl.program_id(1)
    # What this reads is on its way while the barriers are set up.
    num_tiles = look_up_all(lens_ptr, start_ptr, num_reqs, query_len, num_heads, row_tile, REQS, IS_RAGGED)
    dtype: gl.constexpr = q_desc.dtype
    half: gl.constexpr = q_desc.layout
    rope: gl.constexpr = q_pe_desc.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = (
        gl.allocate_shared_memory(dtype, [1, ROWS, HALF], half),
        gl.allocate_shared_memory(dtype, [1, ROWS, HALF], half),
        gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], rope),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, HALF], half),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, HALF], half),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, ROPE], rope),
    )
    handed = (gl.allocate_shared_memory(dtype, [ROWS, KEYS], rope), gl.allocate_shared_memory(gl.float32, [ROWS], flat))
    one: gl.constexpr = [1]
    each: gl.constexpr = [NUM_STAGES, 1]
    q_ready = gl.allocate_shared_memory(gl.int64, one, mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, one, mbarrier.MBarrierLayout())
    left_ready = gl.allocate_shared_memory(gl.int64, each, mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, each, mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, each, mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, each, mbarrier.MBarrierLayout())
    probs_ready = gl.allocate_shared_memory(gl.int64, one, mbarrier.MBarrierLayout())
    probs_free = gl.allocate_shared_memory(gl.int64, one, mbarrier.MBarrierLayout())
    merge_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # of a part's first request, of its last
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)  # queries make room for the output
    mbarrier.init(probs_ready, count=1)
    mbarrier.init(probs_free, count=1)
    mbarrier.init(merge_ready.index(0), count=1)
    mbarrier.init(merge_ready.index(1), count=1)
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(left_ready.index(stage), count=1)
        mbarrier.init(left_free.index(stage), count=1)
        mbarrier.init(right_ready.index(stage), count=1)
        mbarrier.init(right_free.index(stage), count=1)
    fence_async_shared()
    ready = (q_ready, left_ready, right_ready, probs_ready, merge_ready)
    free = (q_free, left_free, right_free, probs_free)

    work = cut(num_tiles, num_reqs) + (lens_ptr, start_ptr, query_len, num_heads)
    num_slots = gl.num_programs(0) * gl.num_programs(1) * 2
    mail = addresses_ptr
    if IS_SENT:
        mail = address_mail(addresses_ptr, state_ptr, rank, own_heads, num_rows, num_heads, slot_bytes)
    outputs = ((out_ptr, lse_ptr, mail), partials_ptr, partials_ptr + num_slots * ROWS * LATENT, counters_ptr)
    descs = (q_desc, q_pe_desc, kv_desc, k_pe_desc)
    paging = (table_ptr, table_stride, rows_per_block, block_size)
    gl.warp_specialize(
        [
            (score_role, (buffers, handed, ready, free, outputs, scale, work, row_tile, IS_RAGGED, IS_SENT)),
            (help_role, (buffers, handed, ready, free, outputs, num_reqs, work, row_tile, IS_RAGGED, IS_SENT)),
            (load_role, (descs, buffers, ready, free, paging, counters_ptr, work, row_tile, IS_RAGGED)),
        ],
        [4, 1],
        [232, 24],
    )


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    query_start_loc: Tensor | None,
    max_query_len: int,
    workspace: Tensor | None,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`dcpmla.mla_decode` in one launch, for the inputs that `backends` allows."""
    out = q.new_empty(*q.shape[:2], kv_lora_rank)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if len(q):
        _launch(q, kv_cache, block_table, seq_lens, scale, query_start_loc, max_query_len, workspace, out, lse, seq_lens, seq_lens, 0, 1, 0)
    return out, lse


def send_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    workspace: Tensor | None,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    dtype: torch.dtype,
    addresses: Tensor,
    state: Tensor,
    rank: int,
    slot_bytes: int,
) -> None:
    """The same for one query token a request, whose rows go into the slots of the ranks that own their heads (`hopper_rows`)."""
    nowhere = q, q.new_empty(0, dtype=torch.float32)  # they say the dtypes
    _launch(q, kv_cache, block_table, seq_lens, scale, None, 1, workspace, *nowhere, addresses, state, rank, len(addresses), slot_bytes)


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_start_loc: Tensor | None,
    max_query_len: int,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor,
    addresses: Tensor,
    state: Tensor,
    rank: int,
    size: int,
    slot_bytes: int,
) -> None:
    num_tokens, num_heads, width = q.shape
    num_reqs = block_table.shape[0]
    workspace = decode_workspace(q.device) if workspace is None else workspace
    assert workspace is not None
    num_row_tiles = triton.cdiv(max_query_len * num_heads, ROWS.value)
    num_parts = max(1, num_programs(workspace, ROWS.value) // num_row_tiles)
    rows = q.reshape(num_tokens * num_heads, width)
    rows_per_block = kv_cache.stride(0) // kv_cache.stride(1)
    num_rows = (kv_cache.shape[0] - 1) * rows_per_block + kv_cache.shape[1]
    cache = kv_cache.as_strided((num_rows, width), (kv_cache.stride(1), 1))
    decode_kernel[(num_parts, num_row_tiles)](
        _tiles(rows, ROWS.value, HALF.value),
        _tiles(rows, ROWS.value, ROPE.value),
        _tiles(cache, KEYS.value, HALF.value),
        _tiles(cache, KEYS.value, ROPE.value),
        block_table,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        out,
        lse,
        workspace[:COUNTER_WORDS].view(torch.int32),
        workspace[COUNTER_WORDS:],
        block_table.stride(0),
        rows_per_block,
        kv_cache.shape[1],
        num_reqs,
        max_query_len,
        num_heads,
        scale * LOG2E.value,
        addresses,
        state,
        rank,
        num_heads // size,
        num_tokens * num_heads // size,
        slot_bytes,
        REQS=max(32, triton.next_power_of_2(num_reqs)),
        IS_RAGGED=query_start_loc is not None,
        IS_SENT=slot_bytes > 0,
        num_warps=4,
        launch_cooperative_grid=num_parts > 1,
    )


def _tiles(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """A matrix [N, width], to be copied to shared memory in tiles."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [num_rows, num_columns], layout)
