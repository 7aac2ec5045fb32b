"""Prefill: new tokens attend to each other, then to their context chunk by chunk, each rank for its own heads."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import PrefillCall, Segments
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, select_backend
from dcpmla.attention.backends.mask import selection_mask
from dcpmla.attention.mla.deterministic import DeterministicResults
from dcpmla.attention.step.chunks import ContextChunk, PrefillMetadata
from dcpmla.cache.formats import check_kv_scale, is_quantized, rope_dim_of, to_latents
from dcpmla.comm.exchange import Exchange
from dcpmla.merge import merge_partials
from dcpmla.operators import is_on_gpu, operator

UpProjection = Callable[[Tensor], Tensor]


def dcp_mla_prefill(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    up_project: UpProjection,
    prefill: PrefillMetadata,
    softmax_scale: float,
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
    With prefill.is_deterministic a query's keys are summed up tile by tile from position 0, whatever the chunks and the
    other requests: chunks include the new tokens, which are in the cache. Where no request has a context, they attend
    to their own latents, which have to be rounded as in the cache (`round_latents`).

    Args:
        q: [T, h, P + R], rotated.
        kv_c, k_pe: New tokens' own latents: [T, L] after its norm, [T, R] rotated.
        kv_cache: Cache [num_blocks, block_size, width] of this rank's tokens, in a format of `dcpmla.cache.formats`.
        up_project: Function of kv_c [S, L] that returns the nope part of keys, then values, of each of this rank's
            heads [S, h (P + V)] (`project_latents` of a weight).
        kv_scale: Scale of an fp8 cache, float32 of one element; None for other caches.
        selected_positions: Positions of the tokens that each token selected [T, topk] int32
            (`SelectedTokens.positions`), none after its own; None if each token attends to all up to itself.
        kv: Keys' nope part and values of the new tokens [T, h (P + V)], if they are projected already.
        backend: Name of a backend; "auto" takes the first of `choice.PREFILL_BACKENDS` that supports the call.
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
    chunks, widths = prefill.context_chunks, [kv_c.shape[-1], k_pe.shape[-1]]

    def split_heads(kv: Tensor) -> Sequence[Tensor]:
        """Return k_nope [S, h, P] and v [S, h, V] as views."""
        return kv.unflatten(-1, (q.shape[1], -1)).tensor_split((q.shape[-1] - widths[1],), -1)

    gather = ContextGather(
        exchange,
        chunks,
        lambda chunk: read_cache_rows(kv_cache, chunk.local_slots),
        lambda rows: latents_of(rows, widths[0], kv_scale, q.dtype),
    )
    results: DeterministicResults | MergedResults
    if prefill.is_deterministic:
        results = DeterministicResults(q, prefill, softmax_scale)
    else:
        results = MergedResults(q, prefill, softmax_scale, selected_positions, backend)
    if not (prefill.is_deterministic and chunks):
        k_nope, v = split_heads(up_project(kv_c) if kv is None else kv)
        results.attend_to_own(k_nope, v, k_pe)
        del k_nope, v  # frees keys and values, the largest tensors of a step
    for number, latents in gather:
        context_kv_c, context_k_pe = latents.split(widths, -1)
        k_nope, v = split_heads(up_project(context_kv_c))
        results.attend_to_chunk(chunks[number], k_nope, v, context_k_pe)
        del latents, context_kv_c, context_k_pe, k_nope, v  # at most two chunks exist at a time
    return results.out, results.lse


class MergedResults:
    """Attention of prefill tokens to their own keys, then chunk by chunk to their contexts, merged by LSE.

    Args:
        q, softmax_scale, selected_positions, backend: Arguments of `dcp_mla_prefill`.
        prefill: Metadata of the tokens.
    Attributes:
        out, lse: Results so far [T, h, V] and [T, h], in float32 or wider until the last chunk.
    """

    out: Tensor
    lse: Tensor

    def __init__(
        self, q: Tensor, prefill: PrefillMetadata, softmax_scale: float, selected_positions: Tensor | None, backend: str
    ) -> None:
        self._q, self._prefill, self._softmax_scale, self._backend = q, prefill, softmax_scale, backend
        self._selected = selected_positions

    def attend_to_own(self, k_nope: Tensor, v: Tensor, k_pe: Tensor) -> None:
        """Attend to the new tokens up to each."""
        of_keys = self._prefill.queries, self._prefill.first_position
        self.out, self.lse = self._attend(k_nope, v, k_pe, *of_keys, causal=True)

    def attend_to_chunk(self, chunk: ContextChunk, k_nope: Tensor, v: Tensor, k_pe: Tensor) -> None:
        """Attend to a chunk of context, and merge."""
        part = self._attend(k_nope, v, k_pe, chunk.keys, chunk.first_position, causal=False)
        is_last, dtype = chunk is self._prefill.context_chunks[-1], self._q.dtype
        dtype = dtype if is_last else torch.promote_types(dtype, torch.float32)
        self.out, self.lse = merge_part(self.out, self.lse, *part, dtype)

    def _attend(
        self, k_nope: Tensor, v: Tensor, k_pe: Tensor, keys: Segments, first_position: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        queries, mask = self._prefill.queries, None
        if self._selected is not None:
            mask = selection_mask(self._selected, queries.start_loc, first_position, max(keys.lens))
        window = self._prefill.window if causal and mask is not None else None
        inputs = self._q, k_nope, k_pe, v, *queries, *keys, self._softmax_scale
        return mha_prefill(PrefillCall(*inputs, causal, mask, self._backend, window))


class ContextGather:
    """The rows of a step's chunks from all ranks of the DCP group; the first gather starts at once. Collective.

    Args:
        read: Function that returns this rank's rows of a chunk.
        convert: Function that returns the gathered rows as the caller takes them; None to take them as they are.
    """

    def __init__(
        self,
        exchange: Exchange,
        chunks: Sequence[ContextChunk],
        read: Callable[[ContextChunk], Tensor],
        convert: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._exchange, self._chunks, self._read, self._convert = exchange, chunks, read, convert
        self._started: list[Callable[[], Tensor]] = []  # at most one
        self._start(chunks[:1])

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each chunk's number and rows, while the next chunk is being gathered.

        The caller drops its rows before it asks for the next ones, so that at most two chunks exist at a time.
        """
        for number in range(len(self._chunks)):
            # The gather's function may keep the unordered rows alive. pop drops the only reference to it, so that these
            # rows are freed before the next gather allocates its own.
            rows = self._started.pop()()
            rows = rows if self._convert is None else self._convert(rows)
            self._start(self._chunks[number + 1 : number + 2])
            yield number, rows
            del rows

    def _start(self, chunks: Sequence[ContextChunk]) -> None:
        """Start to gather a chunk, if there is one."""
        for chunk in chunks:
            self._started.append(self._exchange.start_context(self._read(chunk), chunk.order, chunk.tokens))


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
