"""Decode attention for Hopper with fp8 products: e4m3 queries over an e4m3 cache, each with a scale.

Work is cut, keys are loaded and parts are merged as in `mla_decode_hopper`. A program is four groups of warps: the
loader; the scorer, which computes scores and probabilities; and two that compute half of the output's columns each,
while the scorer is
at the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.fp8_roles import NUM_HANDED, NUM_STAGES, score_role, value_role
from dcpmla.attention.hopper.load import load_role
from dcpmla.attention.hopper.setup import find_outputs, new_buffers, open_barriers
from dcpmla.attention.hopper.split import KEYS, ROWS, cut, look_up_all


# Sizes of a step come and go: a variant for each kind of number in these would be compiled while requests wait.
@gluon.jit(
    do_not_specialize=[
        "table_stride",
        "rows_per_block",
        "block_size",
        "num_reqs",
        "query_len",
        "num_heads",
        "rank",
        "num_rows",
    ]
)
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
    kv_scale_ptr,
    q_scale_ptr,
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
    landing_bytes,
    REQS: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    IS_SENT: gl.constexpr,
):
    """Programs (parts, tiles of query rows).

    scale includes log2(e). IS_SENT: rows go to their owners (`hopper_rows`), not to out, lse.
    """
    row_tile = gl.program_id(1)
    # What this reads is on its way while the barriers are set up.
    num_tiles = look_up_all(lens_ptr, start_ptr, num_reqs, query_len, num_heads, row_tile, REQS, IS_RAGGED)
    buffers = new_buffers(q_desc, q_pe_desc, NUM_STAGES)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    probs = gl.allocate_shared_memory(q_desc.dtype, [NUM_HANDED, ROWS, KEYS], q_pe_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [NUM_HANDED, ROWS], flat)
    lses = gl.allocate_shared_memory(gl.float32, [ROWS], flat)
    handed = (probs, factors, lses)
    ready, free = open_barriers(NUM_STAGES, NUM_HANDED, USERS_OF_Q=3, USERS_OF_PROBS=2)
    work = cut(num_tiles, num_reqs) + (lens_ptr, start_ptr, query_len, num_heads)
    mail = (addresses_ptr, state_ptr, rank, own_heads, num_rows, landing_bytes)
    outputs = find_outputs(out_ptr, lse_ptr, counters_ptr, partials_ptr, mail, num_heads, IS_SENT)
    descs = (q_desc, q_pe_desc, kv_desc, k_pe_desc)
    paging = (table_ptr, table_stride, rows_per_block, block_size)
    scales = (scale, q_scale_ptr, kv_scale_ptr)
    gl.warp_specialize(
        [
            (score_role, (buffers, handed, ready, free, scales, work, row_tile, IS_RAGGED)),
            (value_role, (0, buffers, handed, ready, free, outputs, num_reqs, work, row_tile, IS_RAGGED, IS_SENT)),
            (value_role, (1, buffers, handed, ready, free, outputs, num_reqs, work, row_tile, IS_RAGGED, IS_SENT)),
            (load_role, (descs, buffers, ready, free, paging, counters_ptr, work, row_tile, IS_RAGGED)),
        ],
        [4, 4, 1],
        [192, 192, 24],
    )
