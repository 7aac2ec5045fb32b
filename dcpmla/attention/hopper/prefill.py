"""Multi-head attention of prefill tokens for Hopper GPUs; `reference.mha_prefill` specifies it.

A program computes a tile of one request's queries for one head (FlashAttention-3). One warp brings queries, keys and
values into shared memory by TMA; two groups of four warps, the consumers, attend from half of the queries each. A
consumer starts the scores of a tile of keys together with the product of the probabilities and values of the tile
before, and computes the softmax of the one while the tensor cores work on the other.

A mask of selected keys applies to every tile (`prefill_mask`). Without a mask nothing of it is compiled.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.hopper.pipeline import LOG2E
from dcpmla.attention.hopper.prefill_consumers import consume
from dcpmla.attention.hopper.prefill_pipeline import (
    KEYS,
    NOPE,
    QUERIES,
    ROPE,
    ROWS,
    VALUE,
    find_work,
    new_tiles,
    produce,
)
from dcpmla.attention.hopper.stage_ring import describe


@gluon.jit(do_not_specialize=["num_reqs", "num_heads", "num_words", "window"])
def prefill_kernel(
    q_nope_desc,
    q_pe_desc,
    k_nope_desc,
    k_pe_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    mask_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    num_reqs,
    num_heads,
    num_words,
    window,
    q_stride_head,
    k_stride_head,
    v_stride_head,
    scale_log2,
    IS_CAUSAL: gl.constexpr,
):
    """Compute one tile of queries of one head. The grid is (heads side by side, tiles, groups of heads).

    Args:
        q_nope_desc, .., v_desc: Rows [N, columns of all heads].
        mask_ptr: Words of the mask [T, num_words]; both are None without a mask.
        window: Number of last keys up to its own that a query may see, under a mask; None for all.
        q_stride_head, k_stride_head, v_stride_head: Columns from one head to the next.
        scale_log2: Softmax scale times log2(e).
    """
    buffers, barriers = new_tiles(v_desc.dtype)
    work = find_work(query_start_loc_ptr, key_start_loc_ptr, num_reqs, num_heads, window, IS_CAUSAL)
    descs = (q_nope_desc, q_pe_desc, k_nope_desc, k_pe_desc, v_desc)
    strides = (q_stride_head, k_stride_head, v_stride_head)
    gl.warp_specialize(
        [
            (consume, (0, buffers, barriers, out_ptr, lse_ptr, mask_ptr, num_words, num_heads, scale_log2, work)),
            (consume, (1, buffers, barriers, out_ptr, lse_ptr, mask_ptr, num_words, num_heads, scale_log2, work)),
            (produce, (descs, strides, buffers, barriers, work, False)),
        ],
        [4, 1],
        [240, 24],
    )


def run(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Compute a `PrefillCall` in one launch, without a host sync, for the calls that `backends` admits.

    Source: FlashAttention-3.
    """
    q, queries = call.q, call.queries
    num_tokens, num_heads, _ = q.shape
    out = q.new_empty(num_tokens, num_heads, VALUE.value)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return out, lse
    num_reqs = len(queries.start_loc) - 1
    # Programs that read the same keys are neighbours, which takes up to 5 % less time where power is the limit. Under
    # a causal bound programs of the last head alone would leave multiprocessors idle.
    side_by_side = 2 if call.causal else 1
    grid = side_by_side, num_tokens // QUERIES.value + num_reqs, triton.cdiv(num_heads, side_by_side)
    heads = heads_side_by_side(q)
    prefill_kernel[grid](
        describe(heads, ROWS.value, NOPE.value),
        describe(heads, ROWS.value, ROPE.value),
        describe(heads_side_by_side(call.k_nope), KEYS.value, NOPE.value),
        describe(call.k_pe, KEYS.value, ROPE.value),
        describe(heads_side_by_side(call.v), KEYS.value, VALUE.value),
        out,
        lse,
        call.mask,
        queries.start_loc,
        call.keys.start_loc,
        num_reqs,
        num_heads,
        None if call.mask is None else call.mask.shape[1],
        call.window,
        q.stride(1),
        call.k_nope.stride(1),
        call.v.stride(1),
        call.softmax_scale * LOG2E.value,
        IS_CAUSAL=call.causal,
        num_warps=4,
    )
    return out, lse


def heads_side_by_side(rows: Tensor) -> Tensor:
    """Return rows [N, h, D] as a matrix of the columns of all heads, with the columns between them."""
    num_heads, width = rows.shape[1:]
    return rows.as_strided((len(rows), (num_heads - 1) * rows.stride(1) + width), (rows.stride(0), 1))
