"""The cache of a model with linear attention and sparse MLA over pools, on one rank.

A pool's index key is cached with its last token, under its tokens' block id. Pools are sharded over the DCP
ranks like tokens: pool e is on rank (e // I) % W. The sums of the pool in progress are part of a request's state.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpmla.attention.linear.cache import HybridCache, HybridPlan
from dcpmla.cache.items import Items
from dcpmla.cache.memory import zeros
from dcpmla.cache.rows import StateRows


@dataclass(frozen=True, kw_only=True)
class PooledPlan(HybridPlan):
    """Sizes of caches that are not allocated yet.

    Attributes:
        index_dim: Width of index keys.
    """

    index_dim: int

    @property
    def sums_shape(self) -> tuple[int, int, int, int, int]:
        """Return the shape of a layer's `LayerCache.index_sums`."""
        return self.num_states, self.num_copies, 1, 3, self.index_dim

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one request's state in all layers, on each rank."""
        return super().bytes_per_state + len(self.latents.index_layers) * math.prod(self.sums_shape[1:]) * 4

    def allocate(self, device: torch.device) -> "PooledCache":
        """Allocate the caches (`CachePlan.allocate`)."""
        return PooledCache(self, device)


class PooledCache(HybridCache):
    """The caches of all layers on one rank; `cache[layer]` is one layer's latents and index keys, or its states."""

    def __init__(self, plan: PooledPlan, device: torch.device) -> None:
        """Allocate a plan's bytes.

        Raises:
            ValueError: The device has too little memory.
        """
        super().__init__(plan, device)
        self._sums = [zeros(plan.sums_shape, torch.float32, device) for _ in plan.latents.index_layers]
        sums = iter(self._sums)
        self.per_layer = [
            layer._replace(index_sums=next(sums)) if getattr(layer, "index_keys", None) is not None else layer
            for layer in self.per_layer
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the cache."""
        return [*super().tensors, *self._sums]

    @property
    def state_rows(self) -> list[StateRows]:
        """Linear attention's states, and the sums of pools in progress."""
        copies = self.sizes.num_copies
        sums = [StateRows("sums of pools", Items.in_pages(each.flatten(2)), copies, 1) for each in self._sums]
        return [*super().state_rows, *sums]
