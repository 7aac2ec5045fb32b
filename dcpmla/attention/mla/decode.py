"""Decode: each rank computes attention of all heads of its DCP group over the tokens that it caches; then the ranks'
results are merged.

Decodes wait for other ranks twice: to gather queries, and to merge results. No rank waits for another's writes to the
cache, because each attends only to rows that it has written.
"""

from typing import Any

from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, Queries, split_queries
from dcpmla.attention.backends.choice import DECODE_BACKENDS, select_backend
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.attention.step.metadata import DecodeMetadata
from dcpmla.comm.exchange import Exchange, Mailbox
from dcpmla.operators import import_kernel, operator
from dcpmla.parallel.formats import Quantized
from dcpmla.parallel.quantized import unpack


def mla_decode(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Attend with absorbed queries to a paged latent cache on one rank.

    Returns:
        out [T, H, kv_lora_rank], lse [T, H] float32 natural log; (0, -inf) for a query that sees no token.
    Raises:
        ValueError: Shapes, devices, dtypes or scales do not match, numbers are not int32 or not contiguous,
            softmax_scale is not positive, workspace does not come from `decode_workspace`, or the backend does not
            exist or cannot run the call.
    Source: DeepSeek-V2, section 2.1 (the up-projections absorbed into query and output).
    """
    return run_call(call.checked(), None)


def dcp_mla_decode(
    call: DecodeCall, exchange: Exchange, w_uv: Tensor | Quantized | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `mla_decode` to a cache sharded over the DCP group. Collective.

    Args:
        call: Call with the queries of all W ranks' heads, in rank order (`Exchange.gather_heads`), and with this rank's
            cache and lengths (`decode_call`).
        exchange: Exchange of the DCP group.
        w_uv: W_UV of all ranks' heads [W h, V, kv_lora_rank], equal on all ranks, or None on all. With it values
            [.., V] are exchanged and merged instead of latents [.., kv_lora_rank].
    Returns:
        out [T, h, kv_lora_rank], or [T, h, V] with w_uv, and lse [T, h] float32: this rank's heads over all ranks'
        tokens.
    Raises:
        ValueError: The reasons that `mla_decode` documents.
    """
    call, is_deterministic = call.checked(), call.num_tile_lanes is not None
    # A kernel sends rows itself (`Mailbox`) only for segments of one token without padding: owners wait for every row,
    # and kernels skip rows after the last segment.
    if w_uv is None and not is_deterministic and call.has_one_token_each:
        mailbox = exchange.mailbox(call.q.shape[0], call.q.shape[1], call.kv_lora_rank, call.out_dtype)
        if mailbox is not None:
            return run_call(call, mailbox)
    out, lse = run_call(call, None)
    if w_uv is not None:
        codes, scales = unpack(w_uv)
        out = project_values(ValueProjection(out, codes, scales)).unflatten(1, codes.shape[:2])
    out, lse = exchange.combine(out, lse)
    return (out.to(call.q.dtype) if is_deterministic else out), lse


def decode_call(
    q: Queries, kv_cache: Tensor, decode: DecodeMetadata, softmax_scale: float, kv_lora_rank: int, **options: Any
) -> DecodeCall:
    """Return the call of a step's decodes.

    Args:
        q: Queries [T, H, kv_lora_rank + rope], or their two parts.
        decode: Metadata of the step, with this rank's lengths.
        options: Scales and other fields of `DecodeCall`.
    Raises:
        ValueError: The queries' shapes do not match kv_lora_rank.
    """
    return DecodeCall(
        *split_queries(q, kv_lora_rank),
        kv_cache,
        decode.block_table,
        decode.local_seq_lens,
        softmax_scale,
        kv_lora_rank,
        decode.request_index,
        decode.query_start_loc,
        decode.max_query_len,
        decode.workspace,
        **options,
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
