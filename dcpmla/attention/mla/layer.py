"""The tensor-parallel MLA layer over a sharded latent cache. `MLAAttention.heads_output` reads top to bottom."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call
from dcpmla.attention.mla.deterministic import overwrite_prompts, round_latents
from dcpmla.attention.mla.fp8_scales import calculate_scale_
from dcpmla.attention.mla.peak_memory import touch_attention_memory
from dcpmla.attention.mla.prefill import dcp_mla_prefill
from dcpmla.attention.mla.weights import AttentionWeights, MHAInputs, Tokens, rows_or_none
from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.output.rows import OutputRows, quant_for
from dcpmla.attention.placement import Placement, check_order
from dcpmla.attention.projections import project_latents
from dcpmla.attention.select.indexer import Indexer
from dcpmla.attention.select.selector import hot_rows, selected_rows
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata, check_selection
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import DecodeMetadata, StepMetadata, begin_attention, part_tokens
from dcpmla.cache.formats import check_cache, is_quantized, row_width
from dcpmla.cache.hot import forget_hot_rows
from dcpmla.cache.layers import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.linear import Weight
from dcpmla.parallel.quantized import PlainRows, QuantizedRows, plain

# Smallest number of decode tokens in a call for which dcp_project_before_merge pays: exchanged rows are narrower, but
# each rank reads W_UV of all the group's heads. Measured with `direct` on 4 H200s: slower at 32 tokens, faster at 128.
PROJECT_FIRST_TOKENS = 64
# Number of tokens whose queries set q_scale: more tokens hardly raise the maximum. With 128 heads they take 144 MiB.
_SCALED_TOKENS = 1024


class MLAAttention(AttentionWeights):
    """Multi-head Latent Attention: heads cut over the TP group, latent cache sharded over the DCP group.

    Dims: T tokens, h heads of this rank; P, R, V, L, Lq the nope, rope, value, latent and query-latent widths.

    With dcp.calculate_kv_scales the first step with prefills sets the scales, and nothing may be cached before that
    step. A prompt of one token would be a decode; the engine builds the first step with num_decodes=0, so that it is a
    prefill.

    With dcp.deterministic a token's output has the same bits whatever the other tokens, the chunks and the DCP size.

    With config.indexer, tokens that could attend to more than topk tokens, themselves included, attend only to tokens
    that the indexer selects (sparse MLA).

    Args:
        config: Geometry of the whole layer, before it is sharded.
        placement: Ranks of the layer, and dtype and device of its parameters. `load_weights` initializes them.
        skip_topk: Whether the layer has no indexer of its own and attends to the tokens that an earlier layer selected
            (IndexCache, GLM-5).
    Attributes:
        indexer: Indexer of a sparse layer; None in a dense layer, and with skip_topk.
        kv_scale, q_scale: Scales of an fp8 cache and of fp8 queries (`mla/fp8_scales.py`), float32 [1], or None.
    Raises:
        ValueError: Heads do not divide by the TP size, or the layer does not support the cache format or
            dcp.deterministic.
    Source: DeepSeek-V2, section 2.1; projections are named as in DeepSeek's checkpoints.
    """

    def __init__(self, config: MLAConfig, placement: Placement, skip_topk: bool = False) -> None:
        check_order(config, placement.dcp)
        super().__init__(config, placement)
        self._placement = placement
        self.exchange, self.cache_dtype = placement.exchange, placement.cache_dtype
        self.cache_width = row_width(self.cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim)
        self._scales_pending = self.dcp.calculate_kv_scales
        self.indexer = self.new_indexer() if config.indexer is not None and not skip_topk else None

    def new_indexer(self) -> Indexer:
        """Return the layer's indexer."""
        return Indexer(self.config, self._placement)

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Load weights as `AttentionWeights.load_weights` documents; names of an indexer's start with "indexer."."""
        super().load_weights(weights)
        if self.indexer is not None:
            prefix = "indexer."
            self.indexer.load_weights(
                {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
            )

    def forward(self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Run one step of a batch: decodes first, then prefills, then padding. Collective.

        Args:
            hidden_states: Hidden states [T, hidden], the same on all TP ranks; if `takes_quantized`, they may come with
                fp8 codes (`NormedRows`). Rows from step.num_tokens on are padding.
            cache: Cache of this layer on this rank, written and read: latents in the format of dcp.kv_cache_dtype and,
                with an indexer, index keys.
            step: Metadata with the model's cos_sin and query_factor, and with a selection where tokens of a sparse
                model could attend to more than topk tokens. None while memory is measured, before a cache exists: that
                of the largest step is allocated and freed (`touch_peak_memory`), and attention's output is zeros.
        Returns:
            [T, hidden], the same on all TP ranks. Callers must not read rows of padding.
        Raises:
            ValueError: Tensors and step do not match each other or this layer.
        """
        return self.o_proj(self.heads_output(hidden_states, cache, step, self._o_proj_quant()))

    def partial(self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Run `forward` up to the sum over the TP ranks, and return this rank's part of it. Collective."""
        return self.o_proj.partial(self.heads_output(hidden_states, cache, step, self._o_proj_quant()))

    def heads_output(
        self,
        hidden_states: PlainRows,
        cache: LayerCache | None,
        step: StepMetadata | None,
        output_quant: OutputQuant | None = None,
    ) -> Tensor | QuantizedRows:
        """Return the input of o_proj, quantized if asked to, for a caller whose o_proj takes 8 or 4 bits. Collective.

        Args:
            output_quant: Quantization of the output [T, h V]; None keeps the dtype of hidden_states.
        Returns:
            [T, h V], or `QuantizedRows`, bit for bit what quantizing the plain output would give. Rows of padding are
            zeros; without a step all rows are.
        Raises:
            ValueError: Same cases as `forward`, or output_quant does not support the head's width or the dtype.
        """
        x = plain(hidden_states)
        output = self._new_output(len(x), x.dtype, output_quant)
        if step is None:
            self.touch_peak_memory(len(x))
            output.pad()
        else:
            self._write(hidden_states, cache, self.view(step), output)
        return output.rows(None if self.output_gate is None else self.output_gate(hidden_states))

    def _o_proj_quant(self) -> OutputQuant | None:
        """Return the quantization of o_proj's input; gates are applied to whole rows, whose groups may cross heads."""
        return quant_for(self.o_proj, self.config.v_head_dim * (self.num_heads if self.config.has_gates else 1))

    def _new_output(self, num_rows: int, dtype: torch.dtype, quant: OutputQuant | None) -> OutputRows:
        options = quant, self.sinks, self.config.has_gates, self.dcp.deterministic
        return OutputRows(num_rows, self.w_uv(self.kv_heads.own), dtype, *options)

    def _write(
        self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata, output: OutputRows
    ) -> None:
        """Cache the step's latents, and write the heads' outputs. Collective."""
        cache = self._check(plain(hidden_states), cache, step)
        hidden_states = hidden_states[: step.num_tokens]
        if self._scales_pending and step.prefill is not None:  # captures come before the first prompt, and set none
            self._calculate_scales(hidden_states, cache.latents, step)
        q_c, latents = self.latents_of(hidden_states, cache.latents, step)
        if cache.hot is not None:
            forget_hot_rows(cache.hot, step.tokens.slots)
        mha = step.compute_ahead(self._compute_ahead, q_c, latents, cache, output)
        step.run_outside_graph(self._write_output, hidden_states, q_c, latents, mha, cache, output)

    def view(self, step: StepMetadata) -> StepMetadata:
        """Return the step with this layer's angles, contexts and selection; layers that differ override it."""
        return step

    def latents_of(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> tuple[PlainRows, Tensor]:
        """Cache the step's latents, and return the query projection's input and the latents: as `down_project` returns
        them, or in a fixed order as the cache holds them.
        """
        q_c, latents = self.down_project(hidden_states, kv_cache, step.tokens.slots, step.cos_sin)
        if self.dcp.deterministic and is_quantized(kv_cache.dtype):
            latents = round_latents(latents, self.config.kv_lora_rank, kv_cache.dtype, self.kv_scale)
        return q_c, latents

    def _compute_ahead(
        self, q_c: PlainRows, latents: Tensor, cache: LayerCache, output: OutputRows, step: StepMetadata
    ) -> MHAInputs:
        """Return all tokens' inputs of MHA, and write the rows of decodes that a graph can compute. Collective."""
        output.reserve(self.config.query_gates)
        tokens = Tokens(q_c, step.cos_sin, step.query_factor)
        mha = self.prepare_mha(tokens, latents)
        if step.decode is not None:
            self._absorbed_in_parts(tokens.rows(slice(0, step.num_decode_tokens)), cache, step.decode, output)
        return mha

    def _write_output(
        self,
        hidden_states: PlainRows,
        q_c: PlainRows,
        latents: Tensor,
        mha: MHAInputs | None,
        cache: LayerCache,
        output: OutputRows,
        step: StepMetadata,
    ) -> None:
        """Write the rows of `output`, decodes only if no graph has (step.decode), and zeros into padding; inputs of MHA
        are None unless a graph has made them. Collective.
        """
        begin_attention(cache.loads, cache.starts)
        step = self.view(step)
        output.seek(step.num_decode_tokens if step.decode is None else 0)
        decodes, prefills = slice(0, step.num_decode_tokens), slice(step.num_decode_tokens, step.num_tokens)
        hidden_states, q_c = hidden_states[: step.num_tokens], q_c[: step.num_tokens]
        selection = self._select(hidden_states, q_c, cache, step)
        tokens = Tokens(q_c, step.cos_sin, step.query_factor, selection)
        if step.shares_rows:
            self._write_shared_rows(tokens, latents, cache, step, output)
            return
        if step.decode is not None:
            self._absorbed_in_parts(tokens.rows(decodes), cache, step.decode, output)
        if step.prefill is not None:
            # A mask of short contexts would exclude nothing.
            selection = selection if step.max_seq_len > (self.config.topk or 0) else None
            tokens, latents = tokens._replace(selection=selection).rows(prefills), latents[prefills]
            mha = self.prepare_mha(tokens) if mha is None else mha.rows(prefills)
            self._prefill(tokens, latents, mha, cache.latents, step.prefill, output)
        output.pad()

    def _write_shared_rows(
        self, tokens: Tokens, latents: Tensor, cache: LayerCache, step: StepMetadata, output: OutputRows
    ) -> None:
        """Append the rows of decodes and prompts in one graph (`StepMetadata.shares_rows`). Collective."""
        assert step.prefill is not None
        values = self._new_output(step.num_tokens, latents.dtype, None)
        if step.decode is not None:
            self._absorbed_in_parts(tokens.rows(slice(0, step.num_decode_tokens)), cache, step.decode, values)
        values.pad()
        rows = values.rows()
        assert isinstance(rows, Tensor)
        out = rows.unflatten(1, (self.num_heads, -1))
        overwrite_prompts(out, self.prepare_mha(tokens, latents), latents, step.prefill, self.config.softmax_scale)
        output.append(out)

    def touch_peak_memory(self, num_tokens: int) -> None:
        """Allocate and free the memory of attention in the largest step of num_tokens, so that a measurement of the
        peak includes it (`touch_attention_memory`). Nothing is computed. Collective.
        """
        # This is an upper bound: `up_projection` dequantizes the weights of this rank's own heads. A GPU that does not
        # multiply in fp8 dequantizes the weights of all the heads that the rank holds.
        num_dequantized = self.kv_b_proj.weight.numel() if self.kv_b_proj.weight_scale is not None else 0
        selector = None if self.indexer is None else self.indexer.selector
        touch_attention_memory(num_tokens, self.config, self._placement, self.num_heads, num_dequantized, selector)

    def _check(self, hidden_states: Tensor, cache: LayerCache | None, step: StepMetadata) -> LayerCache:
        if not isinstance(step, StepMetadata):
            raise ValueError(f"step is {type(step).__name__}; expected what a StepBuilder gives")
        step.check(self.config, hidden_states)
        if not isinstance(cache, LayerCache):
            raise ValueError(
                f"cache is {type(cache).__name__}; expected a LayerCache, for example a LatentCache's cache[layer]"
            )
        check_cache(cache.latents, self.dcp.block_size, self.cache_width, self.dcp.kv_cache_dtype, self.cache_dtype)
        step.check_blocks(cache.latents.shape[0])
        if self.config.topk is not None and step.defer is None:  # replays bring selections
            check_selection(self.config.topk, cache, step)
        if self.indexer is not None:
            num_blocks, num_keys = cache.latents.shape[0], self.dcp.block_size // self.indexer.config.pool_size
            self.indexer.selector.check_cache(cache.index_keys, num_blocks, num_keys, self.kv_b_proj.dtype)
        return cache

    def _calculate_scales(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> None:
        """Set the scales from tokens of prompts, before any token is cached. Collective over the TP group."""
        prefills = slice(step.num_decode_tokens, step.num_tokens)
        assert self.kv_scale is not None
        self._scales_pending = False
        no_slots, cos_sin = torch.full_like(step.tokens.slots[prefills], -1), rows_or_none(step.cos_sin, prefills)
        q_c, latents = self.down_project(hidden_states[prefills], kv_cache, no_slots, cos_sin)
        calculate_scale_(self.kv_scale, latents, self.mesh.tp_group)
        self._calculate_q_scale(Tokens(q_c, cos_sin, rows_or_none(step.query_factor, prefills)))

    def _calculate_q_scale(self, tokens: Tokens) -> None:
        """Set the scale of fp8 queries, if they have one, from the first `_SCALED_TOKENS` tokens. Collective."""
        if self.q_scale is None:
            return
        tokens = tokens.rows(slice(0, _SCALED_TOKENS))
        q, _ = self.project_query(tokens, self.q_heads.own)
        absorbed = self.absorb(q, self.w_uk(self.kv_heads.own), tokens.cos_sin, None)
        calculate_scale_(self.q_scale, absorbed, self.mesh.tp_group)

    def _select(
        self, hidden_states: PlainRows, q_c: PlainRows, cache: LayerCache, step: StepMetadata
    ) -> SelectedTokens | None:
        """Return the tokens that each token attends to; None if each attends to all up to itself. Collective."""
        sparse = step.get(SparseMetadata)
        if self.config.topk is None or sparse is None:
            return None
        if self.indexer is not None:
            self.indexer(hidden_states, q_c, cache, step)  # writes the selection
        return sparse.selection

    def _absorbed_in_parts(self, tokens: Tokens, cache: LayerCache, decode: DecodeMetadata, output: OutputRows) -> None:
        """Append the output of decode tokens, in parts, so that memory is bounded. Collective."""
        max_tokens = part_tokens(self.num_heads * self.dcp.decode_context_parallel_size, self.dcp)
        if tokens.selection is not None:
            pages, decode = selected_rows(cache.latents, tokens.selection, decode.workspace)
            cache = cache._replace(latents=pages)
        if cache.hot is not None:
            max_tokens = min(max_tokens, cache.hot.max_tokens)
        if plain(tokens.q_c).shape[0] <= max_tokens:  # a compiler cannot trace the loop
            self._absorbed(tokens, cache, decode, output)
            return
        for rows, part in decode.parts(max_tokens):
            self._absorbed(tokens.rows(rows), cache, part, output)

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
        kv_c, k_pe = latents.tensor_split((self.config.kv_lora_rank,), -1)
        out, lse = dcp_mla_prefill(
            mha.q,
            kv_c,
            k_pe,
            kv_cache,
            partial(project_latents, w_kv_b=mha.w_kv_b, is_deterministic=prefill.is_deterministic),
            prefill,
            self.config.softmax_scale,
            self.exchange,
            self.kv_scale,
            None if tokens.selection is None else tokens.selection.positions,
            mha.kv,
            backend=self.dcp.prefill_backend,
        )
        output.append(out, lse, mha.gates)

    def _absorbed(self, tokens: Tokens, cache: LayerCache, decode: DecodeMetadata, output: OutputRows) -> None:
        """Attend with absorbed queries to the latents of all ranks, apply W_UV, and append the output. Collective."""
        if cache.hot is not None:
            cache, decode = hot_rows(cache, decode)
        q, gates = self.project_query(tokens, slice(0, self.q_heads.count))
        gates = None if gates is None else gates[:, self.q_heads.own]
        dcp, held = self.dcp, slice(None) if self.dcp.dcp_q_replicate else self.kv_heads.own
        absorbed = self.absorb(q, self.w_uk(held), tokens.cos_sin, self.q_scale)
        project_first = dcp.dcp_project_before_merge and q.shape[0] >= PROJECT_FIRST_TOKENS
        call = decode_call(
            absorbed if dcp.dcp_q_replicate else self.exchange.gather_heads(absorbed),
            cache.latents,
            decode,
            self.config.softmax_scale,
            self.config.kv_lora_rank,
            kv_scale=self.kv_scale,
            q_scale=self.q_scale,
            dtype=q.dtype,
            num_tile_lanes=dcp.num_own_lanes,
            backend=dcp.attention_backend,
        )
        out, lse = dcp_mla_decode(call, self.exchange, self.w_uv(slice(None)) if project_first else None)
        if project_first:
            output.append(out, lse, gates)
        else:
            output.project(out, lse, gates)
