"""The tensor-parallel layer of DeepSeek-V4's and V4.1's attention. `CompressedAttention.attend` reads top to bottom."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.attention.layers.compressed.calls import WindowWrite
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.fork import fork
from dcpmla.attention.layers.compressed.prefill import attend_prefill, touch_prefill_memory
from dcpmla.attention.layers.compressed.projections import norm_rope_window
from dcpmla.attention.layers.compressed.step import CompressedMetadata, selects
from dcpmla.attention.layers.compressed.weights import CompressedWeights, CompressorWeights
from dcpmla.attention.mla.decode import dcp_mla_decode
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.blocks import Candidates
from dcpmla.attention.select.calls import IndexNorm, IndexRotation
from dcpmla.attention.select.compressor import compress_
from dcpmla.attention.select.entries import EntryLayout, Pooling
from dcpmla.attention.select.projections import norm_rope_index_keys, rope_index_queries
from dcpmla.attention.select.selector import TokenSelector
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.step.metadata import DecodeMetadata, StepMetadata, begin_attention
from dcpmla.cache.layers import LayerCache
from dcpmla.cache.shared_rows import read_rows
from dcpmla.comm.exchange import LocalExchange
from dcpmla.parallel.quantized import NormedRows, PlainRows

# A step with prefills that has more tokens, or more scores of its indexer, runs its kernels one after the other.
_FEW_TOKENS, _FEW_SCORES = 256, 1 << 22


class CompressedAttention(CompressedWeights):
    """Attention to a sliding window and to compressed entries: heads cut over the TP group, entries sharded over the
    DCP group.

    Keys and values are the same rows [D], one head for all queries. Dims: T tokens, h heads of this rank.

    Each rank has every request's window, and reads the window's tokens that it would own in MLA, so that all ranks read
    equally much, and a prefill needs no exchange for its window. A layer of windows alone exchanges nothing.

    Args:
        config: Geometry of the model's attention, before it is sharded.
        kind: Kind of this layer.
        ring: Number of its windows in the rows that layers share (`CompressedConfig.rings`).
        placement: Ranks of the layer, and dtype and device of its parameters, uninitialized until `load_weights`.
    Raises:
        ValueError: Groups of heads do not divide by the TP size, or the layer does not support an option.
    Source: DeepSeek-V4's report, section 2.3; names of weights as in transformers.
    """

    def __init__(self, config: CompressedConfig, kind: LayerKind, placement: Placement, ring: int = 0) -> None:
        placement = replace(placement, dcp=config.with_whole_blocks(placement.dcp))
        super().__init__(config, kind, placement)
        self.ring, self.cache_dtype = ring, placement.cache_dtype
        # Every rank has all windows, so its own heads attend to them without an exchange.
        self.exchange = placement.exchange if kind.ratio else LocalExchange()
        ranks = placement.dcp, placement.mesh.dcp_rank, placement.exchange
        self.selector = TokenSelector(config.indexer, *ranks) if kind.has_indexer else None

    @property
    def takes_quantized(self) -> bool:
        """Return False, because one product of hidden states needs their values."""
        return False

    def forward(self, hidden_states: Tensor, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Run one step of a batch: decodes first, then prefills, then padding. Collective.

        Args:
            hidden_states: Hidden states [T, hidden], the same on all TP ranks; rows past step.num_tokens are padding.
            cache: Cache of this layer on this rank; written and read.
            step: Step after `with_angles`. None in a profile, which needs no cache: the memory of the largest step is
                allocated and freed (`touch_peak_memory`), and attention's output is zeros.
        Returns:
            [T, hidden], the same on all TP ranks; rows of padding are undefined.
        Raises:
            ValueError: Tensors or the step do not match each other or this layer.
        """
        return self.o_b_proj(self.attend(hidden_states, cache, step))

    def partial(self, hidden_states: Tensor, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Run `forward` up to the sum over the TP ranks, and return this rank's part of it. Collective."""
        return self.o_b_proj.partial(self.attend(hidden_states, cache, step))

    def attend(self, hidden_states: Tensor, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Run `forward` without its last projection. Collective.

        Returns:
            [T, groups x o_lora_rank] in the dtype of hidden_states. Rows of padding are zeros, and all rows without a
            step.
        Raises:
            ValueError: Same cases as `forward`.
        """
        if step is None:
            self.touch_peak_memory(len(hidden_states))
            return hidden_states.new_zeros(len(hidden_states), self.low_width)
        if step.defer is None:
            return self._attend(hidden_states, cache, step)
        low = hidden_states.new_zeros(len(hidden_states), self.low_width)
        step.run_outside_graph(self._attend_into, low, hidden_states, cache)
        return low

    def _attend_into(self, low: Tensor, hidden_states: Tensor, cache: LayerCache | None, step: StepMetadata) -> None:
        low.copy_(self._attend(hidden_states, cache, step))

    def _attend(self, hidden_states: Tensor, cache: LayerCache | None, step: StepMetadata) -> Tensor:
        cache, compressed, cos_sin = self._check(hidden_states, cache, step)
        begin_attention(cache.loads, cache.starts)
        decodes, prefills = slice(0, step.num_decode_tokens), slice(step.num_decode_tokens, step.num_tokens)
        context = compressed.context
        # Windows are read before this step's tokens overwrite them.
        window = None
        if context is not None:
            window = read_rows(cache.latents, context.window_slots[self.ring], self.config.head_dim, self.dtype)
        down = self.down_project(hidden_states[: step.num_tokens])
        q_c, rows = self._write_window(down[0], cache, compressed)
        has_entry_keys = self.config.has_entry_keys
        if has_entry_keys:
            self._write_entries(down, compressed, cache)
        # The exchange is used on one stream at a time.
        with fork(rows.device, self._has_side_stream(compressed)) as side:
            self._write_index_keys(down, compressed, cache)
            if self.selector is None and not has_entry_keys:
                self._write_entries(down, compressed, cache)
            selection = self.select(q_c, down, cache, compressed, side.mark)
        if self.selector is not None and not has_entry_keys:
            self._write_entries(down, compressed, cache)
        side.reach_mark()  # Queries are a large product, which would delay the indexer's small kernels.
        parts = []
        if step.decode is not None:
            q = self.project_query(q_c[decodes], cos_sin[decodes], slice(0, self.q_heads.count))
            side.join()
            parts.append(self._decode(q, cache, step.decode, compressed, selection))
        if window is not None:
            q = self.project_query(q_c[prefills], cos_sin[prefills], self.q_heads.own)
            side.join()
            new = window, rows[prefills]
            chosen = None if selection is None else selection.rows(prefills)
            parts += attend_prefill(q, new, cache.latents, compressed, self.kind, chosen, self.exchange, self.dcp)
        out, lse = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
        return self.finish(out, lse, cos_sin, len(hidden_states))

    def inject(self, rows: Tensor, cache: LayerCache, step: StepMetadata) -> None:
        """Write the windows of a step's tokens, without attention, from rows [T, hidden] in place of hidden states: the
        context of a block of drafts (DSpark).

        Raises:
            ValueError: Same cases as `forward`.
        """
        cache, compressed, _ = self._check(rows, cache, step)
        begin_attention(cache.loads, cache.starts)
        self._write_window(self.down_project(rows[: step.num_tokens])[0], cache, compressed)

    def _write_window(
        self, down: Tensor, cache: LayerCache, compressed: CompressedMetadata
    ) -> tuple[PlainRows, Tensor]:
        """Write the windows of tokens, and return their query latents [T, Lq] after the norm and their rows [T, D].

        Args:
            down: Query latents and rows side by side, before their norms [T, Lq + D].
        """
        norms = self.q_norm, self.kv_norm, self.config.rms_norm_eps
        requests = compressed.positions, compressed.request, compressed.seq_lens, compressed.states[self.ring]
        options = compressed.plan.ring_rows, self.q_b_proj.takes_quantized
        angles = compressed.angles[self.kind.ratio > 0]
        latents, rows, *codes = norm_rope_window(WindowWrite(down, cache.latents, *norms, angles, *requests, *options))
        return NormedRows.join(latents, *codes), rows

    def _write_entries(self, down: tuple[Tensor, ...], step: CompressedMetadata, cache: LayerCache) -> None:
        """Pool tokens into entries, and write them; write also the index keys that are projected from entries
        (`has_entry_keys`). Write nothing in a layer that reads another one's entries.
        """
        if not self.writes:
            return
        if not self.config.has_entry_keys:
            self._pool(self.compressor, down[1], step, cache.states[0], cache.latents)
            return
        pairs, first_row = down[1], step.plan.window_rows(self.kind.ratio)
        # This rank's complete entries before RoPE, each at the first token of its span, and their slots.
        latents = pairs.new_empty(len(pairs), self.config.head_dim)
        slots = torch.full((len(pairs),), first_row - 1, dtype=torch.int64, device=pairs.device)
        self._pool(self.compressor, pairs, step, cache.states[0], cache.latents, latents=latents, slots=slots)
        if cache.index_keys is None:
            return
        norm = IndexNorm(self.index_k_norm, None, self.config.rms_norm_eps)
        rotation = IndexRotation(step.entries[self.kind.ratio].cos_sin, True, self.dcp.index_hadamard)
        keys, index_slots = self.index_k_proj(latents), slots - first_row  # -1 at tokens without an entry
        norm_rope_index_keys(keys, cache.index_keys, index_slots, norm, rotation)

    def _write_index_keys(self, down: tuple[Tensor, ...], step: CompressedMetadata, cache: LayerCache) -> None:
        """Pool tokens into index keys, and write them, unless keys come from entries or there is no indexer."""
        if self.writes and self.kind.has_indexer and not self.config.has_entry_keys:
            assert cache.index_keys is not None
            options = {"is_index": True, "hadamard": self.dcp.index_hadamard}
            self._pool(self.index_compressor, down[2], step, cache.states[1], cache.index_keys, **options)

    def _pool(
        self,
        weights: CompressorWeights,
        pairs: Tensor,
        step: CompressedMetadata,
        sums: Tensor,
        cache: Tensor,
        is_index: bool = False,
        **options: Any,
    ) -> None:
        """Pool the pairs of a step's tokens part by part, with options of `Pooling`."""
        entries = step.entries[self.kind.ratio]
        table = step.block_table if is_index else entries.block_table
        layout = EntryLayout(entries.cos_sin, table, step.plan.entries_per_block(self.kind.ratio), step.owner)
        written = sums.flatten(0, 1), cache, layout
        call = Pooling(pairs, weights.bias, weights.norm, self.config.rms_norm_eps, *written, is_index, **options)
        for part in step.parts:
            compress_(call, part)

    def touch_peak_memory(self, num_tokens: int) -> None:
        """Allocate and free the memory of attention in the largest step of num_tokens, so that memory profiling
        includes it: an indexer's workspace, then a prefill's. Collective.
        """
        dtype, device = self.dtype, self.q_norm.device
        if self.selector is not None:  # free again before attention begins
            torch.empty(self.selector.workspace_bytes(num_tokens, dtype.itemsize), dtype=torch.uint8, device=device)
            with fork(device, True) as side:
                few = self.selector.workspace_bytes(min(num_tokens, _FEW_TOKENS), dtype.itemsize, 4 * _FEW_SCORES)
                torch.empty(few, dtype=torch.uint8, device=device)
            side.join()
        touch_prefill_memory(self, self.exchange, num_tokens)

    def _has_side_stream(self, compressed: CompressedMetadata) -> bool:
        """Return whether kernels of a step run concurrently. Kernels of few tokens are too small to fill a GPU."""
        if self.selector is None or compressed.context is None:
            return self.kind.ratio > 0
        num_tokens = len(compressed.positions)
        num_scores = num_tokens * compressed.max_entries(self.kind.ratio)
        return num_tokens <= _FEW_TOKENS and num_scores <= _FEW_SCORES

    def select(
        self,
        q_c: PlainRows,
        down: tuple[Tensor, ...],
        cache: LayerCache,
        compressed: CompressedMetadata,
        after_scores: Callable[[], None] = lambda: None,
    ) -> SelectedTokens | None:
        """Write the entries that each token attends to into the step, and return them; return None if it attends to all
        entries before it. Collective.

        Args:
            q_c: Query latents [T, Lq] after their norm.
            down: Parts of `down_proj`'s output, [T, ..] each.
            after_scores: Function that is called after the scores (`TokenSelector.select`).
        """
        config = self.config.indexer
        if not selects(compressed, self.kind):
            return None
        assert compressed.selection is not None
        if self.selector is None:
            return compressed.selection
        assert cache.index_keys is not None
        q = self.index_q_proj(q_c).unflatten(-1, (config.num_heads, config.head_dim))
        is_fp8 = self.dcp.index_cache_dtype == "fp8"
        rotation = IndexRotation(compressed.angles[True], True, self.dcp.index_hadamard)
        q, weights = rope_index_queries(q, down[-1], rotation, is_fp8)
        entries = compressed.entries[self.kind.ratio]
        assert entries.visible is not None
        tables = entries.visible, entries.block_table, compressed.selection
        self.selector.select(q, weights, cache.index_keys, *tables, self._candidates(compressed), after_scores)
        return compressed.selection

    def _candidates(self, compressed: CompressedMetadata) -> Candidates | None:
        """Return the candidate blocks that the indexer chooses or selects among; None for all blocks."""
        blocks = compressed.candidates
        if blocks is None or self.config.candidates is None or not self.kind.candidates:
            return None
        return Candidates(blocks, self.config.candidates.block_size, self.kind.candidates == "source")

    def _decode(
        self,
        q: Tensor,
        cache: LayerCache,
        decode: DecodeMetadata,
        compressed: CompressedMetadata,
        selection: SelectedTokens | None,
    ) -> tuple[Tensor, Tensor]:
        """Return attention of decode tokens over all ranks' rows: out [T, h, D], lse [T, h]. Collective."""
        if selection is None:
            slots, num_slots = (part[self.ring] for part in compressed.decode_rows[self.kind.seen])
        else:
            slots, num_slots = compressed.decode_slots(selection, len(q), self.ring), selection.num_slots[: len(q)]
        q = q if self.q_is_replicated else self.exchange.gather_heads(q)
        call = DecodeCall(q, None, cache.latents, slots, num_slots, self.config.softmax_scale, self.config.head_dim)
        call = call._replace(workspace=decode.workspace, backend=self.dcp.attention_backend)
        return dcp_mla_decode(call, self.exchange)

    def _check(
        self, hidden_states: Tensor, cache: LayerCache | None, step: StepMetadata
    ) -> tuple[LayerCache, CompressedMetadata, Tensor]:
        """Return the cache, the step's part for this attention, and its angles for this layer."""
        compressed, ratio, width = step.get(CompressedMetadata), self.kind.ratio, self.config.hidden_size
        if compressed is None:
            raise ValueError("step has no compressed part; call with_angles of dcpmla.attention.layers.compressed.step")
        if hidden_states.ndim != 2 or hidden_states.shape[0] < step.num_tokens or hidden_states.shape[1] != width:
            shape = tuple(hidden_states.shape)
            raise ValueError(f"hidden_states has shape {shape}; expected [at least {step.num_tokens}, {width}]")
        if not isinstance(cache, LayerCache):
            words = "expected a LayerCache, such as a CompressedCache's cache[layer]"
            raise ValueError(f"cache is {type(cache).__name__}; {words}")
        plan, rows = compressed.plan, cache.latents
        expected = plan.rows_shape(ratio), plan.dtype
        if (tuple(rows.shape), rows.dtype) != expected or plan.dtype != self.cache_dtype:
            raise ValueError(
                f"cache.latents has shape {tuple(rows.shape)} and dtype {rows.dtype}; expected {expected} for "
                f"kv_cache_dtype (--kv-cache-dtype) {plan.dcp.kv_cache_dtype!r}"
            )
        if self.selector is not None:
            per_block = plan.entries_per_block(ratio)
            self.selector.check_cache(cache.index_keys, plan.num_blocks, per_block, self.dtype)
        step.check_blocks(plan.num_blocks)
        return cache, compressed, compressed.angles[ratio > 0]
