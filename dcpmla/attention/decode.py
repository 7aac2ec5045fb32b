"""Decode: each rank computes attention of all heads of its DCP group over the tokens that it caches; then the ranks'
results are merged.

Decodes wait for other ranks twice: to gather queries, and to merge results. No rank waits for another's writes to the
cache, because each attends only to rows that it has written.
"""

import torch
from torch import Tensor

from dcpmla.attention.backends import DECODE_BACKENDS, select_backend
from dcpmla.attention.calls import DecodeCall, Queries, split_queries
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.attention.step.metadata import DecodeMetadata
from dcpmla.comm.exchange import Exchange, Mailbox
from dcpmla.operators import import_kernel, operator
from dcpmla.parallel.quantized import BlockFp8, unpack


def mla_decode(
    q: Queries,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int = 512,
    *,
    request_index: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 1,
    workspace: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend with absorbed queries to a paged latent cache on one rank.

    Args:
        q: Query tokens [T, H, kv_lora_rank + rope], request by request: [q_nope W_UK | q_pe rotated]
            (`projections.absorb_query`), or a tuple of the two. DeepSeek-V4's queries have no rope part: its cache rows
            are "shared keys", each the key and the value of a token at once.
        kv_cache: Cached rows [num_blocks, block_size, kv_lora_rank + rope] in q's dtype, or in an 8-bit format
            (`cache/formats.py`). Shared keys are in q's dtype, or in pages [num_pages, 64, row_width] of fp8_ds_mla
            (`cache/shared_format.py`), which are addressed row by row.
        block_table: Block ids of each request [num_rows, max_blocks], int32, or row numbers where the cache is
            addressed by row; entries after its last block are not read.
        seq_lens: Number of tokens that each query token sees [T], int32: the first tokens of its request in this cache,
            which under DCP stores only this rank's tokens. Within a request the numbers must not decrease. The tensor
            must not be written while a kernel runs.
        scale: Softmax scale, positive.
        kv_lora_rank: Width of the latent, which is the value.
        request_index: Row of block_table of each segment [num_segments], int32. A segment is what a kernel treats as
            one request: a request, or some of a long one's query tokens; segments of one request have the same row. If
            None, segment i has row i.
        query_start_loc: First query token of each segment, and the end [num_segments + 1], int32; None when each has
            max_query_len query tokens. Rows of q after the last segment are padding; their results are undefined.
        max_query_len: Largest number of query tokens of a segment.
        workspace: Memory from `decode_workspace` for kernels that split a request over programs; consecutive calls may
            share it. None allocates it.
        kv_scale, q_scale: Scales of an fp8 cache and of e4m3 queries, float32 of one element; else None.
        dtype: Dtype of the output; None takes q's. Required where q is e4m3.
        backend: Name of a backend; "auto" takes the first of `backends.DECODE_BACKENDS` that can run the call.
    Returns:
        out [T, H, kv_lora_rank], lse [T, H] float32 natural log; (0, -inf) for a query that sees no token.
    Raises:
        ValueError: Shapes, devices, dtypes or scales do not match, numbers are not int32 or not contiguous, scale is
            not positive, workspace does not come from `decode_workspace`, or the backend does not exist or cannot run
            the call.
    Source: DeepSeek-V2, section 2.1 (the up-projections absorbed into query and output).
    """
    q, q_pe = split_queries(q, kv_lora_rank)
    call = DecodeCall(
        q,
        q_pe,
        kv_cache,
        block_table,
        seq_lens,
        scale,
        kv_lora_rank,
        request_index=request_index,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        workspace=workspace,
        kv_scale=kv_scale,
        q_scale=q_scale,
        dtype=dtype,
        backend=backend,
    )
    return run_call(call.checked(), None)


def dcp_mla_decode(
    q: Queries,
    kv_cache: Tensor,
    decode: DecodeMetadata,
    scale: float,
    exchange: Exchange,
    kv_lora_rank: int = 512,
    *,
    q_is_replicated: bool = False,
    w_uv: Tensor | BlockFp8 | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend as `mla_decode`, which documents most arguments, to a cache sharded over the DCP group. Collective.

    Args:
        q: Queries of this rank's heads [T, h, kv_lora_rank + rope]. A tuple is concatenated for the gather.
        decode: Metadata of the step, with this rank's lengths.
        exchange: Exchange of the DCP group.
        q_is_replicated: Whether q has the heads of all W ranks [T, W h, ...], in rank order; nothing is gathered then.
        w_uv: W_UV of all ranks' heads [W h, V, kv_lora_rank], equal on all ranks, or None on all. If given, values
            [.., V] are exchanged and merged instead of latents [.., kv_lora_rank].
    Returns:
        out [T, h, kv_lora_rank], or [T, h, V] with w_uv, and lse [T, h] float32: this rank's heads over all ranks'
        tokens.
    Raises:
        ValueError: The reasons that `mla_decode` documents.
    """
    if not q_is_replicated:
        q = exchange.gather_heads(q if isinstance(q, Tensor) else torch.cat(q, -1))
    call = call_of(q, kv_cache, decode, scale, kv_lora_rank)
    call = call._replace(kv_scale=kv_scale, q_scale=q_scale, dtype=dtype, backend=backend).checked()
    # A kernel sends rows itself (`Mailbox`) only for segments of one token without padding: owners wait for every row,
    # and kernels skip rows after the last segment.
    if w_uv is None and call.has_one_token_each:
        mailbox = exchange.mailbox(len(call.q), call.q.shape[1], kv_lora_rank, call.out_dtype)
        if mailbox is not None:
            return run_call(call, mailbox)
    out, lse = run_call(call, None)
    if w_uv is not None:
        codes, scales = unpack(w_uv)
        out = project_values(ValueProjection(out, codes, scales)).unflatten(1, codes.shape[:2])
    return exchange.combine(out, lse)


def call_of(q: Queries, kv_cache: Tensor, decode: DecodeMetadata, scale: float, kv_lora_rank: int) -> DecodeCall:
    """Return the call of a step's decodes, without scales and other options."""
    return DecodeCall(
        *split_queries(q, kv_lora_rank),
        kv_cache,
        decode.block_table,
        decode.local_seq_lens,
        scale,
        kv_lora_rank,
        decode.request_index,
        decode.query_start_loc,
        decode.max_query_len,
        decode.workspace,
    )


def _empty_output(call: DecodeCall, mailbox: Mailbox | None) -> tuple[Tensor, Tensor]:
    return call.new_output(1 if mailbox is None else mailbox.addresses.shape[0])


@operator("mla_decode", fake=_empty_output, mutates_args=("workspace", "state"))
def run_call(call: DecodeCall, mailbox: Mailbox | None) -> tuple[Tensor, Tensor]:
    """Run a checked call; with a mailbox, return this rank's heads, merged over the ranks.

    A mailbox takes rows in the output's dtype; with dcp_exchange_dtype fp8 there is none.
    """
    chosen = select_backend(DECODE_BACKENDS, call)
    if mailbox is None:
        return chosen.run(call)
    if chosen.sends_rows:
        return chosen.run(call, mailbox)
    return import_kernel("dcpmla.comm.direct_ops:combine")(*chosen.run(call), mailbox, False)
