"""Triton kernel of attention with keys and values of each head; `layers/grouped/attention.py` specifies it.

A program computes a tile of tokens, with all heads of queries that attend to one head of keys and values, over one part
of the keys. Where tiles and heads are few, keys are cut into parts, whose results are merged by their LSE. All sizes
of the launch follow from shapes, so a CUDA graph may hold it; lengths are read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.layers.grouped.calls import GroupedCall
from dcpmla.comm.kernels.merge import merge_rows

_LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)
_TILE_ROWS = 64  # maximum rows of a tile, a token and a head each
_FEWEST_ROWS = 16  # smallest side of a matrix product
_MOST_DECODES = 256  # a step of more tokens is taken for one with prompts
_PROGRAMS = 256  # two for each multiprocessor of a Hopper GPU
_MANY_REQUESTS = tl.constexpr(1 << 30)


@triton.jit
def _attend(sums, q, cache, table_ptr, span, num_seen, scale, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Run online softmax, base 2, over some of a request's keys; return the new sums.

    Args:
        sums: Output [ROWS, COLUMNS], peak and total [ROWS] so far.
        q: Queries [ROWS, COLUMNS].
        cache: Pointer to the head's key of slot 0, the cache's strides of blocks and of rows, and block_size.
        table_ptr: Row of the block table.
        span: First key, and the end.
        num_seen: Keys that each row sees [ROWS].
    """
    acc, peak, total = sums
    cache_ptr, stride_block, stride_row, block_size = cache
    column = tl.arange(0, q.shape[1])[None, :]
    for start in range(span[0], span[1], KEYS):
        position = start + tl.arange(0, KEYS)
        is_key = position < span[1]
        block = tl.load(table_ptr + position // block_size, mask=is_key, other=0).to(tl.int64)
        at = cache_ptr + block * stride_block + (position % block_size).to(tl.int64) * stride_row
        is_read = is_key[:, None] & (column < DIM)
        keys = tl.load(at[:, None] + column, mask=is_read, other=0.0)
        values = tl.load(at[:, None] + DIM + column, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        is_seen = is_key[None, :] & (position[None, :] < num_seen[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        factor, probs = tl.exp2(peak - shift), tl.exp2(scores - shift[:, None])
        total = total * factor + tl.sum(probs, 1)
        acc = tl.dot(probs.to(q.dtype), values, acc * factor[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


# Sizes of a step change: if specialized on them, Triton would recompile while requests wait.
@triton.jit(do_not_specialize=["num_tokens", "table_stride", "block_size"])
def grouped_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    request_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    q_stride_token,
    q_stride_head,
    cache_stride_block,
    cache_stride_row,
    table_stride,
    block_size,
    num_tokens,
    num_heads,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend; programs are (tiles of tokens, heads of keys and values, parts of keys). scale includes log2(e).

    A tile goes through its requests one by one: rows of other requests see no key meanwhile.
    """
    head, part, num_parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token, q_head = tl.program_id(0) * TOKENS + row // GROUP, head * GROUP + row % GROUP
    is_row, is_column = (row < TOKENS * GROUP) & (token < num_tokens), column[None, :] < DIM
    num_seen = tl.load(lens_ptr + token, mask=is_row, other=0)
    request = tl.load(request_ptr + token, mask=is_row, other=0)
    q_row = q_ptr + token.to(tl.int64) * q_stride_token + q_head * q_stride_head
    q = tl.load(q_row[:, None] + column[None, :], mask=is_row[:, None] & is_column, other=0.0)

    sums = (
        tl.zeros([ROWS, COLUMNS], tl.float32),
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
    )
    cache = (cache_ptr + head * 2 * DIM, cache_stride_block, cache_stride_row, block_size)
    number = tl.min(tl.where(num_seen > 0, request, _MANY_REQUESTS), 0)
    last = tl.max(tl.where(num_seen > 0, request, -1), 0)
    while number <= last:
        num_own = tl.where(request == number, num_seen, 0)
        num_keys = tl.max(num_own, 0)
        size = tl.cdiv(tl.cdiv(num_keys, KEYS), num_parts) * KEYS
        span = (part * size, tl.minimum((part + 1) * size, num_keys))
        table = table_ptr + number.to(tl.int64) * table_stride
        sums = _attend(sums, q, cache, table, span, num_own, scale, DIM, KEYS)
        number += 1

    acc, peak, total = sums
    is_any = total != 0
    divisor = tl.where(is_any, total, 1.0)
    at = (part * num_tokens + token).to(tl.int64) * num_heads + q_head
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * DIM + column[None, :], out, mask=is_row[:, None] & is_column)
    tl.store(lse_ptr + at, tl.where(is_any, (peak + tl.log2(divisor)) * _LN2, -float("inf")), mask=is_row)


def grouped_attention(call: GroupedCall) -> tuple[Tensor, Tensor]:
    """Compute `attention.grouped_attention` in one kernel, or with a merge of parts in two."""
    q, cache, table = call.q, call.cache, call.block_table
    (num_tokens, num_heads, dim), num_kv_heads = q.shape, call.num_kv_heads
    group = num_heads // num_kv_heads
    tokens = _tile_tokens(num_tokens, len(table), group)
    num_tiles = triton.cdiv(num_tokens, tokens)
    num_parts = _num_parts(num_tiles * num_kv_heads)
    out = torch.empty((num_parts, *q.shape), dtype=q.dtype if num_parts == 1 else torch.float32, device=q.device)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    if num_tokens:
        grouped_kernel[(num_tiles, num_kv_heads, num_parts)](
            q,
            cache,
            table,
            call.request,
            call.seq_lens,
            out,
            lse,
            *q.stride()[:2],
            *cache.stride()[:2],
            table.stride(0),
            cache.shape[1],
            num_tokens,
            num_heads,
            call.softmax_scale * _LOG2E,
            GROUP=group,
            DIM=dim,
            TOKENS=tokens,
            ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(tokens * group)),
            COLUMNS=max(_FEWEST_ROWS, triton.next_power_of_2(dim)),
            KEYS=64 if q.itemsize == 2 else 32,
            num_warps=4,
            num_stages=2,
        )
    if num_parts == 1:
        return out[0], lse[0]
    merged, merged_lse = merge_rows(out, lse)
    return merged.to(q.dtype), merged_lse


def _tile_tokens(num_tokens: int, num_reqs: int, group: int) -> int:
    """Return the number of tokens of a tile, about the number of a request's. There are few sizes, because a kernel is
    compiled for each. In steps with prompts most rows of the block table may be padding, so no mean is taken.
    """
    most = max(1, _TILE_ROWS // group)
    mean = num_tokens if num_tokens > _MOST_DECODES else num_tokens // max(1, num_reqs)
    return min(most, 1 if mean < 2 else 4 if mean < 16 else _TILE_ROWS)


def _num_parts(num_programs: int) -> int:
    """Return the parts into which keys are cut so that programs fill a GPU, one of few numbers like `_tile_tokens`."""
    wanted = _PROGRAMS // max(1, num_programs)
    return 1 if wanted < 2 else 4 if wanted < 16 else 16
