"""Decode attention for Hopper: wgmma over tiles of 64 query rows and 64 keys, keys brought by TMA, work cut evenly
over multiprocessors.

A program is three groups of warps. The loader brings queries and keys. The scorer computes scores, probabilities
and the left half of the output; the helper computes the right half, from the scorer's probabilities. So the cache is
read once, and each
half of the output fits into its group's registers. Programs that share a request wait for each other's partial outputs
and merge them:
they must run at the same time, so the launch is cooperative.
"""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.load import NUM_STAGES, load_role
from dcpmla.attention.hopper.roles import help_role, score_role
from dcpmla.attention.hopper.setup import find_outputs, launch, launch_sender, new_buffers, open_barriers
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
    probs = gl.allocate_shared_memory(q_desc.dtype, [ROWS, KEYS], q_pe_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    handed = (probs, factors)
    ready, free = open_barriers(NUM_STAGES, NUM_HANDED=1, USERS_OF_Q=2, USERS_OF_PROBS=1)
    work = cut(num_tiles, num_reqs) + (lens_ptr, start_ptr, query_len, num_heads)
    mail = (addresses_ptr, state_ptr, rank, own_heads, num_rows, landing_bytes)
    outputs = find_outputs(out_ptr, lse_ptr, counters_ptr, partials_ptr, mail, num_heads, IS_SENT)
    descs = (q_desc, q_pe_desc, kv_desc, k_pe_desc)
    paging = (table_ptr, table_stride, rows_per_block, block_size)
    gl.warp_specialize(
        [
            (score_role, (buffers, handed, ready, free, outputs, scale, 1.0, work, row_tile, IS_RAGGED, IS_SENT)),
            (help_role, (buffers, handed, ready, free, outputs, num_reqs, work, row_tile, IS_RAGGED, IS_SENT)),
            (load_role, (descs, buffers, ready, free, paging, counters_ptr, work, row_tile, IS_RAGGED)),
        ],
        [4, 1],
        [232, 24],
    )


mla_decode = partial(launch, decode_kernel)
send_mla_decode = partial(launch_sender, decode_kernel)
