"""Attention in a fixed order (`DCPConfig.deterministic`) over a cache that the ranks of a DCP group share.

Decode sums up each class of tiles by itself, then merges all classes by one tree, over the ranks too. Prefill sums up a
query's keys tile by tile from position 0. So all keys are tiles of one grid of positions: new tokens are gathered from
the cache with their context, chunk by chunk. Where no request has a context, they attend to their own latents, rounded
as in the cache.
"""

import torch
from torch import Tensor

from dcpmla.attention.calls import Queries
from dcpmla.attention.decode import call_of, run_call
from dcpmla.attention.obstacles import hopper_widths
from dcpmla.attention.ordered_reference import OrderedPrefillCall, Sums, new_sums, prefill_in_order, runs_kernel
from dcpmla.attention.prefill import ContextGather, UpProjection, latents_of, read_cache_rows, up_project
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import DecodeMetadata
from dcpmla.cache.formats import check_kv_scale, to_cache_rows, to_latents
from dcpmla.comm.exchange import Exchange
from dcpmla.operators import import_kernel, nothing, operator


def dcp_mla_decode_in_order(
    q: Queries,
    kv_cache: Tensor,
    decode: DecodeMetadata,
    scale: float,
    exchange: Exchange,
    kv_lora_rank: int,
    num_classes: int,
    q_is_replicated: bool,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `dcp_mla_decode`, but in a fixed order, whatever the other tokens and the number of ranks. Collective.

    Args:
        q: As in `dcp_mla_decode`, of 16 bits or more.
        num_classes: Number of classes of tiles in this rank's cache (`DCPConfig.num_own_classes`).
    Returns:
        out [T, h, kv_lora_rank] in the dtype of q, rounded once, and lse [T, h]: this rank's heads over all ranks'
        tokens.
    Raises:
        ValueError: The reasons that `mla_decode` documents.
    """
    if not q_is_replicated:
        q = exchange.gather_heads(q if isinstance(q, Tensor) else torch.cat(q, -1))
    call = call_of(q, kv_cache, decode, scale, kv_lora_rank)
    call = call._replace(workspace=None, kv_scale=kv_scale, num_classes=num_classes)
    out, lse = exchange.combine(*run_call(call.checked(), None))
    return out.to(call.q.dtype), lse


def dcp_mla_prefill_in_order(
    q: Tensor,
    kv_cache: Tensor,
    w_kv_b: Tensor | UpProjection,
    prefill: PrefillMetadata,
    widths: tuple[int, int],
    scale: float,
    exchange: Exchange,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `dcp_mla_prefill`, but in a fixed order, whatever the chunks and the other requests. Collective.

    A chunk is gathered while the one before it is used.

    Args:
        q, kv_cache, w_kv_b, scale, exchange, kv_scale: As in `dcp_mla_prefill`; the new tokens are in the cache.
        prefill: Metadata with chunks, which include the new tokens (`lay_out_prefills` with dcp.deterministic).
        widths: Widths of the latent, L, and of the rope part, R.
    Returns:
        out [T, h, V] in the dtype of q, lse [T, h] float32.
    Raises:
        ValueError: A scale is missing or superfluous.
    """
    check_kv_scale(kv_cache.dtype, kv_scale)
    chunks, num_heads, rope = prefill.context_chunks, q.shape[1], widths[1]

    out, sums = None, None
    lse, queries = q.new_empty(q.shape[:2], dtype=torch.float32), (prefill.queries.start_loc, prefill.first_position)
    gather = ContextGather(exchange, chunks, lambda chunk: read_cache_rows(kv_cache, chunk.local_slots))
    for chunk in chunks:
        latents = latents_of(gather.take(), widths[0], kv_scale, q.dtype)
        gather.start()
        kv_c, k_pe = latents.split(list(widths), -1)
        k_nope, v = up_project(kv_c, w_kv_b, num_heads, q.shape[-1] - rope)
        if out is None:
            out, sums = q.new_empty(*q.shape[:2], v.shape[-1]), _sums_for(q, v, len(chunks))
        assert sums is not None
        keys = chunk.keys.start_loc, chunk.first_position
        call = OrderedPrefillCall(q, k_nope, k_pe, v, *queries, *keys, scale)
        attend_to_chunk(call, out, lse, sums)
        del latents, kv_c, k_pe, k_nope, v, call  # frees them: at most two chunks exist at a time
    assert out is not None
    return out, lse


def attend_to_own(q: Tensor, kv: Tensor, k_pe: Tensor, prefill: PrefillMetadata, scale: float, out: Tensor) -> None:
    """Attend from prompts without contexts to their own tokens: `dcp_mla_prefill_in_order` of one chunk, ungathered.

    Args:
        q: Queries [T, h, P + R], rotated.
        kv, k_pe: Projected latents [T, h (P + V)], and rope parts [T, R], both of latents as the cache holds them.
        prefill: Metadata without chunks.
        scale: Softmax scale.
        out: Output [T, h, V] in the dtype of q, contiguous. Rows of no request stay as they are.
    """
    num_heads, starts = q.shape[1], (prefill.queries.start_loc, prefill.first_position)
    k_nope, v = kv.unflatten(-1, (num_heads, -1)).split([kv.shape[-1] // num_heads - out.shape[-1], out.shape[-1]], -1)
    lse, call = q.new_empty(q.shape[:2], dtype=torch.float32), (q, k_nope, k_pe, v, *starts, *starts, scale)
    attend_to_chunk(OrderedPrefillCall(*call), out, lse, _sums_for(q, v, num_chunks=1))


def _sums_for(q: Tensor, v: Tensor, num_chunks: int) -> Sums:
    """Return sums for queries over all chunks; without rows for one chunk on a GPU, whose kernel stores none."""
    num_rows = 0 if num_chunks == 1 and runs_kernel(q) else q.shape[0]
    empty = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
    return new_sums((num_rows, q.shape[1]), v.shape[-1], empty)


@operator("ordered_prefill", fake=nothing, mutates_args=("out", "lse", "acc", "peak", "total"))
def attend_to_chunk(call: OrderedPrefillCall, out: Tensor, lse: Tensor, sums: Sums) -> None:
    """Add a chunk of keys to each query's sums, and write results of requests that end in it (`prefill_in_order`)."""
    if not runs_kernel(call.q):
        prefill_in_order(call, out, lse, sums)
        return
    # A choice by anything that changes from step to step would change bits.
    folder = "triton" if hopper_widths(call.q, call.k_nope, call.k_pe, call.v) else "hopper"
    import_kernel(f"dcpmla.attention.{folder}.ordered_prefill:run")(call, out, lse, sums)


@operator(
    "round_latents",
    kernel="dcpmla.cache.kernels:round_latents",
    fake=lambda latents, *_: latents.new_empty(latents.shape),
)
def round_latents(latents: Tensor, kv_lora_rank: int, storage: torch.dtype, kv_scale: Tensor | None) -> Tensor:
    """Return latents [N, L + R] as a cache of dtype `storage`, of 8 bits, would hold them. A custom op."""
    rows = to_cache_rows(latents[:, :kv_lora_rank], latents[:, kv_lora_rank:], storage, kv_scale)
    return to_latents(rows, kv_lora_rank, kv_scale, latents.dtype)
