"""The cache of a model that mixes layers of MLA and of linear attention, on one rank: latents under block ids, and one
state a request.

Latents are sharded over the DCP ranks. A state has the heads of its TP rank, so it needs no exchange.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcpmla.attention.linear.calls import DeltaState
from dcpmla.attention.linear.config import DeltaConfig
from dcpmla.cache.items import Items
from dcpmla.cache.latent import LatentCache, LatentPlan
from dcpmla.cache.memory import zeros
from dcpmla.cache.plan import Cache, CachePlan
from dcpmla.cache.rows import StateRows, TokenRows


@dataclass(frozen=True, kw_only=True)
class HybridPlan(CachePlan):
    """Sizes of caches that are not allocated yet.

    Attributes:
        latents: Sizes of the cache of a block in the layers of MLA.
        delta: Geometry of the layers of linear attention.
        num_heads: Heads of linear attention on a TP rank.
        is_linear: Whether each layer of the model has linear attention.
        state_dtype: Dtype of recent inputs of the convolution.
        num_drafts: Maximum tokens of a request in a step that may be rejected, over which a state can be rolled back.
    """

    latents: LatentPlan
    delta: DeltaConfig
    num_heads: int
    is_linear: tuple[bool, ...]
    state_dtype: torch.dtype
    num_drafts: int = 0

    @property
    def num_copies(self) -> int:
        """Copies of a request's memory: after its last token, and after each that may turn out to be its last."""
        return 1 + self.num_drafts

    @property
    def recent_shape(self) -> tuple[int, int, int]:
        """Return the shape of a layer's `DeltaState.recent`."""
        num_recent = self.delta.conv_size - 1 + self.num_drafts
        return self.num_states, num_recent, 3 * self.num_heads * self.delta.head_dim

    @property
    def memory_shape(self) -> tuple[int, int, int, int, int]:
        """Return the shape of a layer's `DeltaState.memory`."""
        return self.num_states, self.num_copies, self.num_heads, self.delta.head_dim, self.delta.head_dim

    @property
    def interleave(self) -> int:
        return self.latents.interleave

    @property
    def block_tokens(self) -> int:
        """Positions that a block id covers, over all ranks."""
        return self.latents.block_tokens

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers, on one rank."""
        return self.latents.bytes_per_block

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one request's state in all layers, on each rank."""
        recent = math.prod(self.recent_shape[1:]) * self.state_dtype.itemsize
        return sum(self.is_linear) * (recent + math.prod(self.memory_shape[1:]) * 4)

    @property
    def bytes_per_rank(self) -> int:
        return self.num_blocks * self.bytes_per_block + self.num_states * self.bytes_per_state

    def allocate(self, device: torch.device) -> "HybridCache":
        """Allocate the caches (`CachePlan.allocate`)."""
        return HybridCache(self, device)

    def __str__(self) -> str:
        states = f"{self.num_states} states of {self.bytes_per_state / 2**20:,.1f} MiB a rank"
        return f"{replace(self.latents, num_blocks=self.num_blocks)}, and {states}"


class HybridCache(Cache):
    """The caches of all layers on one rank; `cache[layer]` is one layer's latents, or its states.

    Attributes:
        sizes: Plan of the caches.
    """

    sizes: HybridPlan

    def __init__(self, plan: HybridPlan, device: torch.device) -> None:
        """Allocate a plan's bytes.

        Raises:
            ValueError: The device has too little memory.
        """
        plan.check_fits(device)
        self.sizes, self._is_linear = plan, plan.is_linear
        self._latents = LatentCache(replace(plan.latents, num_blocks=plan.num_blocks), device)
        self._states = [
            DeltaState(
                zeros(plan.recent_shape, plan.state_dtype, device),
                zeros(plan.memory_shape, torch.float32, device),
            )
            for _ in range(sum(plan.is_linear))
        ]
        latents, states = iter(self._latents), iter(self._states)
        self.per_layer = [next(states) if is_linear else next(latents) for is_linear in plan.is_linear]
        loads, starts = iter(self._latents.loads), iter(self._latents.starts)
        self.loads = [list[torch.cuda.Event]() if is_linear else next(loads) for is_linear in plan.is_linear]
        self.starts = [list[torch.cuda.Event]() if is_linear else next(starts) for is_linear in plan.is_linear]

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the cache."""
        return [*self._latents.tensors, *(tensor for state in self._states for tensor in state)]

    @property
    def token_rows(self) -> list[list[TokenRows]]:
        """Latents and index keys of layers of MLA."""
        latents = iter(self._latents.token_rows)
        return [[] if is_linear else next(latents) for is_linear in self._is_linear]

    @property
    def state_rows(self) -> list[StateRows]:
        """States of layers of linear attention: queries, keys and values of the convolution, and memories."""
        plan, rows = self.sizes, list[StateRows]()
        for recent, memory in self._states:
            num_recent = plan.delta.conv_size - 1
            rows.append(StateRows("inputs of convolutions", _rows(recent), recent.shape[1], num_recent, num_parts=3))
            rows.append(StateRows("memories", _rows(memory), plan.num_copies, 1, num_parts=1))
        return rows


def _rows(states: Tensor) -> Items:
    """Return the rows of states [num_states, num_rows, ...]."""
    return Items.in_pages(states.flatten(2))
