"""The arguments of the operators between projections, cache and attention (`dcpmla.attention.projections`)."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.cache.formats import FP8
from dcpmla.parallel.quantized import empty_codes


class LatentWrite(NamedTuple):
    """A step's down-projection, and the cache that its latents are written into.

    Attributes:
        down: Fused down-projection [T, Lq + L + R]: q_c (Lq may be 0), kv_c, k_pe.
        kv_cache: [num_blocks, block_size, width] in one of the formats of `dcpmla.cache.formats`, written at the slots.
        slots: Slots [T] int64, -1 where another rank owns the token.
        q_weight, kv_weight: Weights of the norms, [Lq] or None, and [L].
        eps: Epsilon of the norms.
        kv_lora_scale: Factor of kv_c after its norm (LongCat).
        cos_sin: [T, R] float32 as in `apply_rope`; None leaves k_pe as it is.
        rope_interleaved: Layout of pairs, as in `apply_rope`.
        kv_scale: Scale of an fp8 cache (`formats.to_cache_rows`), float32 of one element; None for other caches.
        quantizes: Whether to return q_c quantized as well, bit for bit as `quantize_rows` does; Lq must then be a
            multiple of 128.
        k_pe_weight: Weight [R] of a norm of k_pe before it is rotated (dots3); None for no norm.
    """

    down: Tensor
    kv_cache: Tensor
    slots: Tensor
    q_weight: Tensor | None
    kv_weight: Tensor
    eps: float
    kv_lora_scale: float
    cos_sin: Tensor | None
    rope_interleaved: bool
    kv_scale: Tensor | None
    quantizes: bool = False
    k_pe_weight: Tensor | None = None

    def new_results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Allocate the results of `norm_rope_cache`."""
        (num_tokens, width), q_rank = self.down.shape, 0 if self.q_weight is None else self.q_weight.shape[0]
        q_c, latents = self.down.new_empty(num_tokens, q_rank), self.down.new_empty(num_tokens, width - q_rank)
        return q_c, latents, *empty_codes(q_c, self.quantizes)


class QueryAbsorption(NamedTuple):
    """Queries, and the W_UK that is absorbed into them.

    Attributes:
        q: [T, H, P + R], not rotated.
        w_uk: [H, P, L].
        cos_sin: [T, R] float32 as in `apply_rope`; None leaves q_pe as it is.
        rope_interleaved: Layout of pairs, as in `apply_rope`.
        q_scale: Scale that rounds the query to e4m3 (`formats.to_fp8`), float32 of one element; None keeps q's dtype.
        w_scales: Scales of a w_uk in e4m3, float32 [H, P / 128, L / 128].
        is_deterministic: Whether a row's bits depend on no other row and no other head (`parallel.fixed`).
    """

    q: Tensor
    w_uk: Tensor
    cos_sin: Tensor | None
    rope_interleaved: bool
    q_scale: Tensor | None
    w_scales: Tensor | None = None
    is_deterministic: bool = False

    def new_query(self) -> Tensor:
        """Allocate the query [T, H, L + R] of attention over latents."""
        (*shape, width), (_, nope, rank) = self.q.shape, self.w_uk.shape
        return self.q.new_empty(*shape, width - nope + rank, dtype=self.q.dtype if self.q_scale is None else FP8)


class ValueProjection(NamedTuple):
    """Attention over latents, before or after the merge, and the W_UV that turns it into values.

    Attributes:
        out: [T, H, L].
        w_uv: [H, V, L].
        w_scales: Scales of a w_uv in e4m3, float32 [H, V / 128, L / 128].
        is_deterministic: Same as in `QueryAbsorption`.
    """

    out: Tensor
    w_uv: Tensor
    w_scales: Tensor | None = None
    is_deterministic: bool = False

    def new_values(self) -> Tensor:
        """Allocate the values [T, H V]."""
        return self.out.new_empty(self.out.shape[0], self.w_uv.shape[0] * self.w_uv.shape[1])
