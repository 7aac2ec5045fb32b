"""The sizes of a model's caches before they are allocated (`CachePlan`)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from dcpmla.cache.carve import Described, carved_bytes

_MANY = 64  # blocks or states of which bytes are counted: rows in pages of 64 fill whole pages


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


class LayerTensors(NamedTuple):
    """The memory of one layer's own on one rank, before it is allocated.

    Attributes:
        fields: Shape and dtype of each tensor, by the field of `layers.LayerCache`.
        states: Memory of each request.
        source: Number of an earlier layer, whose tensors the layer reads where it has none of its own; None for none.
        on_host: Shape and dtype of each tensor in host memory, which the device reads and writes in place.
    """

    fields: dict[str, Described]
    states: tuple[StateMemory, ...] = ()
    source: int | None = None
    on_host: dict[str, Described] = {}


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
    def layer_tensors(self) -> list[LayerTensors]:
        """Return the memory of each layer."""

    @property
    def tensors(self) -> list[Described]:
        """Return the shape and dtype of each tensor, layer after layer; ids of tokens are left out."""
        tensors = list[Described]()
        for layer in self.layer_tensors:
            tensors += layer.fields.values()
            tensors += [((self.num_states, *state.shape), state.dtype) for state in layer.states]
        return tensors

    @property
    def bytes_per_rank(self) -> int:
        token_ids = 4 * self.tokens_total if self.keeps_token_ids else 0
        return token_ids + sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)

    @property
    def bytes_carved(self) -> int:
        """Return the bytes of memory that a `Cache` can be cut from; ids of tokens are left out."""
        return carved_bytes(self.tensors)

    @property
    def bytes_fixed(self) -> int:
        """Return the bytes on one rank that do not depend on the number of blocks and states."""
        return 0

    @property
    def host_bytes_per_block(self) -> int:
        """Return the bytes of host memory that a block always takes, in all layers, on one rank."""
        return 0

    @cached_property
    def bytes_per_block(self) -> int:
        """Return the bytes of a block in all layers, on one rank."""
        return (replace(self, num_blocks=self.num_blocks + _MANY).bytes_per_rank - self.bytes_per_rank) // _MANY

    @cached_property
    def bytes_per_state(self) -> int:
        """Return the bytes of a request's state in all layers, on each rank."""
        return (replace(self, num_states=self.num_states + _MANY).bytes_per_rank - self.bytes_per_rank) // _MANY

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

    def for_lengths(self, seq_lens: Sequence[int]) -> Self:
        """Return the plan with blocks for sequences of the given final lengths, each of which starts on a block of its
        own.

        Raises:
            ValueError: No sequences, or a negative length.
        """
        if not seq_lens or min(seq_lens) < 0:
            raise ValueError(f"seq_lens is {seq_lens}; it must be a list of lengths that are not negative")
        return replace(self, num_blocks=max(1, sum(-(-seq_len // self.block_tokens) for seq_len in seq_lens)))

    @abstractmethod
    def allocate(self, device: torch.device) -> Any:
        """Allocate the `layers.Cache`, all zeros: an MTP module also reads rows that it has not written, which must not
        be NaN.

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


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
