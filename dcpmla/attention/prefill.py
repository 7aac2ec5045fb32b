"""Prefill: new tokens attend to each other, then to their context chunk by chunk, each rank for its own heads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.backends import PREFILL_BACKENDS, select_backend
from dcpmla.attention.calls import PrefillCall, Segments
from dcpmla.attention.sparse.mask import selection_mask
from dcpmla.attention.step.chunks import ContextChunk, PrefillMetadata
from dcpmla.cache.formats import check_kv_scale, is_quantized, rope_dim_of, to_latents
from dcpmla.comm.exchange import Exchange
from dcpmla.merge import merge_partials
from dcpmla.operators import is_on_gpu, operator

UpProjection = Callable[[Tensor], Tensor]  # kv_c [S, L] -> [S, h (P + V)], each head's k_nope, then its values


def dcp_mla_prefill(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    w_kv_b: Tensor | UpProjection,
    prefill: PrefillMetadata,
    scale: float,
    exchange: Exchange,
    kv_scale: Tensor | None = None,
    selected_positions: Tensor | None = None,
    kv: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend from prefill tokens to each other and to a context cached on all ranks of the DCP group. Collective.

    No merge across ranks is needed: after the gather each rank has all keys for its own heads. The first chunk is
    gathered while new tokens attend to each other, every other chunk during the attention to the chunk before it. Rows
    of 8-bit caches are dequantized after the gather, so that fewer bytes travel.
    Latents of new tokens are used as they are before the cache rounds them. In sparse attention a mask, made for the
    new tokens and for each chunk, excludes keys that a token did not select.

    Args:
        q: [T, h, P + R], rotated.
        kv_c, k_pe: New tokens' own latents: [T, L] after its norm, [T, R] rotated.
        kv_cache: Cache [num_blocks, block_size, width] of this rank's tokens, in a format of `dcpmla.cache.formats`.
        w_kv_b: Up-projection [h, P + V, L] of this rank's heads, each head's W_UK stacked on its W_UV; or a function
            that applies it.
        kv_scale: Scale of an fp8 cache, float32 of one element; None for other caches.
        selected_positions: Positions of the tokens that each token selected [T, topk] int32
            (`SelectedTokens.positions`), none after its own; None if each token attends to all up to itself.
        kv: Keys' nope part and values of the new tokens [T, h (P + V)], if they are projected already.
        backend: Name of a backend; "auto" takes the first of `backends.PREFILL_BACKENDS` that supports the call.
    Returns:
        out [T, h, V] in the dtype of q, lse [T, h] float32.
    Raises:
        ValueError: A scale is missing or superfluous, selected_positions has another number of tokens, or the backend
            does not exist or cannot run the call.
    """
    check_kv_scale(kv_cache.dtype, kv_scale)
    if selected_positions is not None and selected_positions.shape[0] != q.shape[0]:
        raise ValueError(
            f"selected_positions has {selected_positions.shape[0]} rows; expected one for each of the {q.shape[0]} "
            f"tokens of q"
        )
    queries, chunks = prefill.queries, prefill.context_chunks

    def attend(
        kv_c: Tensor, k_pe: Tensor, keys: Segments, first_position: Tensor, causal: bool, kv: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        # Keys and values, the largest tensors of a step, are freed after this call.
        k_nope, v = up_project(kv_c, w_kv_b, q.shape[1], q.shape[-1] - k_pe.shape[-1], kv)
        mask = None
        if selected_positions is not None:
            mask = selection_mask(selected_positions, queries.start_loc, first_position, max(keys.lens))
        window = prefill.window if causal and mask is not None else None
        return mha_prefill(PrefillCall(q, k_nope, k_pe, v, *queries, *keys, scale, causal, mask, backend, window))

    gather = ContextGather(exchange, chunks, lambda chunk: read_cache_rows(kv_cache, chunk.local_slots))
    out, lse = attend(kv_c, k_pe, queries, prefill.first_position, causal=True, kv=kv)
    for index, chunk in enumerate(chunks):
        latents = latents_of(gather.take(), kv_c.shape[-1], kv_scale, q.dtype)
        gather.start()
        context_kv_c, context_k_pe = latents.split([kv_c.shape[-1], k_pe.shape[-1]], -1)
        # Merged results stay in float32, or wider, until the last chunk.
        dtype = q.dtype if index == len(chunks) - 1 else torch.promote_types(q.dtype, torch.float32)
        out, lse = merge_part(
            out, lse, *attend(context_kv_c, context_k_pe, chunk.keys, chunk.first_position, causal=False), dtype
        )
        del latents, context_kv_c, context_k_pe  # frees them before the next chunk: at most two chunks exist at a time
    return out, lse


class ContextGather:
    """The rows of a step's chunks from all ranks of the DCP group; the first gather starts at once. Collective.

    Args:
        read: Function that returns this rank's rows of a chunk.
    """

    def __init__(
        self, exchange: Exchange, chunks: Sequence[ContextChunk], read: Callable[[ContextChunk], Tensor]
    ) -> None:
        self._exchange, self._chunks, self._read, self._num_started = exchange, chunks, read, 0
        self._started: list[Callable[[], Tensor]] = []  # at most one
        self.start()

    def start(self) -> None:
        """Start to gather the next chunk, if there is one."""
        for chunk in self._chunks[self._num_started : self._num_started + 1]:
            self._started.append(self._exchange.start_context(self._read(chunk), chunk.order, chunk.tokens))
        self._num_started += 1

    def take(self) -> Tensor:
        """Return the rows of the chunk that is being gathered."""
        # The gather's function may keep the unordered rows alive. pop drops the only reference to it, so that these
        # rows are freed before the next gather allocates its own.
        return self._started.pop()()


def latents_of(rows: Tensor, kv_lora_rank: int, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return cached rows as latents; rows of a plain cache are not copied."""
    return dequantize_rows(rows, kv_lora_rank, kv_scale, dtype) if is_quantized(rows.dtype) else rows.to(dtype)


@operator(
    "read_cache_rows",
    kernel="dcpmla.cache.kernels:read_cache_rows",
    fake=lambda kv_cache, slots: kv_cache.new_empty(slots.shape[0], kv_cache.shape[-1]),
    runs=is_on_gpu,
)
def read_cache_rows(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Return rows [N, width] of a layer's cache at slots [N] int64, as they are stored. A custom op."""
    return kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]]


@operator(
    "dequantize_rows",
    kernel="dcpmla.cache.kernels:dequantize_rows",
    fake=lambda rows, kv_lora_rank, _, dtype: rows.new_empty(
        rows.shape[0], kv_lora_rank + rope_dim_of(rows.shape[1], rows.dtype, kv_lora_rank), dtype=dtype
    ),
    runs=lambda rows, _rank, _scale, dtype: rows.is_cuda and dtype != torch.float64,
)
def dequantize_rows(rows: Tensor, kv_lora_rank: int, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize rows [N, width] of an 8-bit cache to latents [N, L + R] (`formats.to_latents`). A custom op."""
    return to_latents(rows, kv_lora_rank, kv_scale, dtype)


def up_project(
    kv_c: Tensor, w_kv_b: Tensor | UpProjection, num_heads: int, qk_nope_head_dim: int, kv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Project latents to the nope part of keys and to values, for this rank's heads.

    Args:
        kv_c: [S, L].
        w_kv_b: Up-projection [h, P + V, L] with h = num_heads and P = qk_nope_head_dim; or a function that applies it.
        kv: Projected latents [S, h (P + V)]; None to project them.
    Returns:
        k_nope [S, h, P] and v [S, h, V], views of one [S, h, P + V].
    """
    if kv is None:
        kv = w_kv_b(kv_c) if callable(w_kv_b) else F.linear(kv_c, w_kv_b.flatten(0, 1))
    k_nope, v = kv.unflatten(-1, (num_heads, -1)).tensor_split((qk_nope_head_dim,), -1)
    return k_nope, v


def _empty_heads(call: PrefillCall) -> tuple[Tensor, Tensor]:
    q, v = call.q, call.v
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator("mha_prefill", fake=_empty_heads)
def mha_prefill(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Run a call on the first backend that supports it, or on the backend that it names."""
    return select_backend(PREFILL_BACKENDS, call).run(call)


@operator(
    "merge_part",
    kernel="dcpmla.attention.triton.merge:merge_part",
    fake=lambda out, lse, _part, _part_lse, dtype: (torch.empty_like(out, dtype=dtype), torch.empty_like(lse)),
    runs=is_on_gpu,
)
def merge_part(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge one more partial result into (out, lse): `merge_partials` of the two, in float32 at least.

    Args:
        out, part: Outputs [T, h, V] over disjoint keys, any float dtypes, contiguous. Rows with lse -inf are ignored.
        lse, part_lse: [T, h] float32, contiguous.
        dtype: Dtype of the merged output.
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    merged, lse = merge_partials(torch.stack([out.to(wide), part.to(wide)]), torch.stack([lse, part_lse]))
    return merged.to(dtype), lse
