"""Decode attention for Hopper over 8-bit caches with products in the queries' dtype: `mla_decode_hopper` with a
converter for a loader.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.convert import convert_role
from dcpmla.attention.hopper.load import NUM_STAGES
from dcpmla.attention.hopper.roles import help_role, score_role
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
    cache_ptr,
    ROW_BYTES: gl.constexpr,
    IS_SPARSE: gl.constexpr,
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
    is_ds_mla: gl.constexpr = kv_scale_ptr is None
    value_scale = 1.0
    if not is_ds_mla:  # one for all: keys and values are exact without it
        value_scale = gl.load(kv_scale_ptr)
        scale = scale * value_scale
    descs = (q_desc, q_pe_desc)
    row_words: gl.constexpr = ROW_BYTES // 4
    paging = (table_ptr, table_stride, rows_per_block, block_size)
    gl.warp_specialize(
        [
            (
                score_role,
                (buffers, handed, ready, free, outputs, scale, value_scale, work, row_tile, IS_RAGGED, IS_SENT),
            ),
            (help_role, (buffers, handed, ready, free, outputs, num_reqs, work, row_tile, IS_RAGGED, IS_SENT)),
            (
                convert_role,
                (
                    descs,
                    cache_ptr,
                    buffers,
                    ready,
                    free,
                    paging,
                    counters_ptr,
                    work,
                    row_tile,
                    IS_RAGGED,
                    is_ds_mla,
                    IS_SPARSE,
                    row_words,
                ),
            ),
        ],
        [4, 4],
        [184, 120],
    )
