"""What Hopper's decode kernels begin with: buffers, barriers, where outputs go; and their launch."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcpmla.attention.calls import COUNTER_WORDS, decode_workspace, num_programs
from dcpmla.attention.hopper.load import ROPE
from dcpmla.attention.hopper.merge import LOG2E
from dcpmla.attention.hopper.rows import address_mail
from dcpmla.attention.hopper.split import HALF, KEYS, LATENT, ROWS

_SWIZZLE_BYTES = 128  # at most


@gluon.jit
def _new_barriers(number: gl.constexpr, count: gl.constexpr):
    """Barriers in shared memory, each of `count` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(barriers.index(index), count=count)
    return barriers


@gluon.jit
def open_barriers(
    NUM_STAGES: gl.constexpr, NUM_HANDED: gl.constexpr, USERS_OF_Q: gl.constexpr, USERS_OF_PROBS: gl.constexpr
):
    """What says that something is ready, and that its place is free again, for those that use it.

    Of queries (which make room for the output), of the left and the right half of each stage's keys, and of
    probabilities, which have NUM_HANDED places. The last of the ready ones: that a part's first request is there to be
    merged, and its last.
    """
    q_ready, q_free = _new_barriers(1, 1).index(0), _new_barriers(1, USERS_OF_Q).index(0)
    left_ready, left_free = _new_barriers(NUM_STAGES, 1), _new_barriers(NUM_STAGES, 1)
    right_ready, right_free = _new_barriers(NUM_STAGES, 1), _new_barriers(NUM_STAGES, 1)
    probs_ready, probs_free = _new_barriers(NUM_HANDED, 1), _new_barriers(NUM_HANDED, USERS_OF_PROBS)
    merge_ready = _new_barriers(2, 1)
    fence_async_shared()
    return (q_ready, left_ready, right_ready, probs_ready, merge_ready), (q_free, left_free, right_free, probs_free)


@gluon.jit
def new_buffers(q_desc, q_pe_desc, NUM_STAGES: gl.constexpr):
    """A tile of queries and NUM_STAGES tiles of keys: of each the left half of the latent, the right half, and the rope
    part.
    """
    dtype: gl.constexpr = q_desc.dtype
    half: gl.constexpr = q_desc.layout
    rope: gl.constexpr = q_pe_desc.layout
    return (
        gl.allocate_shared_memory(dtype, [1, ROWS, HALF], half),
        gl.allocate_shared_memory(dtype, [1, ROWS, HALF], half),
        gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], rope),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, HALF], half),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, HALF], half),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, ROPE], rope),
    )


@gluon.jit
def find_outputs(out_ptr, lse_ptr, counters_ptr, partials_ptr, mail, num_heads, IS_SENT: gl.constexpr):
    """Where rows go (`hopper_rows`), partial outputs and their LSEs (`hopper_merge`), and the counters of what has
    arrived.
    """
    if IS_SENT:
        addresses_ptr, state_ptr, rank, own_heads, num_rows, landing_bytes = mail
        mail = address_mail(addresses_ptr, state_ptr, rank, own_heads, num_rows, num_heads, landing_bytes)
    num_partials = gl.num_programs(0) * gl.num_programs(1) * 2
    return (out_ptr, lse_ptr, mail), partials_ptr, partials_ptr + num_partials * ROWS * LATENT, counters_ptr


def launch(
    kernel: Any,
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
    out = q.new_empty(*q.shape[:2], kv_lora_rank, dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if len(q):
        step = q, kv_cache, block_table, seq_lens, scale, query_start_loc, max_query_len, workspace
        _launch(kernel, *step, kv_scale, q_scale, out, lse, seq_lens, seq_lens, 0, 1, 0)
    return out, lse


def launch_sender(
    kernel: Any,
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
    landing_bytes: int,
) -> None:
    """The same for one query token a request, whose rows of `dtype` go into the landings of the ranks that own their heads
    (`hopper_rows`).
    """
    out, lse = q.new_empty(0, dtype=dtype), q.new_empty(0, dtype=torch.float32)  # they say the dtypes
    mail = addresses, state, rank, len(addresses), landing_bytes
    _launch(kernel, q, kv_cache, block_table, seq_lens, scale, None, 1, workspace, kv_scale, q_scale, out, lse, *mail)


def _launch(
    kernel: Any,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_start_loc: Tensor | None,
    max_query_len: int,
    workspace: Tensor | None,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    addresses: Tensor,
    state: Tensor,
    rank: int,
    size: int,
    landing_bytes: int,
) -> None:
    num_tokens, num_heads, width = q.shape
    num_reqs = block_table.shape[0]
    workspace = decode_workspace(q.device) if workspace is None else workspace
    assert workspace is not None
    num_row_tiles = triton.cdiv(max_query_len * num_heads, ROWS.value)
    num_parts = max(1, num_programs(workspace, ROWS.value) // num_row_tiles)
    rows = q.reshape(num_tokens * num_heads, width)
    is_sparse = kv_cache.shape[1] == 1
    stored = kv_cache[:, 0] if is_sparse else kv_cache
    row_stride = stored.stride(-2)
    rows_per_block = kv_cache.stride(0) // row_stride
    keys: tuple[Any, ...]
    if kv_cache.dtype != q.dtype:
        keys = stored.view(torch.int32), row_stride, is_sparse
    elif is_sparse:
        keys = stored, row_stride
    else:
        num_rows = (kv_cache.shape[0] - 1) * rows_per_block + kv_cache.shape[1]
        cache = kv_cache.as_strided((num_rows, width), (row_stride, 1))
        keys = _tiles(cache, KEYS.value, HALF.value), _tiles(cache, KEYS.value, ROPE.value)
    kernel[(num_parts, num_row_tiles)](
        _tiles(rows, ROWS.value, HALF.value),
        _tiles(rows, ROWS.value, ROPE.value),
        *keys,
        block_table,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        out,
        lse,
        workspace[:COUNTER_WORDS].view(torch.int32),
        workspace[COUNTER_WORDS:],
        kv_scale,
        q_scale,
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
        landing_bytes,
        REQS=max(32, triton.next_power_of_2(num_reqs)),
        IS_RAGGED=query_start_loc is not None,
        IS_SENT=landing_bytes > 0,
        num_warps=4,
        launch_cooperative_grid=num_parts > 1,
    )


def _tiles(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """A matrix [N, width], to be copied to shared memory in tiles."""
    size = matrix.element_size()
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(_SWIZZLE_BYTES, num_columns * size), element_bitwidth=8 * size, rank=2
    )
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [num_rows, num_columns], layout)
