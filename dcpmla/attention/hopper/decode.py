"""Decode attention for Hopper: wgmma over tiles of 64 query rows and 64 keys, the work cut evenly over multiprocessors.

A program is a pipeline of warps: a producer brings queries and keys into shared memory, and groups of four consumer
warps compute scores, probabilities and half of the output's columns each. So the cache is read once. Programs that
share a request wait for each other's partial outputs and merge them: they must run at the same time, so the launch is
cooperative.

There is one kernel, whose variants follow from the call:

    queries, cache             producer                         consumers
    16 bits, blocks of 64 n    producers.copy_tiles (TMA)       consumers
    16 bits, single rows       producers.copy_rows              consumers
    16 bits over 8             convert.convert_rows             consumers
    e4m3                       producers.copy_tiles (TMA)       consumers_fp8
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.backends.calls import COUNTER_WORDS, DecodeCall, num_programs, request_bound
from dcpmla.attention.hopper import consumers, consumers_fp8
from dcpmla.attention.hopper.consumers import NUM_STAGES
from dcpmla.attention.hopper.consumers_fp8 import NUM_PROBS as FP8_PROBS
from dcpmla.attention.hopper.consumers_fp8 import NUM_STAGES as FP8_STAGES
from dcpmla.attention.hopper.launch import describe_cache, describe_queries
from dcpmla.attention.hopper.outputs import Outputs, open_mail
from dcpmla.attention.hopper.paging import Paging, Queries, Tiles
from dcpmla.attention.hopper.pipeline import LOG2E, new_barriers, new_buffers
from dcpmla.attention.hopper.producers import produce
from dcpmla.attention.hopper.schedule import LATENT, ROWS, count_tiles, cut, keep_gaps
from dcpmla.comm import direct_ops
from dcpmla.comm.exchange import Mailbox

MAX_REQUESTS = 2048  # limit of a launch's single tokens; programs hold the lengths of all requests in registers


# Sizes of a step change: if specialized on them, Triton would compile variants while requests wait. (For the same
# reason no arguments are grouped in tuples: Triton would specialize them all.)
@gluon.jit(
    do_not_specialize=[
        "table_stride",
        "rows_per_block",
        "block_size",
        "num_reqs",
        "query_len",
        "num_heads",
        "q_token_stride",
        "rank",
        "num_rows",
    ]
)
def decode_kernel(
    q_desc,
    q_pe_desc,
    kv_desc,
    k_pe_desc,
    rows_ptr,
    table_ptr,
    lens_ptr,
    index_ptr,
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
    q_token_stride,
    scale,
    addresses_ptr,
    state_ptr,
    rank,
    own_heads,
    num_rows,
    landing_bytes,
    ROW_STRIDE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    REQS: gl.constexpr,
    IS_SPARSE: gl.constexpr,
    IS_CONVERTED: gl.constexpr,
):
    """Attend to one part of the keys from one tile of query rows, and merge requests that parts share.

    The grid is (lines, parts): lines that read the same keys run on neighbouring multiprocessors at the
    same time, which takes less energy, and so 6 % less time where power is the limit.

    Args:
        q_desc, q_pe_desc: Both parts of the queries; None for the second where keys are shared.
        kv_desc, k_pe_desc: Cache for TMA; None for other producers.
        rows_ptr: Cache for other producers: rows ROW_STRIDE elements apart, as words of four bytes if converted.
        index_ptr: Row of the table of each request; None where each has one, in order.
        start_ptr: First query token of each request; None where each has query_len query tokens.
        kv_scale_ptr: Scale of the cache; None for 16 bits and for fp8_ds_mla, whose rows hold their scales.
        q_token_stride: Columns of q_desc from token to token, if its rows are heads (`Queries`); else None.
        scale: Softmax scale times log2(e).
        addresses_ptr, .., landing_bytes: Destination of rows that are sent to their owners instead of out and lse,
            else None.
        PAGE_STRIDE: Words from one page of fp8_ds_mla's shared keys to the next; else None.
        REQS: Power of two, at least num_reqs (`request_bound`).
        IS_SPARSE: Whether the table holds numbers of rows.
        IS_CONVERTED: Whether rows of 8 bits are converted to q's dtype.
    """
    batch = keep_gaps(lens_ptr, start_ptr, query_len, num_heads, gl.program_id(0), num_reqs, REQS)
    num_tiles = count_tiles(batch, num_reqs, REQS)  # its loads are in flight while the mbarriers are set up
    is_fp8: gl.constexpr = q_desc.dtype == gl.float8e4nv
    is_ds_mla: gl.constexpr = IS_CONVERTED and kv_scale_ptr is None
    num_stages: gl.constexpr = FP8_STAGES if is_fp8 else NUM_STAGES
    num_probs: gl.constexpr = FP8_PROBS if is_fp8 else 1
    buffers = new_buffers(q_desc, q_pe_desc, num_stages, num_probs, HAS_LSES=is_fp8)
    consumers_of_q: gl.constexpr = 3 if is_fp8 else 2
    barriers = new_barriers(num_stages, num_probs, consumers_of_q, PROBS_CONSUMERS=consumers_of_q - 1, IS_MERGED=True)
    work = cut(num_tiles, num_reqs, batch)
    mail = None
    if addresses_ptr is not None:
        mail = open_mail(addresses_ptr, state_ptr, rank, own_heads, num_rows, num_heads, landing_bytes)
    partial_lses_ptr = partials_ptr + gl.num_programs(0) * gl.num_programs(1) * 2 * ROWS * LATENT
    outputs = Outputs(out_ptr, lse_ptr, mail, partials_ptr, partial_lses_ptr, counters_ptr)
    queries = Queries(q_desc, q_pe_desc, num_heads, q_token_stride)
    keys = rows_ptr if kv_desc is None else Tiles(kv_desc, k_pe_desc)
    table = table_ptr, table_stride, index_ptr, rows_per_block, block_size
    paging = Paging(*table, ROW_STRIDE, PAGE_STRIDE, IS_SPARSE, is_ds_mla)
    source = (queries, keys, buffers, barriers, paging, counters_ptr, work, IS_CONVERTED)
    if is_fp8:
        gl.warp_specialize(
            [
                (consumers_fp8.score_consumer, (buffers, barriers, scale, q_scale_ptr, kv_scale_ptr, work)),
                (consumers_fp8.value_consumer, (0, buffers, barriers, outputs, work)),
                (consumers_fp8.value_consumer, (1, buffers, barriers, outputs, work)),
                (produce, source),
            ],
            [4, 4, 1],
            [192, 192, 24],
        )
    else:
        value_scale = 1.0
        if IS_CONVERTED and not is_ds_mla:  # one scale for all: keys and values are exact without it
            value_scale = gl.load(kv_scale_ptr)
            scale = scale * value_scale
        producer_warps: gl.constexpr = 4 if IS_CONVERTED or IS_SPARSE else 1
        consumer_registers: gl.constexpr = 184 if IS_CONVERTED else 216 if IS_SPARSE else 232
        producer_registers: gl.constexpr = 120 if IS_CONVERTED else 72 if IS_SPARSE else 24
        gl.warp_specialize(
            [
                (consumers.score_consumer, (buffers, barriers, outputs, scale, value_scale, work)),
                (consumers.value_consumer, (buffers, barriers, outputs, work)),
                (produce, source),
            ],
            [4, producer_warps],
            [consumer_registers, producer_registers],
        )


def run(call: DecodeCall, mailbox: Mailbox | None = None) -> tuple[Tensor, Tensor]:
    """Compute `dcpmla.mla_decode` for the calls that `backends` admits, in one launch; many single tokens in several.

    With a mailbox, rows are sent to the ranks that own their heads, and the result is merged from all ranks' rows.
    """
    out, lse = call.new_output(1 if mailbox is None else len(mailbox.addresses))
    mail: tuple[Tensor | int | None, ...] = (None,) * 6
    if mailbox is not None:
        rank, own_heads = direct_ops.enter("out", out, mailbox), out.shape[1]
        mail = mailbox.addresses, mailbox.state, rank, own_heads, len(out) * own_heads, mailbox.landing_bytes
    if len(out) > MAX_REQUESTS and call.has_one_token_each and mailbox is None:
        for first in range(0, len(out), MAX_REQUESTS):
            tokens = slice(first, first + MAX_REQUESTS)
            _launch(_part(call, tokens), out[tokens], lse[tokens], mail)
    elif len(out):
        _launch(call, out, lse, mail)
        if mailbox is not None:
            direct_ops.collect(out, lse, mailbox)
    return out, lse


def _part(call: DecodeCall, tokens: slice) -> DecodeCall:
    """Return the call of some of the tokens, where every segment has one (`has_one_token_each`)."""
    q_pe, table, index = call.q_pe, call.block_table, call.request_index
    return call._replace(
        q=call.q[tokens],
        q_pe=None if q_pe is None else q_pe[tokens],
        block_table=table[tokens] if index is None else table,
        seq_lens=call.seq_lens[tokens],
        request_index=None if index is None else index[tokens],
    )


def _launch(call: DecodeCall, out: Tensor, lse: Tensor, mail: tuple[Tensor | int | None, ...]) -> None:
    """Launch the kernel over a call.

    Args:
        out, lse: Outputs of the kernel; where rows are sent, only their dtypes count.
        mail: Arguments of the kernel from addresses_ptr to landing_bytes, None without a mailbox.
    """
    num_heads, num_reqs = call.q.shape[1], call.num_segments
    workspace, queries, cache = call.get_workspace(), describe_queries(call), describe_cache(call)
    num_row_tiles = triton.cdiv(call.max_query_len * num_heads, ROWS.value)
    num_parts = max(1, num_programs(workspace, ROWS.value) // num_row_tiles)
    decode_kernel[(num_row_tiles, num_parts)](
        queries.latent,
        queries.rope,
        cache.latent,
        cache.rope,
        cache.rows,
        call.block_table,
        call.seq_lens,
        call.request_index,
        call.query_start_loc,
        out,
        lse,
        workspace[:COUNTER_WORDS].view(torch.int32),
        workspace[COUNTER_WORDS:],
        call.kv_scale,
        call.q_scale,
        call.block_table.stride(0),
        cache.rows_per_block,
        call.block_size,
        num_reqs,
        call.max_query_len,
        num_heads,
        queries.token_stride,
        call.softmax_scale * LOG2E.value,
        *mail,
        ROW_STRIDE=cache.row_stride,
        PAGE_STRIDE=cache.page_stride,
        REQS=request_bound(num_reqs),
        IS_SPARSE=call.block_size == 1,
        IS_CONVERTED=cache.is_converted,
        num_warps=4,
        launch_cooperative_grid=num_parts > 1,
    )
