"""The choice of what each token attends to, tokens or entries, from an indexer's queries and cached keys."""

import torch
from torch import Tensor

from dcpmla.attention.sparse.scores import index_scores
from dcpmla.attention.sparse.topk import candidate_width, choose_tokens, local_candidates
from dcpmla.attention.step import DecodeMetadata, SelectedTokens, SparseMetadata
from dcpmla.cache.index_keys import index_row_width, index_storage_dtype
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig, IndexerConfig

_WORKSPACE_BYTES = 128 << 20  # of scores, and of all ranks' candidates


class TokenSelector:
    """The scorer of what comes before each token, and the selector of the best.

    Each rank scores its own keys; one exchange brings its best ones to all, and each makes the same choice.

    Args:
        config: of the indexer.
        dcp: layout, and format of the index cache.
        dcp_rank: this rank's number in the DCP group.
        exchange: the layer's.
    Raises:
        ValueError: a Hadamard transform of a width that is not a power of two.
    """

    def __init__(self, config: IndexerConfig, dcp: DCPConfig, dcp_rank: int, exchange: Exchange) -> None:
        self.config, self.dcp, self.dcp_rank, self.exchange = config, dcp, dcp_rank, exchange
        if dcp.index_hadamard and config.head_dim & (config.head_dim - 1):
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
    ) -> None:
        """Write the selection of T tokens by their queries [T, H, D] and weights [T, H] float32. Collective.

        Args:
            index_keys: [num_blocks, block_size, width] of the layer (`dcpmla.cache.index_keys`).
            slot_table: sparse.block_table, or the same in blocks of another cache: that of the slots.
        """
        topk, size = self.config.topk, self.dcp.decode_context_parallel_size
        layout = self.dcp_rank, size, self.dcp.cp_kv_cache_interleave_size
        tile = self._tile_tokens(sparse.block_table.shape[1] * index_keys.shape[1])
        for index in range(-(-len(q) // tile)):  # a compiler guards their number, and not that of the tokens
            tokens = slice(index * tile, (index + 1) * tile)
            some, chosen = sparse.rows(tokens), selection.rows(tokens)
            lens = some.seq_lens, some.local_seq_lens
            scores = index_scores(q[tokens], weights[tokens], index_keys, some.block_table, some.request, *lens, topk)
            candidates = self.exchange.gather_candidates(local_candidates(scores, *lens, topk, *layout))
            where = slot_table, some.request, index_keys.shape[1], *layout
            written = chosen.positions, chosen.slots, chosen.num_slots
            choose_tokens(candidates.flatten(1), *where, chosen.num_first, *written)

    def workspace_bytes(self, num_tokens: int, element_size: int) -> int:
        """Return what a step's selection takes at most at a time: all tokens' queries, as projected in elements of that
        size and as scored; of a tile scores, and candidates of this rank, of all ranks, and as they travel.
        """
        query_bytes = num_tokens * self.config.num_heads * self.config.head_dim * element_size
        return 2 * query_bytes + 4 * _WORKSPACE_BYTES

    def check_cache(self, index_keys: Tensor | None, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Raise ValueError unless index_keys is a cache of so many blocks for this indexer, which computes in dtype."""
        storage = index_storage_dtype(self.dcp.index_cache_dtype, dtype)
        shape = num_blocks, block_size, index_row_width(storage, self.config.head_dim)
        is_right = index_keys is not None and tuple(index_keys.shape) == shape and index_keys.dtype == storage
        if index_keys is None or not is_right or not index_keys.is_contiguous():
            given = "None"
            if index_keys is not None:
                given = f"{index_keys.dtype} {tuple(index_keys.shape)}, strides {index_keys.stride()}"
            asked = f"index_cache_dtype (--index-cache-dtype) {self.dcp.index_cache_dtype!r}"
            raise ValueError(f"cache.index_keys is {given}; expected {storage} {shape}, contiguous, for {asked}")

    def _tile_tokens(self, num_columns: int) -> int:
        """Return how many tokens to select for at a time: from numbers that are the same on all ranks, since each tile
        makes an exchange.
        """
        candidate_bytes = 8 * candidate_width(self.config.topk, num_columns) * self.dcp.decode_context_parallel_size
        return max(1, _WORKSPACE_BYTES // max(4 * num_columns, candidate_bytes))


def selected_rows(
    kv_cache: Tensor, selection: SelectedTokens, workspace: Tensor | None
) -> tuple[Tensor, DecodeMetadata]:
    """Return the cache and metadata that `dcp_mla_decode` takes to attend to selected tokens: each query token is a
    request, whose pages of one row are those selected for it.

    Args:
        kv_cache: [num_blocks, block_size, width], contiguous blocks.
        selection: of the query tokens.
        workspace: as in `DecodeMetadata`.
    """
    pages = kv_cache.view(-1, 1, kv_cache.shape[-1])
    return pages, DecodeMetadata(selection.slots, selection.num_slots, None, 1, workspace)
