"""The paged latent cache of one rank: a row [kv_c | k_pe] for each token that this rank owns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.cache.formats import format_name, row_width, storage_dtype
from dcpmla.cache.index_keys import index_format_name, index_row_width, index_rows, index_storage_dtype
from dcpmla.cache.memory import zeros
from dcpmla.cache.plan import Cache, CachePlan
from dcpmla.cache.rows import TokenRows
from dcpmla.config import DCPConfig, MLAConfig


@dataclass(frozen=True, kw_only=True)
class LatentPlan(CachePlan):
    """Sizes of a cache of latents: a row for each token in each layer, and index keys in layers with an indexer.

    Attributes:
        interleave: Tokens of a group that one DCP rank stores.
        row_width, dtype: Elements of a row and dtype of the cache's tensors; the dtype determines the format
            (`dcpmla.cache.formats`).
        window_layers, window_row_width: Layers whose rows have another width, and that width.
        index_layers: Layers of sparse MLA that also have an index cache, ascending.
        sources: For each layer, the layer whose latents it attends to; empty if each has its own.
        index_row_width, index_dtype: Row width and dtype of the index caches' tensors (`dcpmla.cache.index_keys`).
        pool_size: Tokens that one index key represents.
    """

    num_layers: int
    block_size: int
    row_width: int
    interleave: int = 1
    index_layers: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    index_row_width: int = 0
    window_layers: tuple[int, ...] = ()
    window_row_width: int = 0

    @property
    def row_widths(self) -> list[int]:
        """Return the elements of a row in each layer."""
        windows = self.window_layers
        return [self.window_row_width if layer in windows else self.row_width for layer in range(self.num_layers)]

    pool_size: int = 1

    @property
    def source_of_layers(self) -> Sequence[int]:
        """Return for each layer the layer whose latents it attends to."""
        return self.sources or range(self.num_layers)

    @property
    def tokens_per_gb(self) -> int:
        return 10**9 // self.bytes_per_token * self.dcp_size

    @property
    def block_tokens(self) -> int:
        """Positions that a block id covers, over all ranks."""
        return self.block_size * self.dcp_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers, on one rank."""
        widths = self.row_widths
        latents = sum(widths[source] for source in set(self.source_of_layers)) * self.dtype.itemsize
        key = len(self.index_layers) * self.index_row_width * self.index_dtype.itemsize
        return self.block_size * latents + self.block_size // self.pool_size * key

    @property
    def bytes_per_rank(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def allocate(self, device: torch.device) -> "LatentCache":
        """Allocate the caches (`CachePlan.allocate`)."""
        return LatentCache(self, device)

    def __str__(self) -> str:
        index = f", index cache {index_format_name(self.index_dtype)}" if self.index_layers else ""
        return (
            f"{self.tokens_total:,} tokens in {self.num_blocks:,} blocks of {self.block_size} on each of "
            f"{self.dcp_size} DCP ranks: "
            f"{self.tokens_per_rank:,} tokens, {self.bytes_per_rank / 2**20:,.1f} MiB a rank; "
            f"{self.bytes_total / 2**20:,.1f} MiB in total "
            f"({format_name(self.dtype)}{index}: {self.bytes_per_token:,} bytes a token, {self.tokens_per_gb:,} "
            "tokens a GB of each rank)"
        )


class LayerCache(NamedTuple):
    """The cache of one layer on one rank.

    Attributes:
        latents: Latents [num_blocks, block_size, row_width] in one of the formats of `dcpmla.cache.formats`.
        index_keys: Index keys [num_blocks, block_size / pool_size, index_row_width] (`dcpmla.cache.index_keys`), under
            the same block ids; None in layers without an indexer.
        index_sums: Sums of index keys in progress [num_states, num_copies, 1, 3, D] float32
            (`attention/pooled/compressor.py`); None without pools.
        loads: Ends of copies into the layer's memory that its next step waits for.
        starts: Events to record where its attention begins: by then the layers before it have written their memory.
    """

    latents: Tensor
    index_keys: Tensor | None = None
    index_sums: Tensor | None = None
    loads: list[torch.cuda.Event] | None = None
    starts: list[torch.cuda.Event] | None = None


class LatentCache(Cache):
    """The caches of all layers on one rank; `cache[layer]` is one layer's. All DCP ranks use the same block ids.

    Attributes:
        sizes: Plan of the cache.
        layers: Latent caches, one per layer that has latents of its own.
        index_layers: Index caches of sparse MLA, one for each of sizes.index_layers.
    """

    sizes: LatentPlan

    def __init__(self, plan: LatentPlan, device: torch.device) -> None:
        """Allocate a plan's bytes.

        Raises:
            ValueError: The device has too little memory.
        """
        plan.check_fits(device)
        self.sizes = plan
        blocks = plan.num_blocks, plan.block_size
        own, widths = sorted(set(plan.source_of_layers)), plan.row_widths
        self.layers = [zeros((*blocks, widths[layer]), plan.dtype, device) for layer in own]
        latents = dict(zip(own, self.layers, strict=True))
        keys = plan.num_blocks, plan.block_size // plan.pool_size, plan.index_row_width
        self.index_layers = [zeros(keys, plan.index_dtype, device) for _ in plan.index_layers]
        index_keys = dict(zip(plan.index_layers, self.index_layers, strict=True))
        self.loads, self.starts = ([list[torch.cuda.Event]() for _ in plan.source_of_layers] for _ in range(2))
        self.per_layer = [
            LayerCache(latents[source], index_keys.get(layer), loads=self.loads[layer], starts=self.starts[layer])
            for layer, source in enumerate(plan.source_of_layers)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the cache."""
        return [*self.layers, *self.index_layers]

    @property
    def token_rows(self) -> list[list[TokenRows]]:
        """Each layer's own latents and index keys."""
        rows: list[list[TokenRows]] = [[] for _ in self.per_layer]
        for layer, latents in zip(sorted(set(self.sizes.source_of_layers)), self.layers, strict=True):
            rows[layer].append(TokenRows.of("latents", latents))
        for layer, keys in zip(self.sizes.index_layers, self.index_layers, strict=True):
            rows[layer] += index_rows(keys, self.sizes.pool_size)
        return rows

    @staticmethod
    def plan(
        config: MLAConfig,
        dcp: DCPConfig,
        num_layers: int,
        seq_lens: Sequence[int],
        dtype: torch.dtype,
        index_layers: Iterable[int] | None = None,
        sources: tuple[int, ...] = (),
    ) -> LatentPlan:
        """Return the sizes of a cache that holds sequences of the given final lengths at once.

        Args:
            dcp: Config whose kv_cache_dtype and index_cache_dtype set the formats.
            seq_lens: Tokens of each sequence, prompt and answer; each starts on a block of its own.
            dtype: Dtype that the model computes in.
            index_layers: Layers of sparse MLA with an indexer of their own; None for all.
            sources: Field of `LatentPlan`.
        Raises:
            ValueError: No layers, no sequences, a negative length, or a format that the model cannot have.
        """
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; it must be at least 1")
        if not seq_lens or min(seq_lens) < 0:
            raise ValueError(f"seq_lens is {seq_lens}; it must be a list of lengths that are not negative")
        storage, indexer = storage_dtype(dcp.kv_cache_dtype, dtype), config.indexer
        index_storage = index_storage_dtype(dcp.index_cache_dtype, dtype)
        return LatentPlan(
            num_layers=num_layers,
            num_blocks=max(1, sum(num_blocks(seq_len, dcp) for seq_len in seq_lens)),
            block_size=dcp.block_size,
            row_width=row_width(storage, config.kv_lora_rank, config.qk_rope_head_dim),
            dtype=storage,
            dcp_size=dcp.decode_context_parallel_size,
            interleave=dcp.cp_kv_cache_interleave_size,
            index_layers=() if indexer is None else tuple(range(num_layers) if index_layers is None else index_layers),
            sources=sources,
            index_row_width=0 if indexer is None else index_row_width(index_storage, indexer.head_dim),
            index_dtype=index_storage,
            pool_size=1 if indexer is None else indexer.pool_size,
        )


def num_blocks(seq_len: int, dcp: DCPConfig) -> int:
    """Return the number of blocks of a sequence: a block id covers block_size positions on each DCP rank."""
    return -(-seq_len // dcp.virtual_block_size)
