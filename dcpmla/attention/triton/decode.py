"""Decode attention in portable Triton, on GPUs from sm_80 on and for sizes that the Hopper kernels do not support.

A program computes a tile of query rows over one part of the work (stream-K): the key tiles of all requests form one
sequence that is cut into equal parts, so no length has to be known on the host and no program waits for the longest
request. A request that is cut leaves a partial output from each of its parts; the last part to arrive merges them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.backends.calls import COUNTER_WORDS, DecodeCall, num_programs, request_bound
from dcpmla.attention.triton.device import shared_memory
from dcpmla.attention.triton.keys import load_keys, load_planar
from dcpmla.attention.triton.partials import finish_part, store_rows

_LOG2E = 1.4426950408889634
_LATENT = 512  # width of DeepSeek's latents
_BYTES_OF_64_ROWS = 114_688  # shared memory that they take with DeepSeek's widths
LN2 = tl.constexpr(0.6931471805599453)
_KEYS = tl.constexpr(32)  # keys of a tile
# Smallest part: the last part to arrive merges all parts, so many short parts would cost more than they save.
MIN_TILES = tl.constexpr(8)


@triton.jit
def _find_request(index, batch, ROWS: tl.constexpr):
    """Return the first query row of this line's tile of a request, its rows from there on, and its keys (0 if no rows
    are left).

    index is one request or a vector of requests. A line's tile rotates from request to request, so that the only
    tiles of short requests are spread over the lines. batch: lens_ptr, start_ptr, query_len and num_heads of
    `decode_kernel`.
    """
    lens_ptr, start_ptr, query_len, num_heads = batch
    first = index * query_len
    if start_ptr is not None:
        first = tl.load(start_ptr + index)
        query_len = tl.load(start_ptr + index + 1) - first
    above = (tl.program_id(1) + index) % tl.num_programs(1) * ROWS
    num_rows = query_len * num_heads - above
    num_keys = tl.load(lens_ptr + tl.maximum(first + query_len - 1, 0))
    return first * num_heads + above, num_rows, tl.where(num_rows > 0, tl.maximum(num_keys, 0), 0)


@triton.jit
def _attend(q, q_pe, cache, table_ptr, tiles, num_keys, num_seen, scale, ROPE: tl.constexpr):
    """Attend to some tiles of a request's keys; return out [ROWS, LATENT] and lse [ROWS], float32.

    Args:
        q, q_pe: Queries [ROWS, LATENT] and [ROWS, ROPE]; the second is None where keys are shared.
        cache: cache_ptr, its strides of blocks and of rows, and block_size.
        table_ptr: Row of the block table.
        tiles: First tile, and the end.
        num_keys, num_seen: Keys of the request, and of each row [ROWS].
    """
    cache_ptr, stride_block, stride_row, block_size = cache
    ROWS: tl.constexpr = q.shape[0]
    LATENT: tl.constexpr = q.shape[1]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    for tile in range(tiles[0], tiles[1]):
        position = tile * _KEYS + tl.arange(0, _KEYS)
        is_key = position < num_keys
        block = tl.load(table_ptr + position // block_size, mask=is_key, other=0)
        if ROPE == 0 and cache_ptr.dtype.element_ty == tl.uint8:
            kv_c = load_planar(cache_ptr, stride_block, block.to(tl.int64), is_key, q.dtype, LATENT)
        else:
            at = cache_ptr + block.to(tl.int64) * stride_block + (position % block_size).to(tl.int64) * stride_row
            kv_c, k_pe = load_keys(at, is_key, q.dtype, _KEYS, LATENT, ROPE)
        scores = tl.dot(q, tl.trans(kv_c))
        if ROPE:
            scores = tl.dot(q_pe, tl.trans(k_pe), scores)
        scores *= scale
        scores = tl.where(position[None, :] < num_seen[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        factor = tl.exp2(peak - shift)
        probs = tl.exp2(scores - shift[:, None])
        total = total * factor + tl.sum(probs, 1)
        acc = tl.dot(probs.to(q.dtype), kv_c, acc * factor[:, None])
        peak = new_peak
    is_any = total != 0
    total = tl.where(is_any, total, 1.0)
    return acc / total[:, None], tl.where(is_any, (peak + tl.log2(total)) * LN2, -float("inf"))


# Sizes of a step change, as do addresses of layers' scales: if specialized on them, Triton would recompile while
# requests wait.
@triton.jit(
    do_not_specialize=["table_stride", "block_size", "num_reqs", "query_len", "num_heads"],
    do_not_specialize_on_alignment=["kv_scale_ptr", "q_scale_ptr"],
)
def decode_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
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
    q_stride_token,
    q_stride_head,
    q_pe_stride_token,
    q_pe_stride_head,
    cache_stride_block,
    cache_stride_row,
    table_stride,
    block_size,
    num_reqs,
    query_len,
    num_heads,
    scale,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    REQS: tl.constexpr,
):
    """Compute decode attention; programs are (parts, lines of tiles of query rows). scale includes log2(e).

    start_ptr is None where each request has query_len query tokens. ROPE is 0 where keys are shared, and q_pe_ptr None;
    uint8 rows then have the format of `cache.shared_format`.

    e4m3 values are exact in 16 bits and are multiplied without their scales, which go into the scores' scale; kv_scale
    also goes into the output.
    """
    this_part, num_programs = tl.program_id(0), tl.num_programs(0)
    row, column = tl.arange(0, ROWS), tl.arange(0, LATENT)
    batch = (lens_ptr, start_ptr, query_len, num_heads)
    cache = (cache_ptr, cache_stride_block, cache_stride_row, block_size)

    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr)
    if kv_scale_ptr is not None:
        scale *= tl.load(kv_scale_ptr)

    # This program's part of the sequence of tiles.
    index = tl.arange(0, REQS)
    _, _, all_keys = _find_request(tl.minimum(index, num_reqs - 1), batch, ROWS)
    ends = tl.cumsum(tl.where(index < num_reqs, tl.cdiv(all_keys, _KEYS), 0), 0)
    num_tiles = tl.max(ends, 0)
    size = tl.maximum(tl.cdiv(num_tiles, num_programs), MIN_TILES)
    start = this_part * size
    end = tl.minimum(start + size, num_tiles)
    request = tl.sum((ends <= start).to(tl.int32), 0)
    begin = tl.max(tl.where(ends <= start, ends, 0), 0)

    for empty in range(this_part, num_reqs, num_programs):  # they have no tile
        first_row, num_rows, num_keys = _find_request(empty, batch, ROWS)
        if num_keys == 0:
            lse = tl.full([ROWS], -float("inf"), tl.float32)
            store_rows(out_ptr, lse_ptr, first_row, num_rows, tl.zeros([ROWS, LATENT], tl.float32), lse)

    while start < end:
        first_row, num_rows, num_keys = _find_request(request, batch, ROWS)
        stop = tl.minimum(begin + tl.cdiv(num_keys, _KEYS), end)
        if start < stop:
            is_row = row < num_rows
            token, head = (first_row + row) // num_heads, (first_row + row) % num_heads
            num_seen = tl.load(lens_ptr + token, mask=is_row, other=0)
            q_row = q_ptr + token.to(tl.int64) * q_stride_token + head.to(tl.int64) * q_stride_head
            q, q_pe = tl.load(q_row[:, None] + column[None, :], mask=is_row[:, None], other=0.0), None
            if ROPE:
                rope = tl.arange(0, ROPE)
                pe_row = q_pe_ptr + token.to(tl.int64) * q_pe_stride_token + head.to(tl.int64) * q_pe_stride_head
                q_pe = tl.load(pe_row[:, None] + rope[None, :], mask=is_row[:, None], other=0.0)
            table = request
            if index_ptr is not None:
                table = tl.load(index_ptr + request)
            tiles = (start - begin, stop - begin)
            row_ptr = table_ptr + table.to(tl.int64) * table_stride
            out, lse = _attend(q, q_pe, cache, row_ptr, tiles, num_keys, num_seen, scale, ROPE)
            if kv_scale_ptr is not None:
                out *= tl.load(kv_scale_ptr)

            first_part = begin // size
            num_parts = (begin + tl.cdiv(num_keys, _KEYS) - 1) // size - first_part + 1
            is_last, out, lse = finish_part(out, lse, counters_ptr, partials_ptr, first_part, num_parts, start == begin)
            if is_last:
                store_rows(out_ptr, lse_ptr, first_row, num_rows, out, lse)
            start = stop
        begin += tl.cdiv(num_keys, _KEYS)
        request += 1


def run(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute `dcpmla.mla_decode` in one launch, for the calls that `backends` admits."""
    q, q_pe, kv_cache, block_table = call.q, call.q_pe, call.kv_cache, call.block_table
    num_heads = q.shape[1]
    out, lse = call.new_output()
    if len(q) == 0:
        return out, lse
    if call.q_scale is not None:
        # Exact; keys become float16 in one instruction, and probabilities lose less than in bfloat16.
        assert q_pe is not None
        q, q_pe = q.to(torch.float16), q_pe.to(torch.float16)
    workspace = call.get_workspace()
    num_rows = call.max_query_len * num_heads
    # Twice the width takes as much memory in half the rows.
    times = triton.cdiv(call.kv_lora_rank, _LATENT)
    max_rows = 64 if shared_memory(q.device) >= _BYTES_OF_64_ROWS * times else 32
    rows = min(max_rows // times, max(16, triton.next_power_of_2(num_rows)))
    num_lines = triton.cdiv(num_rows, rows)
    decode_kernel[(max(1, num_programs(workspace, rows * times) // num_lines), num_lines)](
        q,
        q_pe,
        kv_cache,
        block_table,
        call.seq_lens,
        call.request_index,
        call.query_start_loc,
        out,
        lse,
        workspace[:COUNTER_WORDS].view(torch.int32),
        workspace[COUNTER_WORDS:],
        call.kv_scale,
        call.q_scale,
        *q.stride()[:2],
        *(q if q_pe is None else q_pe).stride()[:2],
        *kv_cache.stride()[:2],
        block_table.stride(0),
        call.block_size,
        call.num_segments,
        call.max_query_len,
        num_heads,
        call.softmax_scale * _LOG2E,
        ROWS=rows,
        LATENT=call.kv_lora_rank,
        ROPE=call.rope_dim,
        REQS=request_bound(call.num_segments),
        # Conversions and wide latents take registers.
        num_warps=4 if rows == 16 and q.dtype == kv_cache.dtype and times == 1 else 8,
        num_stages=2,
    )
    return out, lse
