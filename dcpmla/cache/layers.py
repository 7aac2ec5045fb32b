"""The caches of all layers on one rank (`Cache`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.cache.carve import carve
from dcpmla.cache.host_rows import host_tensor
from dcpmla.cache.hot_set import HotSet
from dcpmla.cache.items import Items
from dcpmla.cache.memory import zeros
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.rows import StateRows, TokenRows


class LayerCache(NamedTuple):
    """The cache of one layer on one rank.

    Attributes:
        latents: Latents [num_blocks, block_size, row_width] in one of the formats of `dcpmla.cache.formats`; rows of
            width 0 in a layer of states alone. In layers with keys and values of heads those, in the model's dtype,
            as elements of the cache's. In DeepSeek-V4 rows of windows, then of entries
            (`dcpmla.cache.shared_format`).
        index_keys: Index keys [num_blocks, keys of a block, index_row_width] (`dcpmla.cache.index_keys`), under the
            same block ids; None in layers without an indexer.
        states: Memory of requests [num_states, *shape], in the order of `LayerTensors.states`.
        loads: Ends of copies into the layer's memory that its next step waits for.
        starts: Events to record where its attention begins: by then the layers before it have written their memory.
        hot: Latents that the device has copies of; None where all latents are in its memory.
    """

    latents: Tensor
    index_keys: Tensor | None = None
    states: tuple[Tensor, ...] = ()
    loads: list[torch.cuda.Event] | None = None
    starts: list[torch.cuda.Event] | None = None
    hot: HotSet | None = None


class Cache(ABC):
    """The caches of all layers on one rank; `cache[layer]` is one layer's. All DCP ranks use the same block ids.

    Attributes:
        sizes: Plan of the cache.
        per_layer: Memory of each layer.
        tensors: All memory of the cache on its device.
        loads: For each layer, ends of copies into its memory that its next step waits for.
        starts: For each layer, events to record where its attention begins.
        token_ids: Ids of tokens, int32 [num_blocks, block_tokens], the same on all ranks; None if not kept.
        hot_counts: Counts of each layer's hot rows [num_layers, 4] int64 (`HotSet.counts`); None without hot rows.
    """

    sizes: CachePlan
    hot_counts: Tensor | None = None

    def __init__(self, plan: CachePlan, device: torch.device, memory: Tensor | None = None) -> None:
        """Allocate a plan's bytes, or take them from memory.

        Args:
            memory: Bytes of an engine's own cache, contiguous, at least `plan.bytes_carved`; None to allocate.
        Raises:
            ValueError: The device, or the memory, has too little room.
        """
        self.sizes, self.per_layer = plan, list[LayerCache]()
        if memory is None:
            plan.check_fits(device)
            self.tensors = [zeros(*described, device) for described in plan.tensors]
        else:
            self.tensors = carve(memory, plan.tensors)
        new, layers = iter(self.tensors), plan.layer_tensors
        self.loads, self.starts = ([list[torch.cuda.Event]() for _ in layers] for _ in range(2))
        for (fields, states, source, on_host), loads, starts in zip(layers, self.loads, self.starts, strict=True):
            shared = {} if source is None else self.per_layer[source]._asdict()
            own: dict[str, Any] = {field: next(new) for field in fields}
            own |= {field: host_tensor(*described, device) for field, described in on_host.items()}
            own["states"] = tuple(next(new) for _ in states)
            self.per_layer.append(LayerCache(**shared | own | {"loads": loads, "starts": starts}))
        self.token_ids: Tensor | None = None
        if plan.keeps_token_ids:
            self.token_ids = zeros((plan.num_blocks, plan.block_tokens), torch.int32, device)
            self.tensors.append(self.token_ids)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.per_layer[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.per_layer)

    @property
    @abstractmethod
    def token_rows(self) -> list[list[TokenRows]]:
        """Return the rows under block ids in each layer, none where a layer reads an earlier one's."""

    @property
    def shared_rows(self) -> list[TokenRows]:
        """Return the rows under block ids that belong to no layer."""
        ids = self.token_ids
        return [] if ids is None else [TokenRows.of("token ids", ids[..., None], is_shared=True)]

    @property
    def state_rows(self) -> list[StateRows]:
        """Return the rows of states in all layers."""
        return [rows for number in range(len(self.per_layer)) for rows in self.layer_states(number)]

    def layer_states(self, number: int) -> list[StateRows]:
        """Return the rows of states in a layer."""
        memory = zip(self.sizes.layer_tensors[number].states, self.per_layer[number].states, strict=True)
        return [
            StateRows(state.name, Items.in_pages(rows.flatten(2)), state.shape[0], state.num_last, state.num_parts)
            for state, rows in memory
        ]

    @property
    def block_items(self) -> list[list[Items]]:
        """Return the memory of blocks in each layer."""
        return [[each.blocks for each in rows] for rows in self.token_rows]

    @property
    def state_items(self) -> list[Items]:
        """Return the memory of states in all layers."""
        return [each.states for each in self.state_rows]

    def copy_state(self, source: int, target: int) -> None:
        """Copy a request's state, which with the blocks is enough to continue a computation."""
        pages = [items.pages for items in self.state_items]
        torch._foreach_copy_([page[target] for page in pages], [page[source] for page in pages])
