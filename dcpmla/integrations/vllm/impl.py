"""The attention of one of vLLM's MLA layers: decode, prefill, the cache write, the warm-up."""

import os
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call
from dcpmla.attention.mla.prefill import dcp_mla_prefill
from dcpmla.attention.projections import project_latents
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder
from dcpmla.cache.formats import FP8, write_latents
from dcpmla.comm.exchange import Exchange
from dcpmla.integrations.absorbed import TokenRange
from dcpmla.integrations.vllm.invariance import is_batch_invariant
from dcpmla.integrations.vllm.names import (
    UNUSED_MEMORY,
    MLAAttention,
    MLACommonImpl,
    get_current_vllm_config,
    split_kv_b_proj,
)
from dcpmla.integrations.warm_up import LayerSizes, warm_up


class DCPMLAImpl(MLACommonImpl):
    """The attention that vLLM's `MLAAttention` calls. The metadata builder sets the attributes before the first step.

    Attributes:
        exchange: Exchange of the DCP group.
        num_tile_lanes: Number of lanes of tiles in this rank's cache (`DCPConfig.num_own_lanes`), None for sums in any
            order.

    Raises:
        ValueError: The layer or the job asks for an unsupported feature.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    lse_base_on_e = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
    exchange: Exchange
    num_tile_lanes: int | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _check(get_current_vllm_config().parallel_config, options)
        for name in UNUSED_MEMORY:  # vLLM's manager of the exchange, made after this, allocates it
            os.environ.setdefault(name, "0")
        if is_batch_invariant():
            self.supports_quant_query_input = False  # attention in a fixed order takes queries of 16 bits or more
        self.dtype = torch.get_default_dtype()
        self.w_kv_b: Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take over W_UK and W_UV: vLLM's tensor, or the values of a quantized one."""
        self.dtype, self.w_kv_b = act_dtype, None
        weight = getattr(self.kv_b_proj, "weight", None)  # packed values have other names
        if weight is None or weight.dtype != act_dtype:
            sizes = self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim, self.v_head_dim
            self.w_kv_b = (
                torch.cat(split_kv_b_proj(self.kv_b_proj, act_dtype, *sizes), -1).permute(1, 2, 0).contiguous()
            )

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend with absorbed queries of decodes and short prefills: this rank's heads, or all ranks' heads
        (--dcp-q-replicate).

        Returns:
            out [T, h, L] and lse [T, h] of this rank's heads over all ranks' tokens.
        """
        return self.attend_in_parts(q, kv_c_and_k_pe_cache, attn_metadata.decode.parts, layer)

    def attend_in_parts(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, parts: Sequence[TokenRange], layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend as `forward_mqa` does in one call of the kernel for each part. Collective."""
        if len(parts) == 1:
            return self._decode(q, kv_cache, parts[0][1], layer)
        num_tokens = parts[-1][0].stop
        out = kv_cache.new_empty(num_tokens, self.num_heads, self.kv_lora_rank, dtype=self.dtype)
        lse = out.new_empty(out.shape[:2], dtype=torch.float32)
        for tokens, step in parts:
            rows = q[tokens] if isinstance(q, Tensor) else (q[0][tokens], q[1][tokens])
            out[tokens], lse[tokens] = self._decode(rows, kv_cache, step, layer)
        return out, lse

    def _decode(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, step: DecodeMetadata, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend as `forward_mqa` in one call of the kernel. Collective."""
        if isinstance(q, tuple) and self.qk_rope_head_dim == 0:
            q = q[0]
        is_fp8 = isinstance(q, Tensor) and q.dtype == FP8
        if isinstance(q, Tensor) and q.shape[1] == self.num_heads:  # two parts have nothing to gather
            q = self.exchange.gather_heads(q)
        call = decode_call(
            q,
            kv_cache,
            step,
            self.scale,
            self.kv_lora_rank,
            kv_scale=layer._k_scale if kv_cache.dtype == FP8 else None,
            q_scale=layer._q_scale if is_fp8 else None,
            dtype=self.dtype if is_fp8 else None,
            num_tile_lanes=self.num_tile_lanes,
        )
        return dcp_mla_decode(call, self.exchange)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend from prefills to themselves and to their cached context: fills output [T, h V]."""
        if output_scale is not None:
            raise ValueError("output_scale is given; the attention of prefills does not quantize its output")
        w_kv_b = self.w_kv_b
        if w_kv_b is None:
            w_kv_b = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        out, _ = dcp_mla_prefill(
            q,
            kv_c_normed,
            k_pe.squeeze(1),
            kv_c_and_k_pe_cache,
            partial(project_latents, w_kv_b=w_kv_b, is_deterministic=False),
            attn_metadata.prefill.step,
            self.scale,
            self.exchange,
            k_scale if kv_c_and_k_pe_cache.dtype == FP8 else None,
            self.selected_positions(attn_metadata, len(q)),
        )
        output.copy_(out.flatten(1))

    def selected_positions(self, attn_metadata: Any, num_tokens: int) -> Tensor | None:
        """Return the positions that num_tokens tokens of prefills selected; None, because they attend to all."""
        return None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *more: Any,
        **named: Any,
    ) -> None:
        """Write this rank's latents. On a GPU vLLM's kernel does it."""
        if kv_cache.is_cuda:
            known = kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
            super().do_kv_cache_update(*known, *more, **named)
        elif kv_cache.numel():
            is_fp8 = kv_cache_dtype.startswith("fp8")
            rows = len(slot_mapping)
            write_latents(
                kv_cache.view(FP8) if is_fp8 else kv_cache,
                kv_c_normed[:rows],
                k_pe[:rows].squeeze(1),
                slot_mapping,
                k_scale if is_fp8 else None,
            )

    def warm_up(
        self, layer: Any, cache_dtype: torch.dtype, steps: StepBuilder, workspace: Tensor | None, *sizes: int
    ) -> None:
        """Attend once in steps of every kind. Collective.

        Args:
            layer: Layer of this attention in vLLM.
            cache_dtype: Format of its cache; e4m3 for fp8, which vLLM declares as bytes, and bytes for fp8_ds_mla.
            steps, workspace, sizes: Arguments of `integrations.warm_up`, from `steps` on.
        """
        is_common = isinstance(layer, MLAAttention)  # Kimi-K3's layer has whole queries and prefills by itself

        def decode(q: Tensor, cache: Tensor, step: DecodeMetadata) -> None:
            queries: Any = q
            if cache.dtype == FP8 and self.supports_quant_query_input:
                queries = q.to(FP8)
            elif layer.dcp_manager is None and is_common:
                queries = q.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
            self._decode(queries, cache, step, layer)

        def prefill(q: Tensor, kv_c: Tensor, k_pe: Tensor, cache: Tensor, step: PrefillMetadata) -> None:
            if not is_common or self.num_tile_lanes is not None:  # in a fixed order all requests are decodes
                return
            out = q.new_empty(len(q), self.num_heads * self.v_head_dim)
            for selects in sorted({False, self.is_sparse}):
                metadata = SimpleNamespace(prefill=SimpleNamespace(step=step), num_decode_tokens=0, selects=selects)
                self.forward_mha(q, kv_c, k_pe.unsqueeze(1), cache, metadata, layer._k_scale, out)

        widths = self.num_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim
        warm_up(decode, prefill, LayerSizes(*widths, self.dtype, cache_dtype), steps, workspace, *sizes)


def _check(parallel: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for what the backend cannot do; vLLM's own checks refuse sparse models."""
    if parallel.prefill_context_parallel_size > 1:
        raise ValueError("dcpmla's backend does no prefill context parallelism; choose another --attention-backend")
    if parallel.use_ubatching:
        raise ValueError("dcpmla's backend does no micro-batches (--enable-dbo); choose another --attention-backend")
    for name in ("sliding_window", "alibi_slopes", "logits_soft_cap"):
        if options.get(name):
            raise ValueError(f"dcpmla's backend has no {name}; choose another --attention-backend")
