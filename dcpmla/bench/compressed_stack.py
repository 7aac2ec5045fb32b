"""A stack of layers of DeepSeek-V4's attention, all of one kind (`dcpmla.bench.stack`)."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, decode_workspace
from dcpmla.attention.layers.compressed.cache import CompressedCache, plan_compressed
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.attention.layers.compressed.spec import CompressedSpec
from dcpmla.attention.layers.compressed.step import CompressedMetadata, compressed_traits, selects, with_angles
from dcpmla.attention.mla.decode import mla_decode
from dcpmla.attention.select.candidates import candidate_width
from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench.cache_formats import fill_index_keys, fill_shared_rows
from dcpmla.bench.stack import MOST_STEPS, Stack, StackMaker, StackSizes
from dcpmla.bench.timing import num_rotated


def compressed_makers(config: CompressedConfig) -> dict[str, StackMaker]:
    """Return the makers of a model's stacks, by the labels of its kinds of layers."""
    kinds = dict.fromkeys(config.layer_kinds)
    return {kind.label: StackMaker(kind.has_indexer, partial(CompressedStack, config, kind)) for kind in kinds}


class CompressedStack(Stack):
    """Layers of one kind, over blocks of as many entries as in a model of all kinds.

    Args:
        config: Geometry of the model.
        kind: Kind of every layer here.
        sizes: Number of layers and their load.
        options: Fields of DCPConfig for the caches' formats and the exchange of decode.
    Raises:
        ValueError: Groups of heads that do not divide, options that the layers do not have, a cache that does not fit.
    """

    def __init__(self, config: CompressedConfig, kind: LayerKind, sizes: StackSizes, **options: Any) -> None:
        mesh, num_layers, batch, context = sizes.mesh, sizes.num_layers, sizes.batch, sizes.context
        alike = replace(config, layer_kinds=(kind,) * num_layers)
        dcp = sizes.dcp_config(**options)
        config.check_layout(dcp)
        # A block covers as many tokens as in the model, where the least ratio is another one.
        dcp = replace(dcp, block_size=dcp.block_size * config.row_tokens // alike.row_tokens)
        reads = CompressedSpec(alike, kind, 0).reads(context)
        super().__init__(sizes, dcp, reads, partial(CompressedAttention, alike, kind))
        self.config, self.kind = alike, kind
        device, dtype = self.device, self.dtype
        if not kind.ratio:  # each rank has all windows
            self.parts = tuple(part for part in self.parts if part not in ("gather", "combine"))
        one = plan_compressed(alike, dcp, [context] * batch, dtype)
        # Selections take different rows of the same blocks, so that many need no more memory than few.
        row_bytes = one.rows_shape(kind.ratio)[-1] * one.dtype.itemsize
        bytes_read = num_layers * batch * -(-reads.num_rows // mesh.dcp_size) * row_bytes
        num_steps = num_rotated(bytes_read, device, MOST_STEPS)
        num_sets = min(num_steps, num_rotated(one.bytes_per_rank, device))
        plan = plan_compressed(alike, dcp, [context] * batch * num_sets, dtype, batch * num_steps)
        self.cache: CompressedCache = CompressedCache(plan, device)
        for cache in self.cache:
            fill_shared_rows(cache.latents, alike.head_dim, dtype)
            if cache.index_keys is not None:
                fill_index_keys(cache.index_keys, alike.indexer.head_dim, dtype)
            for sums in cache.states:
                sums.fill_(1.0)
        blocks = torch.randperm(plan.num_blocks).view(num_sets, batch, -1).tolist()
        states = torch.arange(batch * num_steps).view(num_steps, batch).tolist()
        steps = StepBuilder(plan.dcp, mesh.dcp_rank, device, compressed_traits(plan))
        workspace = decode_workspace(device)
        requests = [
            StepRequests([1] * batch, [context] * batch, blocks[index % num_sets], states[index])
            for index in range(num_steps)
        ]
        self.metadata = [with_angles(steps.build(each, workspace=workspace), self._draw_angles) for each in requests]
        self.draw_inputs(sizes, alike.hidden_size, self.layers[0].num_heads, alike.head_dim, alike.head_dim)
        self._draw_indexer(batch)

    def _draw_angles(self, positions: Tensor, _: bool) -> Tensor:
        return torch.randn(len(positions), self.config.rope_dim, device=self.device)

    def _draw_indexer(self, batch: int) -> None:
        config, widths = self.config, self.layers[0].down_widths
        self.q_c = self.randn(len(self.metadata), batch, config.q_lora_rank)
        self.down = self.randn(batch, sum(widths)).split(widths, -1)
        compressed = self._compressed(self.metadata[0])
        if selects(compressed, self.kind):
            num_columns = compressed.block_table.shape[1] * compressed.plan.entries_per_block(self.kind.ratio)
            width = candidate_width(config.indexer.topk, num_columns)
            self.candidates = torch.randint(1 << 31, (batch, width), device=self.device)

    def key_bytes(self) -> int:
        """Return the bytes of an index key of each request in all layers."""
        keys = self.cache[0].index_keys
        assert keys is not None
        return len(self.layers) * self.hidden.shape[1] * keys.shape[-1] * keys.element_size()

    def project(self, index: int = 0) -> None:
        """Run all of a layer's step until it gathers its queries, but for its selection."""
        hidden, metadata = self._inputs(index)
        selectors = [layer.selector for layer in self.layers]
        slots, num_slots = self._listed(metadata)
        listed = {self.kind.ratio: (slots[None], num_slots[None])}
        unselected = replace(self._compressed(metadata), decode_rows=listed)
        try:
            for layer in self.layers:
                layer.selector = None
            self._project(hidden, metadata.sharing(unselected))
        finally:
            for layer, selector in zip(self.layers, selectors, strict=True):
                layer.selector = selector

    def select(self, index: int = 0) -> None:
        """Score this rank's keys, and choose among all ranks' best."""
        _, metadata = self._inputs(index)
        q_c = self.q_c[index % len(self.q_c)]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            layer.select(q_c, self.down, cache, self._compressed(metadata))

    def gather_candidates(self, _: int = 0) -> None:
        """Gather the ranks' candidates of a selection."""
        for _layer in self.layers:
            self.exchange.gather_candidates(self.candidates)

    def attend(self, index: int = 0) -> None:
        """Attend to this rank's rows, with the group's heads where the cache is sharded. Layers that select attend to
        the last selection.
        """
        _, metadata = self._inputs(index)
        assert metadata.decode is not None
        listed, q = self._listed(metadata), self.group_q if self.kind.ratio else self.q
        for cache in self.cache:
            sizes, workspace = (self.config.softmax_scale, self.config.head_dim), metadata.decode.workspace
            mla_decode(DecodeCall(q, None, cache.latents, *listed, *sizes, workspace=workspace))

    def finish(self, index: int = 0) -> None:
        """Run the sink, RoPE's inverse, the groups' projections, o_b_proj and its all-reduce."""
        cos_sin = self._compressed(self._inputs(index)[1]).angles[self.kind.ratio > 0]
        for layer in self.layers:
            layer.o_b_proj(layer.finish(self.rows, self.lse, cos_sin, len(self.rows)))

    def _listed(self, metadata: StepMetadata) -> tuple[Tensor, Tensor]:
        """Return the rows that a step's tokens attend to on this rank, [batch, N] int32, and how many they are."""
        compressed = self._compressed(metadata)
        if compressed.selection is not None:
            return compressed.selection.slots, compressed.selection.num_slots
        rows, num_rows = compressed.decode_rows[self.kind.ratio]
        return rows[0], num_rows[0]

    def _compressed(self, metadata: StepMetadata) -> CompressedMetadata:
        compressed = metadata.get(CompressedMetadata)
        assert compressed is not None
        return compressed
