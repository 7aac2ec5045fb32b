"""The sizes of a model's caches before they are allocated (`CachePlan`), and the caches of all layers (`Cache`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcpmla.cache.items import Items
from dcpmla.cache.rows import StateRows, TokenRows


@dataclass(frozen=True, kw_only=True)
class CachePlan(ABC):
    """Sizes of caches that are not allocated yet. Bytes and tokens count one DCP group.

    Attributes:
        num_blocks: Number of blocks that requests share; a block id is the same on all DCP ranks.
        dcp_size: Number of ranks that share the cache.
        dtype, index_dtype: Dtypes of the tensors of cached rows and of index keys, which name their formats
            (`dcpmla.cache.formats`, `dcpmla.cache.index_keys`).
        num_states: Number of requests' states, memory of fixed size, remembered ones included; 0 if requests need only
            blocks.
        num_drafts: Maximum tokens of a request in a step that may be rejected, over which a state can be rolled back.
        keeps_token_ids: Whether each rank also keeps an id of every token, for memories of n-grams.
    """

    num_blocks: int
    dcp_size: int
    dtype: torch.dtype
    index_dtype: torch.dtype = torch.uint8
    num_states: int = 0
    num_drafts: int = 0
    keeps_token_ids: bool = False

    @property
    def num_copies(self) -> int:
        """Copies of a request's memory: after its last token, and after each that may turn out to be its last."""
        return 1 + self.num_drafts

    @property
    @abstractmethod
    def block_tokens(self) -> int:
        """Return how many positions a block id covers, over all ranks."""

    @property
    @abstractmethod
    def interleave(self) -> int:
        """Return the number of successive rows of a sequence that one DCP rank stores."""

    @property
    @abstractmethod
    def bytes_per_block(self) -> int:
        """Return the bytes of a block in all layers, on one rank."""

    @property
    def bytes_per_state(self) -> int:
        """Return the bytes of a request's state in all layers, on each rank."""
        return 0

    @property
    @abstractmethod
    def bytes_per_rank(self) -> int: ...

    @property
    def bytes_total(self) -> int:
        return self.bytes_per_rank * self.dcp_size

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token of context in all layers, on the rank that owns it; states are left out."""
        return -(-self.bytes_per_block * self.dcp_size // self.block_tokens)

    @property
    def tokens_total(self) -> int:
        """Return how many tokens of context the group holds: W times a rank's tokens."""
        return self.num_blocks * self.block_tokens

    @property
    def tokens_per_rank(self) -> int:
        return self.tokens_total // self.dcp_size

    @property
    def tokens_per_gb(self) -> int:
        """Return how many tokens of context the group holds in 10^9 bytes of each rank, states left out. A model with
        windows alone has blocks without bytes; each counts as one byte.
        """
        return 10**9 // max(1, self.bytes_per_block) * self.block_tokens

    @abstractmethod
    def allocate(self, device: torch.device) -> "Cache":
        """Allocate the caches, all zeros: an MTP module also reads rows that it has not written, which must not be NaN.

        Raises:
            ValueError: The device has too little memory.
        """

    def check_fits(self, device: torch.device) -> None:
        """Raise ValueError if a device has too little memory for a rank's bytes."""
        free = _free_bytes(device)
        if self.bytes_per_rank > free:
            raise ValueError(
                f"cache: {self.bytes_per_rank:,} bytes a rank ({self}) do not fit into the {free:,} bytes free on "
                f"{device}; shorten the context (--max-model-len, --max-new-tokens), send fewer prompts, shard over "
                "more ranks (-dcp), or keep 8 bits of a value (--kv-cache-dtype)"
            )


class Cache(ABC):
    """The caches of all layers on one rank; `cache[layer]` is one layer's.

    Attributes:
        sizes: Plan of the cache.
        per_layer: Memory of each layer.
        loads: For each layer, ends of copies into its memory that its next step waits for.
        starts: For each layer, events to record where its attention begins.
        token_ids: Ids of tokens, int32 [num_blocks, block_tokens], the same on all ranks; None if not kept.
    """

    sizes: CachePlan
    per_layer: Sequence[Any]
    loads: Sequence[list[torch.cuda.Event]]
    starts: Sequence[list[torch.cuda.Event]]
    token_ids: Tensor | None = None

    def __getitem__(self, layer: int) -> Any:
        return self.per_layer[layer]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.per_layer)

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all memory of the cache."""

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
        return []

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


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
