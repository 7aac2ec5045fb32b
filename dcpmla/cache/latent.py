"""The paged cache of one rank: a row [kv_c | k_pe] for each token that this rank owns, in layers with an indexer a key,
and in layers with states memory of fixed size for each request. In layers with keys and values of heads these are the
row.

Rows and keys are sharded over the DCP ranks. A state has the heads of its TP rank, or is the same on every rank.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch

from dcpmla.cache.carve import Described
from dcpmla.cache.formats import format_name, row_width, storage_dtype
from dcpmla.cache.hot_set import HotSet, HotSizes
from dcpmla.cache.index_keys import index_format_name, index_row_width, index_rows, index_storage_dtype
from dcpmla.cache.layers import Cache
from dcpmla.cache.plan import CachePlan, LayerTensors, StateMemory
from dcpmla.cache.rows import TokenRows
from dcpmla.config import DCPConfig, MLAConfig


class LayerMemory(NamedTuple):
    """The memory of one layer on one rank.

    Attributes:
        row_width: Elements of a token's row, in the plan's dtype; 0 for a layer without rows.
        key_width: Elements of an index key's row, in the plan's index_dtype; 0 for a layer without keys.
        pool_size: Tokens that one index key represents.
        source: Number of the layer whose rows it attends to; None for its own rows.
        states: Memory of each request.
        topk: Number of rows that a token selects by an indexer; 0 if it attends to all, or to others.
        name, num_shares: Name of the rows' content, and the shares into which DCP groups cut it (`TokenRows`).
    """

    row_width: int = 0
    key_width: int = 0
    pool_size: int = 1
    source: int | None = None
    states: tuple[StateMemory, ...] = ()
    topk: int = 0
    name: str = "latents"
    num_shares: int = 1

    @classmethod
    def of(cls, config: MLAConfig, dcp: DCPConfig, dtype: torch.dtype, has_keys: bool) -> Self:
        """Return the memory of a layer of MLA that computes in a dtype.

        Raises:
            ValueError: A format that the rows or the keys cannot have.
        """
        width = row_width(storage_dtype(dcp.kv_cache_dtype, dtype), config.kv_lora_rank, config.qk_rope_head_dim)
        if config.indexer is None:
            return cls(width)
        if not has_keys:
            return cls(width, topk=config.indexer.topk)
        key_width = index_row_width(index_storage_dtype(dcp.index_cache_dtype, dtype), config.indexer.head_dim)
        return cls(width, key_width, config.indexer.pool_size, topk=config.indexer.topk)

    @property
    def has_rows(self) -> bool:
        """Return whether the layer has rows of its own."""
        return self.row_width > 0 and self.source is None


@dataclass(frozen=True, kw_only=True)
class LatentPlan(CachePlan):
    """Sizes of a cache of latents, index keys and states.

    Attributes:
        block_size: Tokens of a block on one rank.
        interleave: Tokens of a group that one DCP rank stores.
        layers: Memory of each layer.
        num_hot_rows: Rows of each layer that are on the device, while all latents are in host memory; 0 if they are all
            on the device.
    """

    block_size: int
    layers: tuple[LayerMemory, ...]
    interleave: int = 1
    num_hot_rows: int = 0

    @property
    def tokens_per_gb(self) -> int:
        return 10**9 // max(1, self.bytes_per_token) * self.dcp_size

    @property
    def block_tokens(self) -> int:
        """Positions that a block id covers, over all ranks."""
        return self.block_size * self.dcp_size

    @property
    def tensors(self) -> list[Described]:
        """Return the tensors of all layers, then those of hot rows."""
        return super().tensors + self.hot_tensors

    @property
    def hot_sizes(self) -> HotSizes | None:
        """Return the sizes of hot rows; None where all latents are on the device."""
        if not self.num_hot_rows:
            return None
        ((width, topk),) = {(layer.row_width, layer.topk) for layer in self.layers}
        return HotSizes(len(self.layers), self.num_hot_rows, topk, width, self.dtype)

    @property
    def hot_tensors(self) -> list[Described]:
        """Return the tensors of hot rows, none where all latents are on the device."""
        sizes = self.hot_sizes
        return [] if sizes is None else sizes.tensors(self.num_blocks * self.block_size)

    @property
    def bytes_fixed(self) -> int:
        """Return the bytes of hot rows, whatever the number of blocks."""
        tensors = [] if self.hot_sizes is None else self.hot_sizes.tensors(0)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)

    @property
    def host_bytes_per_block(self) -> int:
        """Return the bytes of a block's latents, if they are in host memory."""
        row_bytes = self.dtype.itemsize * sum(layer.row_width for layer in self.layers)
        return self.block_size * row_bytes if self.num_hot_rows else 0

    @cached_property
    def layer_tensors(self) -> list[LayerTensors]:
        layers = list[LayerTensors]()
        for layer in self.layers:
            fields: dict[str, Described] = {}
            on_host: dict[str, Described] = {}
            if layer.source is None:
                rows = on_host if self.num_hot_rows else fields
                rows["latents"] = (self.num_blocks, self.block_size, layer.row_width), self.dtype
            if layer.key_width:
                shape = self.num_blocks, self.block_size // layer.pool_size, layer.key_width
                fields["index_keys"] = shape, self.index_dtype
            layers.append(LayerTensors(fields, layer.states, layer.source, on_host))
        return layers

    def allocate(self, device: torch.device) -> "LatentCache":
        """Allocate the caches (`CachePlan.allocate`)."""
        return LatentCache(self, device)

    def __str__(self) -> str:
        has_keys = any(layer.key_width for layer in self.layers)
        index = f", index cache {index_format_name(self.index_dtype)}" if has_keys else ""
        state_mib = self.bytes_per_state / 2**20
        states = f", and {self.num_states} states of {state_mib:,.1f} MiB a rank" if self.num_states else ""
        return (
            f"{self.tokens_total:,} tokens in {self.num_blocks:,} blocks of {self.block_size} on each of "
            f"{self.dcp_size} DCP ranks: "
            f"{self.tokens_per_rank:,} tokens, {self.num_blocks * self.bytes_per_block / 2**20:,.1f} MiB a rank; "
            f"{self.num_blocks * self.bytes_per_block * self.dcp_size / 2**20:,.1f} MiB in total "
            f"({format_name(self.dtype)}{index}: {self.bytes_per_token:,} bytes a token, {self.tokens_per_gb:,} "
            f"tokens a GB of each rank){states}"
        )


class LatentCache(Cache):
    """The caches of all layers on one rank."""

    sizes: LatentPlan

    def __init__(self, plan: LatentPlan, device: torch.device, memory: torch.Tensor | None = None) -> None:
        """Allocate a plan's bytes, or take them from memory (`Cache`)."""
        super().__init__(plan, device, memory)
        if plan.hot_sizes is not None:
            start = len(self.tensors) - len(plan.hot_tensors) - plan.keeps_token_ids
            sets = HotSet.of(plan.hot_sizes, self.tensors[start : start + len(plan.hot_tensors)])
            self.per_layer = [cache._replace(hot=hot) for cache, hot in zip(self.per_layer, sets, strict=True)]
            self.hot_counts = self.tensors[start + len(plan.hot_tensors) - 1]

    @property
    def token_rows(self) -> list[list[TokenRows]]:
        """Each layer's own latents, or keys and values, and index keys."""
        return [
            [TokenRows.of(layer.name, cache.latents)._replace(num_shares=layer.num_shares)] * layer.has_rows
            + index_rows(cache.index_keys if layer.key_width else None, layer.pool_size)
            for layer, cache in zip(self.sizes.layers, self.per_layer, strict=True)
        ]

    @staticmethod
    def plan(
        config: MLAConfig,
        dcp: DCPConfig,
        num_layers: int,
        seq_lens: Sequence[int],
        dtype: torch.dtype,
        index_layers: Iterable[int] | None = None,
    ) -> LatentPlan:
        """Return the sizes of a cache for layers of MLA of one geometry (`plan_latents`).

        Args:
            index_layers: Layers of sparse MLA with an indexer of their own; None for all.
        Raises:
            ValueError: No layers, or another case of `plan_latents`.
        """
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; it must be at least 1")
        has_keys = range(num_layers) if index_layers is None else set(index_layers)
        layers = [LayerMemory.of(config, dcp, dtype, layer in has_keys) for layer in range(num_layers)]
        return plan_latents(layers, dcp, seq_lens, dtype)


def plan_latents(
    layers: Iterable[LayerMemory],
    dcp: DCPConfig,
    seq_lens: Sequence[int],
    dtype: torch.dtype,
    num_states: int = 0,
    num_drafts: int = 0,
) -> LatentPlan:
    """Return the sizes of a cache that holds sequences of the given final lengths at once.

    Args:
        dcp: Config whose kv_cache_dtype and index_cache_dtype set the formats.
        seq_lens: Tokens of each sequence, prompt and answer; each starts on a block of its own.
        dtype: Dtype that the model computes in.
        num_states: Number of requests' states; not used for layers without states.
        num_drafts: Maximum drafts of a request in a step.
    Raises:
        ValueError: No sequences, a negative length, a format that the model cannot have, or hot tokens with layers that
            do not select tokens.
    """
    layers = tuple(layers)
    num_hot_rows = -(-(dcp.kv_hot_tokens or 0) // dcp.decode_context_parallel_size)
    if num_hot_rows and not all(layer.topk and layer.has_rows and layer.pool_size == 1 for layer in layers):
        raise ValueError(
            f"kv_hot_tokens (--kv-hot-tokens) is {dcp.kv_hot_tokens}; it goes with layers that have latents of their "
            "own and attend to tokens that an indexer selects, and with no others"
        )
    plan = LatentPlan(
        num_blocks=1,
        dcp_size=dcp.decode_context_parallel_size,
        dtype=storage_dtype(dcp.kv_cache_dtype, dtype),
        index_dtype=index_storage_dtype(dcp.index_cache_dtype, dtype),
        num_states=num_states if any(layer.states for layer in layers) else 0,
        num_drafts=num_drafts,
        block_size=dcp.block_size,
        layers=layers,
        interleave=dcp.cp_kv_cache_interleave_size,
        num_hot_rows=num_hot_rows,
    )
    return plan.for_lengths(seq_lens)


def num_blocks(seq_len: int, dcp: DCPConfig) -> int:
    """Return the number of blocks of a sequence: a block id covers block_size positions on each DCP rank."""
    return -(-seq_len // dcp.virtual_block_size)
