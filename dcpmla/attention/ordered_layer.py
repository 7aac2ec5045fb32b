"""The MLA layer whose sums have a fixed order (`DCPConfig.deterministic`, docs/determinism.md)."""

from functools import partial

from torch import Tensor

from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.ordered import (
    attend_to_own,
    dcp_mla_decode_in_order,
    dcp_mla_prefill_in_order,
    round_latents,
)
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.placement import Placement, check_order
from dcpmla.attention.projections import MHAInputs, Tokens
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import DecodeMetadata, StepMetadata
from dcpmla.cache.formats import is_quantized
from dcpmla.cache.latent import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.fp8 import PlainRows


class OrderedAttention(MLAAttention):
    """`MLAAttention` whose rows have the same bits whatever the other tokens, the chunks and the DCP size.

    Args:
        config: Geometry of the whole layer, of dense MLA.
        placement: Same as in `MLAAttention`, with dcp.deterministic.
    Raises:
        ValueError: The config has features without a fixed order, or a reason that `MLAAttention` documents.
    """

    has_order = True

    def __init__(self, config: MLAConfig, placement: Placement) -> None:
        check_order(config, placement.dcp)
        super().__init__(config, placement)

    def latents_of(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> tuple[PlainRows, Tensor]:
        """Cache the step's latents, and return the query projection's input and the latents as the cache holds them."""
        q_c, latents = super().latents_of(hidden_states, kv_cache, step)
        if is_quantized(kv_cache.dtype):
            latents = round_latents(latents, self.config.kv_lora_rank, kv_cache.dtype, self.kv_scale)
        return q_c, latents

    def _attend(
        self,
        hidden_states: PlainRows,
        q_c: PlainRows,
        latents: Tensor,
        mha: MHAInputs | None,
        cache: LayerCache,
        output: OutputRows,
        step: StepMetadata,
    ) -> None:
        """Write the rows of `output` (`MLAAttention._attend`). Collective.

        In a graph of prompts without contexts (`StepMetadata.shares_rows`) decodes attend first, and all other rows
        become zeros. Then prompts overwrite their own rows.
        """
        if not step.shares_rows:
            super()._attend(hidden_states, q_c, latents, mha, cache, output, step)
            return
        assert step.prefill is not None
        tokens = Tokens(q_c, step.cos_sin, step.query_factor)
        values = OutputRows(step.num_tokens, self.w_uv, latents.dtype, None, is_deterministic=True)
        if step.decode is not None:
            self._decode(tokens.rows(slice(0, step.num_decode_tokens)), cache.latents, step.decode, values)
        values.pad()
        rows, mha = values.rows(), self.project_mha(tokens, latents)
        assert isinstance(rows, Tensor)
        self._attend_to_own(mha, latents, step.prefill, rows.unflatten(1, (self.num_heads, -1)))
        output.append(rows)

    def _prefill(
        self,
        tokens: Tokens,
        latents: Tensor,
        mha: MHAInputs,
        kv_cache: Tensor,
        prefill: PrefillMetadata,
        output: OutputRows,
    ) -> None:
        """Append the output of prefill tokens, whose own latents are `latents`. Collective."""
        if prefill.context_chunks:
            widths = self.config.kv_lora_rank, self.config.qk_rope_head_dim
            up_project, scale = partial(self.project_latents, w_kv_b=mha.w_kv_b), self.config.scale
            out, _ = dcp_mla_prefill_in_order(
                mha.q, kv_cache, up_project, prefill, widths, scale, self.exchange, self.kv_scale
            )
        else:
            out = mha.q.new_empty(*mha.q.shape[:2], self.config.v_head_dim)
            self._attend_to_own(mha, latents, prefill, out)
        output.append(out.flatten(1))

    def _attend_to_own(self, mha: MHAInputs, latents: Tensor, prefill: PrefillMetadata, out: Tensor) -> None:
        """Write the output of prompts without contexts into their rows of out [T, h, V]."""
        kv_c, k_pe = latents.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1)
        kv = self.project_latents(kv_c, mha.w_kv_b) if mha.kv is None else mha.kv
        attend_to_own(mha.q, kv, k_pe, prefill, self.config.scale, out)

    def _attend_absorbed(self, tokens: Tokens, kv_cache: Tensor, decode: DecodeMetadata, output: OutputRows) -> None:
        """Attend with absorbed queries to the latents of all ranks, apply W_UV, and append the output. Collective."""
        assert self.dcp.num_own_classes is not None
        q, _ = self.project_query(tokens, slice(0, self.q_heads.count))
        out, _ = dcp_mla_decode_in_order(
            self.absorb(q, self.w_uk, tokens.cos_sin, None),
            kv_cache,
            decode,
            self.config.scale,
            self.exchange,
            self.config.kv_lora_rank,
            self.dcp.num_own_classes,
            self.dcp.dcp_q_replicate,
            self.kv_scale,
        )
        output.project(out)
