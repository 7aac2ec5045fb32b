"""The paged cache of one rank: a row [kv_c | k_pe] for each token that this rank owns, in layers with an indexer a key,
and in layers with states memory of fixed size for each request.

Rows and keys are sharded over the DCP ranks. A state has the heads of its TP rank, or is the same on every rank.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dcpmla.cache.formats import format_name, row_width, storage_dtype
from dcpmla.cache.index_keys import index_format_name, index_row_width, index_rows, index_storage_dtype
from dcpmla.cache.items import Items
from dcpmla.cache.memory import zeros
from dcpmla.cache.plan import Cache, CachePlan
from dcpmla.cache.rows import StateRows, TokenRows
from dcpmla.config import DCPConfig, MLAConfig


class StateMemory(NamedTuple):
    """Memory of fixed size that a layer keeps for each request.

    Attributes:
        name: Name of the content.
        shape: Shape of a request's memory, rows first; the position p has row p % shape[0].
        dtype: Dtype of the rows.
        num_last, num_parts: Fields of `StateRows`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_last: int = 1
    num_parts: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a request's memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class LayerMemory(NamedTuple):
    """The memory of one layer on one rank.

    Attributes:
        row_width: Elements of a token's row, in the plan's dtype; 0 for a layer without rows.
        key_width: Elements of an index key's row, in the plan's index_dtype; 0 for a layer without keys.
        pool_size: Tokens that one index key represents.
        source: Number of the layer whose rows it attends to; None for its own rows.
        states: Memory of each request.
    """

    row_width: int = 0
    key_width: int = 0
    pool_size: int = 1
    source: int | None = None
    states: tuple[StateMemory, ...] = ()

    @classmethod
    def of(cls, config: MLAConfig, dcp: DCPConfig, dtype: torch.dtype, has_keys: bool) -> Self:
        """Return the memory of a layer of MLA that computes in a dtype.

        Raises:
            ValueError: A format that the rows or the keys cannot have.
        """
        width = row_width(storage_dtype(dcp.kv_cache_dtype, dtype), config.kv_lora_rank, config.qk_rope_head_dim)
        if config.indexer is None or not has_keys:
            return cls(width)
        key_width = index_row_width(index_storage_dtype(dcp.index_cache_dtype, dtype), config.indexer.head_dim)
        return cls(width, key_width, config.indexer.pool_size)

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
    """

    block_size: int
    layers: tuple[LayerMemory, ...]
    interleave: int = 1

    @property
    def tokens_per_gb(self) -> int:
        return 10**9 // max(1, self.bytes_per_token) * self.dcp_size

    @property
    def block_tokens(self) -> int:
        """Positions that a block id covers, over all ranks."""
        return self.block_size * self.dcp_size

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers, on one rank."""
        num_bytes = 0
        for layer in self.layers:
            num_bytes += layer.has_rows * self.block_size * layer.row_width * self.dtype.itemsize
            num_bytes += self.block_size // layer.pool_size * layer.key_width * self.index_dtype.itemsize
        return num_bytes

    @cached_property
    def bytes_per_state(self) -> int:
        """Bytes of one request's state in all layers, on each rank."""
        return sum(state.num_bytes for layer in self.layers for state in layer.states)

    @property
    def bytes_per_rank(self) -> int:
        return self.num_blocks * self.bytes_per_block + self.num_states * self.bytes_per_state

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


class LayerCache(NamedTuple):
    """The cache of one layer on one rank.

    Attributes:
        latents: Latents [num_blocks, block_size, row_width] in one of the formats of `dcpmla.cache.formats`; rows of
            width 0 in a layer of states alone.
        index_keys: Index keys [num_blocks, block_size / pool_size, index_row_width] (`dcpmla.cache.index_keys`), under
            the same block ids; None in layers without an indexer.
        states: Memory of requests [num_states, *shape], in the order of `LayerMemory.states`.
        loads: Ends of copies into the layer's memory that its next step waits for.
        starts: Events to record where its attention begins: by then the layers before it have written their memory.
    """

    latents: Tensor
    index_keys: Tensor | None = None
    states: tuple[Tensor, ...] = ()
    loads: list[torch.cuda.Event] | None = None
    starts: list[torch.cuda.Event] | None = None


class LatentCache(Cache):
    """The caches of all layers on one rank; `cache[layer]` is one layer's. All DCP ranks use the same block ids.

    Attributes:
        sizes: Plan of the cache.
        layers: Latents of each layer that has rows of its own.
        index_layers: Index keys of each layer that has some.
    """

    sizes: LatentPlan

    def __init__(self, plan: LatentPlan, device: torch.device) -> None:
        """Allocate a plan's bytes.

        Raises:
            ValueError: The device has too little memory.
        """
        plan.check_fits(device)
        self.sizes = plan
        self.per_layer: list[LayerCache] = []
        for layer in plan.layers:
            num_keys = plan.block_size // layer.pool_size
            self.per_layer.append(
                LayerCache(
                    zeros((plan.num_blocks, plan.block_size, layer.row_width), plan.dtype, device)
                    if layer.source is None
                    else self.per_layer[layer.source].latents,
                    zeros((plan.num_blocks, num_keys, layer.key_width), plan.index_dtype, device)
                    if layer.key_width
                    else None,
                    tuple(zeros((plan.num_states, *state.shape), state.dtype, device) for state in layer.states),
                )
            )
        self.loads, self.starts = ([list[torch.cuda.Event]() for _ in plan.layers] for _ in range(2))
        events = zip(self.per_layer, self.loads, self.starts, strict=True)
        self.per_layer = [cache._replace(loads=loads, starts=starts) for cache, loads, starts in events]
        own = zip(plan.layers, self.per_layer, strict=True)
        self.layers = [cache.latents for layer, cache in own if layer.has_rows]
        self.index_layers = [cache.index_keys for cache in self.per_layer if cache.index_keys is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the cache."""
        return [*self.layers, *self.index_layers, *(state for layer in self.per_layer for state in layer.states)]

    @property
    def token_rows(self) -> list[list[TokenRows]]:
        """Each layer's own latents and index keys."""
        return [
            [TokenRows.of("latents", cache.latents)] * layer.has_rows
            + ([] if cache.index_keys is None else index_rows(cache.index_keys, layer.pool_size))
            for layer, cache in zip(self.sizes.layers, self.per_layer, strict=True)
        ]

    @property
    def state_rows(self) -> list[StateRows]:
        """Each layer's memory of requests."""
        return [
            StateRows(state.name, Items.in_pages(rows.flatten(2)), state.shape[0], state.num_last, state.num_parts)
            for layer, cache in zip(self.sizes.layers, self.per_layer, strict=True)
            for state, rows in zip(layer.states, cache.states, strict=True)
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
        ValueError: No sequences, a negative length, or a format that the model cannot have.
    """
    if not seq_lens or min(seq_lens) < 0:
        raise ValueError(f"seq_lens is {seq_lens}; it must be a list of lengths that are not negative")
    layers = tuple(layers)
    return LatentPlan(
        num_blocks=max(1, sum(num_blocks(seq_len, dcp) for seq_len in seq_lens)),
        dcp_size=dcp.decode_context_parallel_size,
        dtype=storage_dtype(dcp.kv_cache_dtype, dtype),
        index_dtype=index_storage_dtype(dcp.index_cache_dtype, dtype),
        num_states=num_states if any(layer.states for layer in layers) else 0,
        num_drafts=num_drafts,
        block_size=dcp.block_size,
        layers=layers,
        interleave=dcp.cp_kv_cache_interleave_size,
    )


def num_blocks(seq_len: int, dcp: DCPConfig) -> int:
    """Return the number of blocks of a sequence: a block id covers block_size positions on each DCP rank."""
    return -(-seq_len // dcp.virtual_block_size)
