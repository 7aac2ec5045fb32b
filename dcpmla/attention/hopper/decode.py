"""Decode attention for Hopper: wgmma over tiles of 64 query rows and 64 keys, keys brought by TMA, work cut evenly
over multiprocessors.

A program is three groups of warps. The loader brings queries and keys. The scorer computes scores, probabilities
and the left half of the output; the helper computes the right half, from the scorer's probabilities. So the cache is
read once, and each
half of the output fits into its group's registers. Programs that share a request wait for each other's partial outputs
and merge them:
they must run at the same time, so the launch is cooperative.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.calls import DecodeCall
from dcpmla.attention.hopper.load import NUM_STAGES, load_role
from dcpmla.attention.hopper.roles import help_role, score_role
from dcpmla.attention.hopper.setup import find_outputs, launch, launch_sender, new_buffers, open_barriers
from dcpmla.attention.hopper.split import KEYS, ROWS, cut, look_up_all
from dcpmla.cache.formats import FP8
from dcpmla.comm.exchange import Mailbox


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


def run(call: DecodeCall, mailbox: Mailbox | None = None) -> tuple[Tensor, Tensor]:
    """Compute `dcpmla.mla_decode`; with a mailbox, send rows to their owners and return what all ranks' merge to."""
    kernel = _kernel_of(call)
    if mailbox is None:
        flat = call.flat()
        return launch(kernel, *flat[:-1])
    merged, merged_lse = call.new_output(len(mailbox.addresses))
    rank = mailbox.enter(merged)
    if len(call.q):
        what = call.q, call.kv_cache, call.block_table, call.seq_lens, call.scale, call.workspace
        scales = call.kv_scale, call.q_scale, call.dtype
        launch_sender(kernel, *what, *scales, mailbox.addresses, mailbox.state, rank, mailbox.landing_bytes)
        mailbox.collect(merged, merged_lse)
    return merged, merged_lse


def _kernel_of(call: DecodeCall) -> Any:
    from dcpmla.attention.hopper import decode_8bit, decode_fp8, decode_sparse

    if call.q.dtype == call.kv_cache.dtype == FP8:
        return decode_fp8.decode_kernel
    if call.q.dtype != call.kv_cache.dtype:
        return decode_8bit.decode_kernel
    return decode_sparse.decode_kernel if call.kv_cache.shape[1] == 1 else decode_kernel
