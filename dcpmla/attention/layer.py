"""The tensor-parallel MLA layer over a sharded latent cache. `MLAAttention.forward` reads top to bottom."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.checks import check_cache, check_selection, check_step
from dcpmla.attention.decode import dcp_mla_decode
from dcpmla.attention.output.quant import OutputQuant, QuantizedOutput, quantize_parts
from dcpmla.attention.prefill import dcp_mla_prefill
from dcpmla.attention.projections import absorb_query, finish_latents, project_values, rotate_query_
from dcpmla.attention.scales import calculate_scale_
from dcpmla.attention.sparse.indexer import Indexer
from dcpmla.attention.sparse.metadata import SelectedTokens
from dcpmla.attention.sparse.rows import prefers_mha, selected_rows
from dcpmla.attention.step import DecodeMetadata, PrefillMetadata, StepMetadata
from dcpmla.attention.weights import AttentionWeights
from dcpmla.cache.formats import check_device, is_quantized, row_width, storage_dtype
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.parallel.linear import Weight
from dcpmla.parallel.mesh import DCPMesh

# Decode tokens from which on dcp_project_before_merge pays: narrower rows against W_UV of all the group's heads to
# read. Measured with `direct` on 4 H200s: 32 tokens lost by it, 128 won.
PROJECT_FIRST_TOKENS = 64
# Tokens whose queries q_scale is calculated from: their maximum leaves little to find among more, 128 heads of them
# take 144 MiB.
_SCALED_TOKENS = 1024
# Prefill tokens that attend to selected rows at a time: absorbed queries of all the group's heads take 38 MB of 128 of
# them.
_ABSORBED_TOKENS = 256


class MLAAttention(AttentionWeights):
    """Multi-head Latent Attention: heads cut over the TP group, latent cache sharded over the DCP group.

    Dims: T tokens, h heads of this rank; P, R, V, L, Lq the nope, rope, value, latent and query-latent widths.

    With dcp.calculate_kv_scales the first step with prefills sets the scales. Nothing may be cached before: give
    prompts of one token as prefills then (`StepMetadata.build` with max_decode_query_len 0), as the engine does.

    With config.indexer, tokens that have more than topk before them attend to those that the indexer selects
    (sparse MLA).

    Args:
        config: geometry of the whole layer, before any cut.
        dcp: layout and format of the cache, bound of the context workspace, what decode exchanges.
        mesh: groups of this rank.
        exchange: how the DCP group moves rows, from `dcpmla.comm.select.select_exchange`.
        dtype, device: of the parameters; they hold nothing until `load_weights`.
        skip_topk: the layer has no indexer of its own, and attends to what a layer before it selected (IndexCache,
    GLM-5). Attributes:
        indexer: None in a dense layer, and with skip_topk.
        kv_scale, q_scale: float32 [1] of an fp8 cache, of fp8 queries (`dcpmla.attention.scales`); None without.
    Raises:
        ValueError: the heads do not divide by the TP size, dcp speaks of other sizes than the mesh has, or of a
            cache format that the layer or the GPU cannot have.
    Source: DeepSeek-V2, section 2.1; names of the projections as in DeepSeek's checkpoints.
    """

    def __init__(
        self,
        config: MLAConfig,
        dcp: DCPConfig,
        mesh: DCPMesh,
        exchange: Exchange,
        dtype: torch.dtype,
        device: torch.device | str,
        skip_topk: bool = False,
    ) -> None:
        cache_dtype = storage_dtype(dcp.kv_cache_dtype, dtype)
        cache_width = row_width(cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim)
        check_device(cache_dtype, torch.device(device))
        super().__init__(config, dcp, mesh, dtype, device)
        self.exchange, self.cache_dtype, self.cache_width = exchange, cache_dtype, cache_width
        self._lacks_scales = dcp.calculate_kv_scales
        has_indexer = config.indexer is not None and not skip_topk
        self.indexer = Indexer(config, dcp, mesh.dcp_rank, exchange, dtype, device) if has_indexer else None

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """As documented in `AttentionWeights`; an indexer's weights by names that start with "indexer."."""
        super().load_weights(weights)
        if self.indexer is not None:
            prefix = "indexer."
            self.indexer.load_weights(
                {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
            )

    def forward(
        self,
        hidden_states: Tensor,
        kv_cache: Tensor | None,
        metadata: StepMetadata | None,
        cos_sin: Tensor | None = None,
        query_factor: Tensor | None = None,
        index_cache: Tensor | None = None,
        selection: SelectedTokens | None = None,
    ) -> Tensor:
        """One step of a batch: decodes first, then prefills, then padding. Collective.

        Args:
            hidden_states: [T, hidden], the same on all TP ranks; T may exceed metadata.num_tokens (padding).
            kv_cache: [num_blocks, block_size, width] of this layer on this rank, in the format of
            dcp.kv_cache_dtype; written and read.
            metadata: the step's; None asks for a dummy run that only claims the memory of the largest context chunk.
            cos_sin: [num_tokens, R] float32 as in `apply_rope`, or None for a model without positions (NoPE).
            query_factor: [num_tokens] in the dtype of hidden_states, from `dcpmla.attention.rope.query_factor`:
                where the config has llama_4_scaling, and there alone.
            index_cache: [num_blocks, block_size, width] of a layer with an indexer (`dcpmla.cache.index_keys`);
            written and read.
            selection: of the step's num_tokens, for the layers of one pass that share it: written by a layer with
                an indexer, read by one without (skip_topk).
        Returns:
            [T, hidden], the same on all TP ranks; rows of padding carry no meaning.
        Raises:
            ValueError: shapes that do not belong together.
        """
        if metadata is None:
            return self._dummy_run(hidden_states)
        if kv_cache is None:
            raise ValueError(
                "kv_cache is None; a step with metadata needs this layer's [num_blocks, block_size, width]"
            )
        return self.o_proj(
            self.attend(hidden_states, kv_cache, metadata, cos_sin, query_factor, index_cache, selection)
        )

    def attend(
        self,
        hidden_states: Tensor,
        kv_cache: Tensor,
        metadata: StepMetadata,
        cos_sin: Tensor | None = None,
        query_factor: Tensor | None = None,
        index_cache: Tensor | None = None,
        selection: SelectedTokens | None = None,
        output_quant: OutputQuant | None = None,
    ) -> Tensor | QuantizedOutput:
        """All of `forward` but its last projection, for one that takes its input in 8 or 4 bits. Collective.

        Args:
            output_quant: how to quantize [T, h V]; None leaves it in the dtype of hidden_states.
        Returns:
            [T, h V], or its values and scales: the bytes that quantizing it would give. Rows of padding are zeros.
        Raises:
            ValueError: shapes that do not belong together; a head's width that output_quant does not take.
        """
        check_step(self.config, hidden_states, metadata, cos_sin, query_factor)
        check_cache(kv_cache, self.dcp, self.cache_dtype, self.cache_width)
        if self.config.indexer is not None:
            check_selection(self.config.indexer.topk, self.indexer is not None, kv_cache, metadata, selection)
        if self.indexer is not None:
            self.indexer.check_cache(index_cache, kv_cache.shape[0])
        decodes, prefills = slice(0, metadata.num_decode_tokens), slice(metadata.num_decode_tokens, metadata.num_tokens)
        if (
            self._lacks_scales and metadata.prefill is not None
        ):  # decodes alone may be of no token yet: where a graph is captured
            self._calculate_scales(
                hidden_states[prefills], kv_cache, _rows(cos_sin, prefills), _rows(query_factor, prefills)
            )
        q_c, latents = self._down_project(
            hidden_states[: metadata.num_tokens], kv_cache, metadata.slot_mapping, cos_sin
        )
        selected = self._select(hidden_states[: metadata.num_tokens], q_c, index_cache, metadata, cos_sin, selection)
        parts = []
        if metadata.decode is not None:
            cache, decode = kv_cache, metadata.decode
            if selected is not None:
                cache, decode = selected_rows(kv_cache, selected.rows(decodes), decode.workspace)
            q = self._project_query(q_c[decodes], _rows(query_factor, decodes), slice(0, self.q_heads.count))
            parts.append(self._decode(q, cache, decode, _rows(cos_sin, decodes)))
        if metadata.prefill is not None:
            if selected is None or prefers_mha(metadata.prefill, self.config):
                q = self._project_query(q_c[prefills], _rows(query_factor, prefills), self.q_heads.own)
                positions = None if selected is None else selected.positions[prefills]
                parts.append(
                    self._prefill(q, latents[prefills], kv_cache, metadata.prefill, _rows(cos_sin, prefills), positions)
                )
            else:
                parts += self._prefill_selected(q_c, kv_cache, prefills, cos_sin, query_factor, selected)
        if hidden_states.shape[0] > metadata.num_tokens:
            padding = hidden_states.shape[0] - metadata.num_tokens
            parts.append(hidden_states.new_zeros(padding, self.num_heads * self.config.v_head_dim))
        if output_quant is not None:
            return quantize_parts(parts, self.w_uv, output_quant)
        values = [project_values(part, self.w_uv) if part.ndim == 3 else part for part in parts]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _select(
        self,
        hidden_states: Tensor,
        q_c: Tensor,
        index_cache: Tensor | None,
        metadata: StepMetadata,
        cos_sin: Tensor | None,
        selection: SelectedTokens | None,
    ) -> SelectedTokens | None:
        """What each token attends to; None for all before it: in a dense layer, and where no token has more than topk.

        Collective.
        """
        sparse = metadata.sparse
        if self.config.indexer is None or sparse is None:
            return None
        is_long = sparse.max_seq_len > self.config.indexer.topk
        if self.indexer is not None:
            assert index_cache is not None
            if selection is None:
                selection = SelectedTokens.empty(
                    metadata.num_tokens if is_long else 0, self.config.indexer.topk, hidden_states.device
                )
            self.indexer(hidden_states, q_c, index_cache, metadata.slot_mapping, cos_sin, sparse, selection)
        return selection if is_long else None

    def _calculate_scales(
        self, hidden_states: Tensor, kv_cache: Tensor, cos_sin: Tensor | None, query_factor: Tensor | None
    ) -> None:
        """Set the scales by a prompt's tokens, before any of them is cached. Collective over the TP group."""
        assert self.kv_scale is not None
        self._lacks_scales = False
        nowhere = torch.full((hidden_states.shape[0],), -1, device=hidden_states.device)
        q_c, latents = self._down_project(hidden_states, kv_cache, nowhere, cos_sin)
        calculate_scale_(self.kv_scale, latents, self.mesh.tp_group)
        if self.q_scale is not None:
            some = slice(0, _SCALED_TOKENS)
            q = self._project_query(q_c[some], _rows(query_factor, some), self.q_heads.own)
            w_uk = self.w_kv_b[self.kv_heads.own, : self.config.qk_nope_head_dim]
            absorbed = absorb_query(q, w_uk, _rows(cos_sin, some), self.config.rope_interleaved, None)
            calculate_scale_(self.q_scale, absorbed, self.mesh.tp_group)

    def _down_project(
        self, hidden_states: Tensor, kv_cache: Tensor, slots: Tensor, cos_sin: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> what queries are projected from, q_c [T, Lq] or hidden_states, and latents [T, L + R] as they
        go to the cache.
        """
        config = self.config
        if config.q_lora_rank is None:
            down, q_weight = self.kv_a_proj(hidden_states), None
        else:
            down, q_weight = self.fused_qkv_a_proj(hidden_states), self.q_a_layernorm.weight
        q_c, latents = finish_latents(
            down,
            kv_cache,
            slots,
            q_weight,
            self.kv_a_layernorm.weight,
            config.rms_norm_eps,
            config.kv_lora_scale,
            cos_sin,
            config.rope_interleaved,
            self.kv_scale,
        )
        return hidden_states if config.q_lora_rank is None else q_c, latents

    def _project_query(self, q_c: Tensor, query_factor: Tensor | None, heads: slice) -> Tensor:
        """[T, Lq] or [T, hidden] -> [T, n, P + R] of n of the heads that this rank holds, not rotated."""
        weight = self.query_proj.weight.unflatten(0, (-1, self.config.qk_head_dim))[heads]
        q = nn.functional.linear(q_c, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
        return q if query_factor is None else q * query_factor[:, None, None]

    def _decode(self, q: Tensor, kv_cache: Tensor, decode: DecodeMetadata, cos_sin: Tensor | None) -> Tensor:
        """[T, h, P + R], or with dcp_q_replicate [T, W h, P + R], -> [T, h, L] for W_UV, or [T, h V] behind it."""
        project_first = self.dcp.dcp_project_before_merge and q.shape[0] >= PROJECT_FIRST_TOKENS
        out, _ = dcp_mla_decode(
            absorb_query(q, self.w_uk, cos_sin, self.config.rope_interleaved, self.q_scale),
            kv_cache,
            decode,
            self.config.scale,
            self.exchange,
            self.config.kv_lora_rank,
            q_is_replicated=self.dcp.dcp_q_replicate,
            w_uv=self.w_uv_group if project_first else None,
            kv_scale=self.kv_scale,
            q_scale=self.q_scale,
            dtype=q.dtype,
        )
        return out.flatten(1) if project_first else out

    def _prefill(
        self,
        q: Tensor,
        latents: Tensor,
        kv_cache: Tensor,
        prefill: PrefillMetadata,
        cos_sin: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """[T, h, P + R] and the tokens' own latents [T, L + R] -> [T, h V], over all positions or selected ones [T,
        topk].
        """
        if cos_sin is not None:
            rotate_query_(q, cos_sin, self.config.rope_interleaved)
        kv_c, k_pe = latents.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1)
        w_kv_b = self.w_kv_b[self.kv_heads.own]
        out, _ = dcp_mla_prefill(
            q, kv_c, k_pe, kv_cache, w_kv_b, prefill, self.config.scale, self.exchange, self.kv_scale, positions
        )
        return out.flatten(1)

    def _prefill_selected(
        self,
        q_c: Tensor,
        kv_cache: Tensor,
        prefills: slice,
        cos_sin: Tensor | None,
        query_factor: Tensor | None,
        selection: SelectedTokens,
    ) -> list[Tensor]:
        """Prefill tokens as decode has them, over selected rows of all ranks: parts as `_decode` gives them."""
        workspace, parts = decode_workspace(q_c.device), []
        for start in range(prefills.start, prefills.stop, _ABSORBED_TOKENS):
            tokens = slice(start, min(start + _ABSORBED_TOKENS, prefills.stop))
            q = self._project_query(q_c[tokens], _rows(query_factor, tokens), slice(0, self.q_heads.count))
            parts.append(
                self._decode(q, *selected_rows(kv_cache, selection.rows(tokens), workspace), _rows(cos_sin, tokens))
            )
        return parts

    def _dummy_run(self, hidden_states: Tensor) -> Tensor:
        """Claim what the largest context chunks would (rows on their way, latents, keys, values, a mask) and return
        zeros. Collective.
        """
        if self.indexer is not None:  # what it takes is free again before attention begins
            torch.empty(
                self.indexer.workspace_bytes(len(hidden_states)), dtype=torch.uint8, device=hidden_states.device
            )
        tokens, config = self.dcp.context_workspace_tokens, self.config
        keys_values = hidden_states.new_empty(tokens, self.num_heads, config.qk_head_dim + config.v_head_dim)
        latents = hidden_states.new_empty(tokens if is_quantized(self.cache_dtype) else 0, config.latent_dim)
        mask = latents.new_empty(0 if config.indexer is None else len(hidden_states) * tokens // 8, dtype=torch.uint8)
        self.exchange.reserve_context(tokens, self.cache_width, self.cache_dtype, hidden_states.device)
        del (
            keys_values,
            latents,
            mask,
        )  # held until here, beside what the exchange takes: the allocator's peak is what counts
        return torch.zeros_like(hidden_states)


def _rows(tensor: Tensor | None, tokens: slice) -> Tensor | None:
    return None if tensor is None else tensor[tokens]
