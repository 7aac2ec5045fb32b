"""Decode attention in portable Triton, on GPUs from sm_80 on and for sizes that the Hopper kernels do not support.

A program computes a tile of query rows over one part of the work (stream-K): the key tiles of all requests form one
sequence that is cut into equal parts, so no length has to be known on the host and no program waits for the longest
request. A request that is cut leaves a partial output from each of its parts; the last part to arrive merges them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.calls import COUNTER_WORDS, DecodeCall, num_programs, request_bound
from dcpmla.attention.triton.device import shared_memory
from dcpmla.cache import formats, shared_format

_LOG2E = 1.4426950408889634
_BYTES_OF_64_ROWS = 114_688  # shared memory that they take with DeepSeek's widths
LN2 = tl.constexpr(0.6931471805599453)
TILE = tl.constexpr(formats.TILE)
SHARED_TILE = tl.constexpr(shared_format.TILE)  # also the width of a shared key's part that is not quantized
PAGE_ROWS = tl.constexpr(shared_format.PAGE_ROWS)
SCALE_BYTES = tl.constexpr(shared_format.SCALE_BYTES)
# Smallest part: the last part to arrive merges all parts, so many short parts would cost more than they save.
MIN_TILES = tl.constexpr(8)


@triton.jit
def _find_request(index, lens_ptr, start_ptr, query_len, num_heads, line, ROWS: tl.constexpr, IS_RAGGED: tl.constexpr):
    """Return the first query row of this line's tile of a request, its rows from there on, and its keys (0 if no rows
    are left).

    index is one request or a vector of requests. A line's tile rotates from request to request, so that the only
    tiles of short requests are spread over the lines.
    """
    first = index * query_len
    if IS_RAGGED:
        first = tl.load(start_ptr + index)
        query_len = tl.load(start_ptr + index + 1) - first
    above = (line + index) % tl.num_programs(1) * ROWS
    num_rows = query_len * num_heads - above
    num_keys = tl.load(lens_ptr + tl.maximum(first + query_len - 1, 0))
    return first * num_heads + above, num_rows, tl.where(num_rows > 0, tl.maximum(num_keys, 0), 0)


@triton.jit
def _load_keys(row_ptr, is_key, dtype: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr):
    """Load cache rows of any of `cache.formats` as kv_c [KEYS, LATENT], k_pe [KEYS, ROPE]; kv_scale is not applied.

    Shared keys (ROPE is 0) have no k_pe; kv_c is returned for it.
    """
    mask = is_key[:, None]  # rows past the last key may hold NaN, and 0 x NaN is NaN
    k_pe_ptr = row_ptr + LATENT
    if row_ptr.dtype.element_ty == tl.uint8:
        tile, column = tl.arange(0, LATENT // TILE), tl.arange(0, TILE)
        values = tl.load(
            row_ptr[:, None, None] + (tile * TILE)[None, :, None] + column[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
        )
        scale_ptr = k_pe_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(scale_ptr[:, None] + tile[None, :], mask=mask, other=0.0)
        products = values.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, :, None]
        kv_c = tl.reshape(products.to(dtype), [KEYS, LATENT])
        k_pe_ptr = (k_pe_ptr + LATENT // TILE * 4).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        kv_c = _upcast(tl.load(row_ptr[:, None] + tl.arange(0, LATENT)[None, :], mask=mask, other=0.0), dtype)
    k_pe = kv_c
    if ROPE:
        k_pe = _upcast(tl.load(k_pe_ptr[:, None] + tl.arange(0, ROPE)[None, :], mask=mask, other=0.0), dtype)
    return kv_c, k_pe


@triton.jit
def _load_planar(cache_ptr, page_stride, row, is_key, dtype: tl.constexpr, LATENT: tl.constexpr):
    """Load rows of `cache.shared_format`' fp8_ds_mla, given their numbers [KEYS] int64, as [KEYS, LATENT]."""
    page_ptr = cache_ptr + row // PAGE_ROWS * page_stride
    row = row % PAGE_ROWS
    row_ptr = page_ptr + row * (LATENT + SHARED_TILE)
    scale_ptr = page_ptr + PAGE_ROWS * (LATENT + SHARED_TILE) + row * SCALE_BYTES
    tile, column = tl.arange(0, LATENT // SHARED_TILE), tl.arange(0, SHARED_TILE)
    is_coded = (tile < LATENT // SHARED_TILE - 1)[None, :]
    mask = is_key[:, None]
    codes = tl.load(
        row_ptr[:, None, None] + (tile * SHARED_TILE)[None, :, None] + column[None, None, :],
        mask=(mask & is_coded)[:, :, None],
        other=0.0,
    )
    exponents = tl.load(scale_ptr[:, None] + tile[None, :], mask=mask & is_coded, other=0.0)
    scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    values = (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, :, None]).to(dtype)
    rope_ptr = (row_ptr + LATENT - SHARED_TILE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    rope = _upcast(tl.load(rope_ptr[:, None] + column[None, :], mask=mask, other=0.0), dtype)
    return tl.reshape(tl.where(is_coded[:, :, None], values, rope[:, None, :]), [row.shape[0], LATENT])


@triton.jit
def _upcast(values, dtype: tl.constexpr):
    if values.dtype == dtype:
        return values
    return values.to(tl.float32).to(dtype)  # e4m3 -> bfloat16 alone does not compile for sm_89


@triton.jit
def _merge_parts(partials_ptr, partial_lse_ptr, first_part, num_parts, line, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """Merge the partial outputs of all parts of a request into out [ROWS, LATENT] and lse [ROWS]."""
    row, column = tl.arange(0, ROWS), tl.arange(0, LATENT)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    for part in range(0, num_parts):
        index = (line * tl.num_programs(0) + first_part + part) * 2 + (part == 0)
        at = index * ROWS + row
        lse = tl.load(partial_lse_ptr + at, cache_modifier=".cg")
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf - -inf is NaN
        factor, weight = tl.exp(peak - shift), tl.exp(lse - shift)
        partial = tl.load(partials_ptr + at[:, None] * LATENT + column[None, :], cache_modifier=".cg")
        acc = acc * factor[:, None] + partial * weight[:, None]
        total = total * factor + weight
        peak = new_peak
    is_any = total != 0
    total = tl.where(is_any, total, 1.0)
    return acc / total[:, None], tl.where(is_any, peak + tl.log(total), -float("inf"))


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
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    REQS: tl.constexpr,
    IS_RAGGED: tl.constexpr,
):
    """Compute decode attention; programs are (parts, lines of tiles of query rows). scale includes log2(e).

    ROPE is 0 where keys are shared, and q_pe_ptr None; uint8 rows then have the format of `cache.shared_format`.

    e4m3 values are exact in 16 bits and are multiplied without their scales, which go into the scores' scale; kv_scale
    also goes into the output.
    """
    this_part, num_programs, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    row, key, column = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, LATENT)
    IS_PLANAR: tl.constexpr = ROPE == 0 and cache_ptr.dtype.element_ty == tl.uint8
    partial_lse_ptr = partials_ptr + num_programs * tl.num_programs(1) * 2 * ROWS * LATENT

    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr)
    if kv_scale_ptr is not None:
        scale *= tl.load(kv_scale_ptr)

    # This program's part of the sequence of tiles.
    index = tl.arange(0, REQS)
    known = tl.minimum(index, num_reqs - 1)
    _, _, all_keys = _find_request(known, lens_ptr, start_ptr, query_len, num_heads, line, ROWS, IS_RAGGED)
    ends = tl.cumsum(tl.where(index < num_reqs, tl.cdiv(all_keys, KEYS), 0), 0)
    num_tiles = tl.max(ends, 0)
    size = tl.maximum(tl.cdiv(num_tiles, num_programs), MIN_TILES)
    start = this_part * size
    end = tl.minimum(start + size, num_tiles)
    request = tl.sum((ends <= start).to(tl.int32), 0)
    begin = tl.max(tl.where(ends <= start, ends, 0), 0)

    for empty in range(this_part, num_reqs, num_programs):  # they have no tile
        first_row, num_rows, num_keys = _find_request(
            empty, lens_ptr, start_ptr, query_len, num_heads, line, ROWS, IS_RAGGED
        )
        if num_keys == 0:
            out_row = (first_row + row).to(tl.int64)
            zeros = tl.zeros([ROWS, LATENT], out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] * LATENT + column[None, :], zeros, mask=row[:, None] < num_rows)
            tl.store(lse_ptr + out_row, tl.full([ROWS], -float("inf"), tl.float32), mask=row < num_rows)

    while start < end:
        first_row, num_rows, num_keys = _find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, line, ROWS, IS_RAGGED
        )
        stop = tl.minimum(begin + tl.cdiv(num_keys, KEYS), end)
        if start < stop:
            is_row = row < num_rows
            token, head = (first_row + row) // num_heads, (first_row + row) % num_heads
            num_seen = tl.load(lens_ptr + token, mask=is_row, other=0)
            q_row = q_ptr + token.to(tl.int64) * q_stride_token + head.to(tl.int64) * q_stride_head
            q = tl.load(q_row[:, None] + column[None, :], mask=is_row[:, None], other=0.0)
            if ROPE:
                rope = tl.arange(0, ROPE)
                pe_row = q_pe_ptr + token.to(tl.int64) * q_pe_stride_token + head.to(tl.int64) * q_pe_stride_head
                q_pe = tl.load(pe_row[:, None] + rope[None, :], mask=is_row[:, None], other=0.0)
            peak = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, LATENT], tl.float32)
            table = request
            if index_ptr is not None:
                table = tl.load(index_ptr + request)
            row_ptr = table_ptr + table.to(tl.int64) * table_stride
            for tile in range(start - begin, stop - begin):
                position = tile * KEYS + key
                is_key = position < num_keys
                block = tl.load(row_ptr + position // block_size, mask=is_key, other=0)
                if IS_PLANAR:
                    kv_c = _load_planar(cache_ptr, cache_stride_block, block.to(tl.int64), is_key, q.dtype, LATENT)
                else:
                    at = (
                        cache_ptr
                        + block.to(tl.int64) * cache_stride_block
                        + (position % block_size).to(tl.int64) * cache_stride_row
                    )
                    kv_c, k_pe = _load_keys(at, is_key, q.dtype, KEYS, LATENT, ROPE)
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
            out = acc / total[:, None]
            if kv_scale_ptr is not None:
                out *= tl.load(kv_scale_ptr)
            lse = tl.where(is_any, (peak + tl.log2(total)) * LN2, -float("inf"))

            first_part = begin // size
            num_parts = (begin + tl.cdiv(num_keys, KEYS) - 1) // size - first_part + 1
            is_last = num_parts == 1
            if num_parts > 1:
                at = ((line * num_programs + this_part) * 2 + (start == begin)) * ROWS + row
                tl.store(partials_ptr + at[:, None] * LATENT + column[None, :], out)
                tl.store(partial_lse_ptr + at, lse)
                tl.debug_barrier()  # all threads store before one thread signals the arrival
                counter = counters_ptr + line * num_programs + first_part
                is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
                tl.debug_barrier()
                if is_last:
                    tl.store(counter, 0)  # the next launch starts from 0
                    out, lse = _merge_parts(partials_ptr, partial_lse_ptr, first_part, num_parts, line, ROWS, LATENT)
            if is_last:
                out_row = (first_row + row).to(tl.int64)
                tl.store(
                    out_ptr + out_row[:, None] * LATENT + column[None, :],
                    out.to(out_ptr.dtype.element_ty),
                    mask=is_row[:, None],
                )
                tl.store(lse_ptr + out_row, lse, mask=is_row)
            start = stop
        begin += tl.cdiv(num_keys, KEYS)
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
    max_rows = 64 if shared_memory(q.device) >= _BYTES_OF_64_ROWS else 32
    rows = min(max_rows, max(16, triton.next_power_of_2(num_rows)))
    num_lines = triton.cdiv(num_rows, rows)
    decode_kernel[(max(1, num_programs(workspace, rows) // num_lines), num_lines)](
        q,
        q_pe,
        kv_cache,
        block_table,
        call.seq_lens,
        call.request_index,
        call.seq_lens if call.query_start_loc is None else call.query_start_loc,
        out,
        lse,
        workspace[:COUNTER_WORDS].view(torch.int32),
        workspace[COUNTER_WORDS:],
        call.kv_scale,
        call.q_scale,
        q.stride(0),
        q.stride(1),
        *(q.stride() if q_pe is None else q_pe.stride())[:2],
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        call.block_size,
        call.num_reqs,
        call.max_query_len,
        num_heads,
        call.scale * _LOG2E,
        ROWS=rows,
        KEYS=32,
        LATENT=call.kv_lora_rank,
        ROPE=call.rope_dim,
        REQS=request_bound(call.num_reqs),
        IS_RAGGED=call.query_start_loc is not None,
        num_warps=4 if rows == 16 and q.dtype == kv_cache.dtype else 8,  # conversions take registers
        num_stages=2,
    )
    return out, lse
