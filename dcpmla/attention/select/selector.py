"""The selection of the tokens or entries that each token attends to, by an indexer's queries and cached keys."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dcpmla.attention.select.blocks import Candidates
from dcpmla.attention.select.calls import IndexQueries
from dcpmla.attention.select.candidates import candidate_width
from dcpmla.attention.select.scores import index_scores
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.attention.select.topk import choose_tokens, local_candidates
from dcpmla.attention.step.metadata import DecodeMetadata
from dcpmla.cache.hot import fetch_hot_rows
from dcpmla.cache.index_keys import index_row_width, index_storage_dtype
from dcpmla.cache.layers import LayerCache
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig
from dcpmla.indexer_config import IndexerConfig

WORKSPACE_BYTES = 128 << 20  # bound of scores, and of all ranks' candidates


class TokenSelector:
    """Selector of the best keys before each token, by an indexer's scores.

    Each rank scores its own keys; one exchange sends its best keys to all ranks, which make the same choice.

    Args:
        config: Sizes of the indexer.
        dcp: Layout of the cache.
        dcp_rank: Rank in the DCP group.
        exchange: Exchange of candidates in that group.
    Raises:
        ValueError: The config asks for the Hadamard transform, but the width is not a power of two.
    """

    def __init__(self, config: IndexerConfig, dcp: DCPConfig, dcp_rank: int, exchange: Exchange) -> None:
        self.config, self.dcp, self.owner, self.exchange = config, dcp, dcp.owner(dcp_rank), exchange
        if self.dcp.index_hadamard and config.head_dim & (config.head_dim - 1):
            raise ValueError(
                f"index_hadamard (--index-hadamard) takes a power of two; the indexer's head_dim is {config.head_dim}"
            )

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        index_keys: Tensor,
        sparse: SparseMetadata,
        slot_table: Tensor,
        selection: SelectedTokens,
        candidates: Candidates | None = None,
        after_scores: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the selection of T tokens by their queries [T, H, D] and weights [T, H] float32. Collective.

        Args:
            index_keys: Index keys of the layer [num_blocks, block_size, width] (`dcpmla.cache.index_keys`).
            slot_table: Block table of the cache that slots are in: sparse.block_table, or the same for another cache.
            candidates: Blocks to choose, too, or to select among; None for all keys.
            after_scores: Function that is called after the scores of each tile of tokens.
        """
        topk, owner = self.config.num_pools, self.owner
        num_blocks = 0 if candidates is None else candidates.blocks.shape[1]
        tile = self._tile_tokens(sparse.block_table.shape[1] * index_keys.shape[1], num_blocks)
        for index in range(-(-len(q) // tile)):  # a compiler guards the number of tiles, not of tokens
            tokens = slice(index * tile, (index + 1) * tile)
            part, chosen = sparse.rows(tokens), selection.rows(tokens)
            lens = part.seq_lens, part.local_seq_lens
            columns = part.block_table, part.request, *lens
            scores = index_scores(IndexQueries(q[tokens], weights[tokens], index_keys, *columns, topk))
            after_scores()
            if candidates is not None and candidates.is_source:
                candidates.rows(tokens).choose(scores, lens, owner, self.exchange.gather_candidates)
            elif candidates is not None:
                candidates.rows(tokens).exclude_(scores, owner)
            best = self.exchange.gather_candidates(local_candidates(scores, *lens, topk, owner))
            cache = SlotLayout(slot_table, part.request, index_keys.shape[1], owner)
            choose_tokens(best.flatten(1), cache, chosen)

    def workspace_bytes(self, num_tokens: int, element_size: int, score_bytes: int = WORKSPACE_BYTES) -> int:
        """Return the peak bytes of a step's selection: all tokens' queries, as projected in elements of this size and
        as scored; at most score_bytes of a tile's scores, and its candidates on this rank, on all ranks, and in the
        exchange.
        """
        query_bytes = num_tokens * self.config.num_heads * self.config.head_dim * element_size
        return 2 * query_bytes + 4 * min(score_bytes, WORKSPACE_BYTES)

    def check_cache(self, index_keys: Tensor | None, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Raise ValueError unless index_keys is a cache of num_blocks for this indexer, which computes in dtype."""
        storage = index_storage_dtype(self.dcp.index_cache_dtype, dtype)
        shape = num_blocks, block_size, index_row_width(storage, self.config.head_dim)
        is_right = index_keys is not None and tuple(index_keys.shape) == shape and index_keys.dtype == storage
        if index_keys is None or not is_right or not index_keys.is_contiguous():
            cached = "None"
            if index_keys is not None:
                cached = f"{index_keys.dtype} {tuple(index_keys.shape)}, strides {index_keys.stride()}"
            asked = f"index_cache_dtype (--index-cache-dtype) {self.dcp.index_cache_dtype!r}"
            raise ValueError(f"cache.index_keys is {cached}; expected {storage} {shape}, contiguous, for {asked}")

    def _tile_tokens(self, num_columns: int, num_blocks: int) -> int:
        """Return how many tokens to select for at a time, and to choose num_blocks for. All ranks get the same number,
        since each tile makes an exchange.
        """
        width = max(candidate_width(self.config.num_pools, num_columns), num_blocks)
        candidate_bytes = 8 * width * self.dcp.decode_context_parallel_size
        return max(1, WORKSPACE_BYTES // max(4 * num_columns, candidate_bytes))


def hot_rows(cache: LayerCache, decode: DecodeMetadata) -> tuple[LayerCache, DecodeMetadata]:
    """Return a cache and metadata to attend to copies of selected rows on the device, in the same order.

    Args:
        cache: Cache of a layer whose latents are in host memory.
        decode: Metadata of at most `HotSet.max_tokens` tokens (`selected_rows`).
    """
    assert cache.hot is not None
    table = fetch_hot_rows(cache.hot, cache.latents, decode.block_table, decode.local_seq_lens)
    return cache._replace(latents=cache.hot.pool), replace(decode, block_table=table)


def selected_rows(
    kv_cache: Tensor, selection: SelectedTokens, workspace: Tensor | None
) -> tuple[Tensor, DecodeMetadata]:
    """Return the cache and metadata that `dcp_mla_decode` takes to attend to selected tokens: each query token is a
    request, whose pages of one row are those selected for it.

    Args:
        kv_cache: Cached rows [num_blocks, block_size, width]; blocks may be apart from each other.
        selection: Selection of the query tokens.
        workspace: Workspace of `DecodeMetadata`.
    """
    slots, (num_blocks, block_size, width) = selection.slots, kv_cache.shape
    block_stride, row_stride, _ = kv_cache.stride()
    if block_stride == block_size * row_stride:
        pages = kv_cache.view(-1, 1, width)
    else:
        # Pages begin every few elements, and each row of the cache begins with a page.
        unit = math.gcd(block_stride, row_stride)
        num_pages = ((num_blocks - 1) * block_stride + (block_size - 1) * row_stride) // unit + 1
        pages = kv_cache.as_strided((num_pages, 1, width), (unit, row_stride, 1))
        block = slots // block_size
        slots = (slots * (row_stride // unit)).add_(block, alpha=(block_stride - block_size * row_stride) // unit)
    return pages, DecodeMetadata(slots, selection.num_slots, None, 1, workspace)
