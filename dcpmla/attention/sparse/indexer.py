"""The indexer: which tokens each token attends to. `Indexer.forward` reads top to bottom."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from dcpmla.attention.sparse.candidates import candidate_width
from dcpmla.attention.sparse.metadata import SelectedTokens, SparseMetadata
from dcpmla.attention.sparse.projections import finish_index_keys, finish_index_queries
from dcpmla.attention.sparse.scores import index_scores
from dcpmla.attention.sparse.topk import choose_tokens, local_candidates
from dcpmla.cache.index_keys import index_row_width, index_storage_dtype
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig, IndexerConfig, MLAConfig
from dcpmla.parallel.linear import Weight, fill, read_weight

_WORKSPACE_BYTES = 128 << 20  # of scores, and of all ranks' candidates


class Indexer(nn.Module):
    """Scores all tokens before each token, and selects the best.

    Every rank holds all of it and computes the same queries. Keys are cached where their token's latent is, so each
    rank scores its own tokens; one exchange brings its best ones to all, and each makes the same choice.

    Args:
        config: of the layer, with an indexer.
        dcp: layout, and format of the index cache.
        dcp_rank: this rank's place in the DCP group.
        exchange: the layer's.
        dtype, device: of the parameters; they hold nothing until `load_weights`.
    Raises:
        ValueError: an indexer in a layer that does not compress queries; a Hadamard transform of a width that is no
    power of two.
    Source: DeepSeek-V3.2, section 2.1; names as in its checkpoints.
    """

    def __init__(
        self,
        config: MLAConfig,
        dcp: DCPConfig,
        dcp_rank: int,
        exchange: Exchange,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        assert config.indexer is not None
        self.config: IndexerConfig = config.indexer
        self.dcp, self.dcp_rank, self.exchange = dcp, dcp_rank, exchange
        if config.q_lora_rank is None:
            raise ValueError(
                "config has an indexer, but q_lora_rank is None; an indexer's queries are made from the query latent"
            )
        width, num_heads = self.config.head_dim, self.config.num_heads
        if dcp.index_hadamard and width & (width - 1):
            raise ValueError(
                f"index_hadamard (--index-hadamard) takes a power of two; the indexer's head_dim is {width}"
            )
        self.wq_b = skip_init(nn.Linear, config.q_lora_rank, num_heads * width, bias=False, dtype=dtype, device=device)
        self.fused_wk_weights_proj = skip_init(
            nn.Linear, config.hidden_size, width + num_heads, bias=False, dtype=dtype, device=device
        )
        self.k_norm = skip_init(nn.LayerNorm, width, dtype=dtype, device=device)

    def forward(
        self,
        hidden_states: Tensor,
        q_c: Tensor,
        index_cache: Tensor,
        slot_mapping: Tensor,
        cos_sin: Tensor | None,
        sparse: SparseMetadata,
        selection: SelectedTokens,
    ) -> None:
        """Cache the tokens' keys, and select for each token where there are more than topk. Collective.

        Args:
            hidden_states: [T, hidden].
            q_c: [T, Lq] after its norm.
            index_cache: [num_blocks, block_size, width] of this layer (`dcpmla.cache.index_keys`); written and read.
            slot_mapping: [T] int64, -1 where another rank owns the token.
            cos_sin: [T, R] float32 as in `apply_rope`, or None.
            selection: of T tokens; written if sparse.max_seq_len exceeds topk.
        """
        config, dcp = self.config, self.dcp
        keys, weights = self.fused_wk_weights_proj(hidden_states).tensor_split((config.head_dim,), -1)
        norm = self.k_norm.weight, self.k_norm.bias
        finish_index_keys(keys, index_cache, slot_mapping, *norm, cos_sin, config.rope_interleaved, dcp.index_hadamard)
        if sparse.max_seq_len <= config.topk:
            return
        q = self.wq_b(q_c).unflatten(-1, (config.num_heads, config.head_dim))
        is_fp8 = dcp.index_cache_dtype == "fp8"
        q, weights = finish_index_queries(q, weights, cos_sin, config.rope_interleaved, dcp.index_hadamard, is_fp8)
        tile = self._tile_tokens(sparse.block_table.shape[1] * dcp.block_size)
        for index in range(-(-len(q) // tile)):  # a compiler guards their number, and not that of the tokens
            tokens = slice(index * tile, (index + 1) * tile)
            self._select(q[tokens], weights[tokens], index_cache, sparse.rows(tokens), selection.rows(tokens))

    def _select(
        self, q: Tensor, weights: Tensor, index_cache: Tensor, sparse: SparseMetadata, selection: SelectedTokens
    ) -> None:
        """Queries [T, H, D] and weights [T, H] -> the selection of T tokens. Collective."""
        topk, size = self.config.topk, self.dcp.decode_context_parallel_size
        layout = self.dcp_rank, size, self.dcp.cp_kv_cache_interleave_size
        lens = sparse.seq_lens, sparse.local_seq_lens
        scores = index_scores(q, weights, index_cache, sparse.block_table, sparse.request, *lens, topk)
        candidates = self.exchange.gather_candidates(local_candidates(scores, *lens, topk, *layout))
        where = sparse.block_table, sparse.request, self.dcp.block_size
        choose_tokens(candidates.flatten(1), *where, *layout, selection.positions, selection.slots, selection.num_slots)

    def workspace_bytes(self, num_tokens: int) -> int:
        """What a step's selection takes at most at a time.

        All tokens' queries, as projected and as scored; of a tile scores, and candidates of this rank, of all
        ranks, and as they travel.
        """
        query_bytes = num_tokens * self.wq_b.out_features * self.wq_b.weight.element_size()
        return 2 * query_bytes + 4 * _WORKSPACE_BYTES

    def check_cache(self, index_cache: Tensor | None, num_blocks: int) -> None:
        """Raise ValueError unless index_cache is one for this indexer, beside a latent cache of so many blocks."""
        dtype = index_storage_dtype(self.dcp.index_cache_dtype, self.wq_b.weight.dtype)
        shape = num_blocks, self.dcp.block_size, index_row_width(dtype, self.config.head_dim)
        if (
            index_cache is None
            or tuple(index_cache.shape) != shape
            or index_cache.dtype != dtype
            or not index_cache.is_contiguous()
        ):
            given = (
                None
                if index_cache is None
                else f"{index_cache.dtype} {tuple(index_cache.shape)}, strides {index_cache.stride()}"
            )
            asked = f"index_cache_dtype (--index-cache-dtype) {self.dcp.index_cache_dtype!r}"
            raise ValueError(f"index_cache is {given}; expected {dtype} {shape}, contiguous, for {asked}")

    def _tile_tokens(self, num_columns: int) -> int:
        """Tokens to select for at a time: from numbers that are the same on all ranks, since each tile makes an
        exchange.
        """
        candidate_bytes = 8 * candidate_width(self.config.topk, num_columns) * self.dcp.decode_context_parallel_size
        return max(1, _WORKSPACE_BYTES // max(4 * num_columns, candidate_bytes))

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read every parameter, whole.

        Args:
            weights: whole weights by their names in a checkpoint, from "wq_b.weight" to "weights_proj.weight".
        Raises:
            ValueError: a weight is missing or has another shape than the config asks for.
        """
        width, num_heads = self.config.head_dim, self.config.num_heads
        hidden, q_rank = self.fused_wk_weights_proj.in_features, self.wq_b.in_features
        fill(self.wq_b.weight, read_weight(weights, "wq_b.weight", (num_heads * width, q_rank)))
        down = {"wk": width, "weights_proj": num_heads}
        fill(
            self.fused_wk_weights_proj.weight,
            *(read_weight(weights, f"{name}.weight", (rows, hidden)) for name, rows in down.items()),
        )
        fill(self.k_norm.weight, read_weight(weights, "k_norm.weight", (width,)))
        fill(self.k_norm.bias, read_weight(weights, "k_norm.bias", (width,)))
