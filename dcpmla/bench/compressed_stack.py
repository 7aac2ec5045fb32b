"""A stack of layers of DeepSeek-V4's attention, all of one kind (`dcpmla.bench.stack`)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.spec import compressed_stack
from dcpmla.attention.layers.compressed.step import CompressedMetadata, selects
from dcpmla.attention.mla.decode import mla_decode
from dcpmla.attention.select.candidates import candidate_width
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.bench.cache_formats import fill_slots
from dcpmla.bench.stack import CANDIDATES, Stack, StackSizes
from dcpmla.bench.timing import Operation
from dcpmla.cache.index_keys import write_index_keys
from dcpmla.cache.shared_rows import write_rows
from dcpmla.config import DCPConfig


class CompressedStack(Stack):
    """Layers of one kind, over blocks of as many entries as in a model of all kinds.

    Args:
        config: Geometry of the model.
        kind: Kind of every layer here.
        sizes: Step of the layers, with one new token of each request.
        dcp: Layout and formats of the caches, exchange of decode.
    """

    def __init__(self, config: CompressedConfig, kind: LayerKind, sizes: StackSizes, dcp: DCPConfig) -> None:
        self.kind, alike = kind, replace(config, layer_kinds=(kind,) * sizes.num_layers)
        config.check_layout(dcp)
        # A block covers as many tokens as in the model, where the least ratio is another one.
        dcp = replace(dcp, block_size=dcp.block_size * config.row_tokens // alike.row_tokens)
        super().__init__(compressed_stack(alike), sizes, dcp)
        if not kind.ratio:  # each rank has all windows
            self.parts = tuple(part for part in self.parts if part not in ("gather", "combine"))
        widths, batch = self.layers[0].down_widths, len(sizes.seq_lens)
        self.q_c = self.randn(len(self.metadata), batch, config.q_lora_rank)
        self.down = self.randn(batch, sum(widths)).split(widths, -1)
        compressed = self._compressed(self.metadata[0])
        if selects(compressed, kind):
            num_columns = compressed.block_table.shape[1] * compressed.plan.entries_per_block(kind.ratio)
            width = candidate_width(config.indexer.topk, num_columns)
            self.candidates = torch.randint(1 << 31, (batch, width), device=self.device)

    def fill(self, cache: Any) -> None:
        """Fill a layer's cache with random rows and keys, and its sums of entries in progress with ones."""
        fill_slots(cache.latents, self.config.head_dim, self.dtype, write_rows)
        if cache.index_keys is not None:
            fill_slots(cache.index_keys, self.config.indexer.head_dim, self.dtype, write_index_keys)
        for sums in cache.states:
            sums.fill_(1.0)

    @property
    def rope_dim(self) -> int:
        """Return the number of columns with positions."""
        rope_dim: int = self.config.rope_dim
        return rope_dim

    def operations(self) -> dict[str, Operation]:
        """Return the operations of all stacks, with the selection and the exchange of its candidates."""
        candidates = self.in_each_layer(lambda: self.exchange.gather_candidates(self.candidates))
        return {**super().operations(), "selection": self.select, CANDIDATES: candidates}

    def bytes_read(self) -> dict[str, int]:
        """Return the bytes that all stacks read, and of a selection this rank's share of the keys that are scored."""
        read, num_keys = super().bytes_read(), self.reads.num_keys
        if not num_keys:
            return read
        keys = self.cache[0].index_keys
        assert keys is not None
        key_bytes = len(self.layers) * self.hidden.shape[1] * keys.shape[-1] * keys.element_size()
        selection = -(-num_keys // self.dcp.decode_context_parallel_size) * key_bytes
        return {**read, "total": read["total"] + selection, "selection": selection}

    def project(self, index: int) -> None:
        """Run all of a layer's step until it gathers its queries, but for its selection."""
        hidden, metadata = self.inputs(index)
        selectors = [layer.selector for layer in self.layers]
        slots, num_slots = self._listed(metadata)
        listed = {self.kind.seen: (slots[None], num_slots[None])}
        unselected = replace(self._compressed(metadata), decode_rows=listed)
        try:
            for layer in self.layers:
                layer.selector = None
            self.project_with(hidden, metadata.sharing(unselected))
        finally:
            for layer, selector in zip(self.layers, selectors, strict=True):
                layer.selector = selector

    def select(self, index: int) -> None:
        """Score this rank's keys, and choose among all ranks' best."""
        _, metadata = self.inputs(index)
        q_c = self.q_c[index % len(self.q_c)]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            layer.select(q_c, self.down, cache, self._compressed(metadata))

    def attend(self, index: int) -> None:
        """Attend to this rank's rows, with the group's heads where the cache is sharded. Layers that select attend to
        the last selection.
        """
        _, metadata = self.inputs(index)
        assert metadata.decode is not None
        listed, q = self._listed(metadata), self.group_q if self.kind.ratio else self.q
        for cache in self.cache:
            sizes, workspace = (self.config.softmax_scale, self.config.head_dim), metadata.decode.workspace
            mla_decode(DecodeCall(q, None, cache.latents, *listed, *sizes, workspace=workspace))

    def finish(self, index: int) -> None:
        """Run the sink, RoPE's inverse, the groups' projections, o_b_proj and its all-reduce."""
        cos_sin = self._compressed(self.inputs(index)[1]).angles[self.kind.ratio > 0]
        for layer in self.layers:
            layer.o_b_proj(layer.finish(self.rows, self.lse, cos_sin, len(self.rows)))

    def _listed(self, metadata: StepMetadata) -> tuple[Tensor, Tensor]:
        """Return the rows that a step's tokens attend to on this rank, [batch, N] int32, and how many they are."""
        compressed = self._compressed(metadata)
        if compressed.selection is not None:
            return compressed.selection.slots, compressed.selection.num_slots
        rows, num_rows = compressed.decode_rows[self.kind.seen]
        return rows[0], num_rows[0]

    def _compressed(self, metadata: StepMetadata) -> CompressedMetadata:
        compressed = metadata.get(CompressedMetadata)
        assert compressed is not None
        return compressed
