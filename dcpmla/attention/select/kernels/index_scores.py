"""Triton kernel of the indexer's scores with its launcher; `attention/select/scores.py` specifies it.

A step multiplies a tile of keys with a tile of tokens. The steps of all tiles of tokens form one sequence that is cut
into equal parts, one for each program (stream-K): no length has to be known on the host, and a long request is the work
of many programs.

A pair's score does not depend on how many tokens a step takes: it is the sum of the same products in the same order.
Heads are on the same lanes, and multiplications are not fused with additions, because the compiler would decide that
for each size anew.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.select.calls import IndexQueries
from dcpmla.cache.formats import FP8
from dcpmla.cache.index_keys import check_index_cache

_KEYS = tl.constexpr(64)  # keys of a step: the rows of one product of a warpgroup
_STAGES = tl.constexpr(4)  # steps whose keys are on their way
_MAX_HEADS = 256  # heads of a step's tokens: the maximum width of one product
_QUERY_BYTES = 32_768  # bytes of a step's queries; leaves room for keys in the shared memory of any GPU
_PROGRAMS = 4  # per multiprocessor at a time


@triton.jit
def _lengths(token, seq_lens_ptr, local_seq_lens_ptr, num_tokens, topk):
    """Return the number of keys to score for each token: none if all are selected."""
    is_token = token < num_tokens
    is_scored = tl.load(seq_lens_ptr + token, mask=is_token, other=0) > topk
    return tl.load(local_seq_lens_ptr + token, mask=is_token & is_scored, other=0)


@triton.jit
def _find_blocks(table_ptr, step, num_keys, BLOCK_SIZE: tl.constexpr):
    """Look up the block of each of a step's keys; one block if a block holds all keys."""
    index = step * _KEYS
    if BLOCK_SIZE // _KEYS * _KEYS != BLOCK_SIZE:
        index += tl.arange(0, _KEYS)
    return tl.load(table_ptr + index // BLOCK_SIZE, mask=index < num_keys, other=0)


@triton.jit
def _score_keys(q, weights, out_ptr, cache, lengths, begin, end, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Compute steps [begin, end) over one request's keys.

    q is [TOKENS HEADS, COLUMNS]; cache is a pointer to the keys, the stride of blocks and a pointer to the request's
    block table; lengths [TOKENS] are 0 for tokens of other requests.
    """
    TOKENS: tl.constexpr = lengths.shape[0]
    cache_ptr, stride_block, table_ptr = cache
    key, column = tl.arange(0, _KEYS), tl.arange(0, q.shape[1])[None, :]
    longest = tl.max(lengths, 0)
    # Blocks are looked up one step ahead, so that all loads of keys and scales are pipelined.
    end = tl.minimum(end, tl.cdiv(longest, _KEYS))
    block = _find_blocks(table_ptr, begin, longest, BLOCK_SIZE)
    for step in tl.range(begin, end, num_stages=_STAGES):
        index = step * _KEYS + key
        offset = index % BLOCK_SIZE
        block_ptr = cache_ptr + block.to(tl.int64) * stride_block
        key_ptr = (block_ptr + offset * HEAD_DIM)[:, None] + column
        keys = tl.load(key_ptr) if q.shape[1] == HEAD_DIM else tl.load(key_ptr, mask=column < HEAD_DIM, other=0.0)
        products = tl.maximum(tl.dot(keys, tl.trans(q)), 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
        scores = tl.sum(tl.reshape(products, [_KEYS, TOKENS, q.shape[0] // TOKENS]), 2)
        if keys.dtype == tl.float8e4nv:
            scales = tl.load((block_ptr + BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True) + offset)
            scores *= scales[:, None]
        block = _find_blocks(table_ptr, step + 1, longest, BLOCK_SIZE)
        tl.store(out_ptr[None, :] + index[:, None], scores, mask=index[:, None] < lengths[None, :])


@triton.jit(
    do_not_specialize=["num_tokens", "topk", "stride_table"],
    do_not_specialize_on_alignment=["request_ptr", "seq_lens_ptr", "local_seq_lens_ptr"],
)
def scores_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    table_ptr,
    request_ptr,
    seq_lens_ptr,
    local_seq_lens_ptr,
    out_ptr,
    num_tokens,
    topk,
    stride_block,
    stride_table,
    stride_out,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Compute one program's part of the sequence of steps."""
    all_lengths = _lengths(tl.arange(0, TILES * TOKENS), seq_lens_ptr, local_seq_lens_ptr, num_tokens, topk)
    ends = tl.cumsum(tl.cdiv(tl.max(tl.reshape(all_lengths, [TILES, TOKENS]), 1), _KEYS), 0)
    num_steps = tl.max(ends, 0)
    size = tl.cdiv(num_steps, tl.num_programs(0))
    start = tl.program_id(0) * size
    end = tl.minimum(start + size, num_steps)

    tile_row, column = tl.arange(0, TOKENS * HEADS), tl.arange(0, COLUMNS)[None, :]
    while start < end:
        tile = tl.sum((ends <= start).to(tl.int32), 0)
        first = tl.max(tl.where(ends <= start, ends, 0), 0)  # the tile's first step
        stop = tl.minimum(end, tl.min(tl.where(ends > start, ends, num_steps), 0))

        token, head = tile * TOKENS + tile_row // HEADS, tile_row % HEADS
        row = token.to(tl.int64) * NUM_HEADS + head
        is_row = (token < num_tokens) & (head < NUM_HEADS)
        q = tl.load(q_ptr + row[:, None] * HEAD_DIM + column, mask=is_row[:, None] & (column < HEAD_DIM), other=0.0)
        weights = tl.load(weights_ptr + row, mask=is_row, other=0.0)

        token = tile * TOKENS + tl.arange(0, TOKENS)
        rows_ptr = out_ptr + token.to(tl.int64) * stride_out
        lengths = _lengths(token, seq_lens_ptr, local_seq_lens_ptr, num_tokens, topk)
        request = tl.load(request_ptr + token, mask=lengths > 0, other=-1)
        last = tl.max(request, 0)
        first_request = tl.min(tl.where(lengths > 0, request, last), 0)
        for each in range(first_request, last + 1):  # several where requests meet in a tile
            cache = (cache_ptr, stride_block, table_ptr + each * stride_table)
            own_lengths = tl.where(request == each, lengths, 0)
            _score_keys(q, weights, rows_ptr, cache, own_lengths, start - first, stop - first, HEAD_DIM, BLOCK_SIZE)
        start = stop


def index_scores(call: IndexQueries) -> Tensor:
    """Compute `scores.index_scores` in one launch.

    Raises:
        ValueError: The index cache has another format than the queries, or its blocks are not contiguous.
    """
    q, weights, index_cache, block_table, request, seq_lens, local_seq_lens, topk = call
    num_tokens, num_heads, head_dim = q.shape
    is_fp8 = q.dtype == FP8
    check_index_cache(index_cache, torch.uint8 if is_fp8 else q.dtype, head_dim)
    block_size = index_cache.shape[1]
    scores = call.new_scores()
    num_columns = scores.shape[1]
    if scores.numel() == 0:
        return scores
    heads = max(16, triton.next_power_of_2(num_heads))  # 16: the least that tl.dot takes
    columns = max(32 if is_fp8 else 16, triton.next_power_of_2(head_dim))
    most_heads = min(_MAX_HEADS, _QUERY_BYTES // (columns * q.element_size()))
    tokens_of_request = max(1, num_tokens // len(block_table))  # about as many neighbours share their keys
    tokens = max(1, min(most_heads // heads, triton.next_power_of_2(tokens_of_request)))
    num_tiles = triton.cdiv(num_tokens, tokens)
    most_programs = num_tiles * triton.cdiv(num_columns, _KEYS.value)
    scores_kernel[(min(most_programs, _PROGRAMS * _num_multiprocessors(q.device)),)](
        q.contiguous(),
        weights.contiguous(),
        index_cache.view(FP8) if is_fp8 else index_cache,
        block_table,
        request.contiguous(),
        seq_lens.contiguous(),
        local_seq_lens.contiguous(),
        scores,
        num_tokens,
        topk,
        index_cache.stride(0),
        block_table.stride(0),
        num_columns,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        BLOCK_SIZE=block_size,
        TILES=_most_tiles(num_tiles),
        TOKENS=tokens,
        HEADS=heads,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return scores


def _most_tiles(num_tiles: int) -> int:
    """Return a power of two that is no less. Each is a variant, so there are few of those whose lengths take a program
    no time.
    """
    return next((most for most in (1, 8, 64, 512) if num_tiles <= most), triton.next_power_of_2(num_tiles))


def _num_multiprocessors(device: torch.device) -> int:
    """Count the GPU's multiprocessors; without a GPU (Triton's interpreter), return a number that is quick to run."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
