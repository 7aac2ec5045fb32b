"""The indexer: the choice of the tokens that each token attends to. `Indexer.forward` reads top to bottom."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from dcpmla.attention.head_factors import HeadFactors
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.calls import IndexNorm, IndexRotation
from dcpmla.attention.select.projections import norm_rope_index_keys, rope_index_queries
from dcpmla.attention.select.selector import TokenSelector
from dcpmla.attention.select.step import SparseMetadata
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.indexer_config import IndexerConfig
from dcpmla.parallel.linear import Linear, Weight, fill, read_linear, read_weight
from dcpmla.parallel.quantized import PlainRows, plain
from dcpmla.parallel.reformat import reorder_rows


class Indexer(nn.Module):
    """The scorer of all tokens before each token, and the selector of the best.

    Every rank holds all of it and computes the same queries. Keys are cached where their token's latent is, so each
    rank scores its own tokens; one exchange brings its best ones to all, and each makes the same choice.

    Args:
        config: Geometry of the layer, with an indexer.
        placement: Placement of the layer; the parameters are uninitialized until `load_weights`.
    Raises:
        ValueError: Queries are made from a query latent that the layer lacks, or the Hadamard transform is asked for
            and the width is not a power of two.
    Source: DeepSeek-V3.2, section 2.1; names as in its checkpoints. transformers' Mistral Large 4 for queries made from
        hidden states, and for factors of queries.
    """

    def __init__(self, config: MLAConfig, placement: Placement) -> None:
        super().__init__()
        assert config.indexer is not None
        self.config: IndexerConfig = config.indexer
        self.dcp, self.rope_dim = placement.dcp, config.rope_dim
        self.selector = TokenSelector(self.config, self.dcp, placement.mesh.dcp_rank, placement.exchange)
        source = config.hidden_size if self.config.norms_hidden else config.q_lora_rank
        if source is None:
            raise ValueError(
                "config has an indexer, but q_lora_rank is None; an indexer's queries are made from the query latent, "
                "or with norms_hidden from hidden states"
            )
        self.hidden_size, self.source_width = config.hidden_size, source
        norm_eps, new = self.config.norm_eps, placement.factory_kwargs
        self.q_input_norm = skip_init(nn.LayerNorm, source, eps=norm_eps, **new) if self.config.norms_hidden else None
        self.head_factors = HeadFactors(self.config.num_heads, **new) if config.has_query_factors else None
        self.make_parameters(new)

    def make_parameters(self, new: dict[str, Any]) -> None:
        """Make parameters that `load_weights` fills; `new` holds the keyword arguments of each."""
        width, num_heads = self.config.head_dim, self.config.num_heads
        self.wq_b = Linear(self.source_width, num_heads * width, **new)
        self.fused_wk_weights_proj = Linear(self.hidden_size, width + num_heads, **new)
        self.k_norm = skip_init(nn.LayerNorm, width, **new)

    def down_project(self, hidden_states: PlainRows) -> tuple[Tensor, ...]:
        """Return keys [T, D] before their norm, and weights of the heads [T, H]."""
        return self.fused_wk_weights_proj(hidden_states).tensor_split((self.config.head_dim,), -1)

    def forward(self, hidden_states: PlainRows, q_c: PlainRows, cache: LayerCache, step: StepMetadata) -> None:
        """Cache the tokens' keys, and write the step's selection if it has memory for one. Collective.

        Args:
            hidden_states: Hidden states [T, hidden].
            q_c: Query latent [T, Lq] after its norm; further columns are ignored (query_gates).
            cache: Cache of this layer, whose index keys (`dcpmla.cache.index_keys`) are written and read.
            step: Metadata of the T tokens, with a sparse part.
        """
        config, dcp, cos_sin, sparse = self.config, self.dcp, step.cos_sin, step.get(SparseMetadata)
        index_keys = cache.index_keys
        assert sparse is not None
        assert index_keys is not None
        keys, weights = self.down_project(hidden_states)
        norm = IndexNorm(self.k_norm.weight, self.k_norm.bias, config.norm_eps)
        rotation = IndexRotation(cos_sin, config.rope_interleaved, dcp.index_hadamard)
        norm_rope_index_keys(keys, index_keys, step.tokens.slots, norm, rotation)
        if sparse.selection is None:
            return
        source = q_c if self.q_input_norm is None else self.q_input_norm(plain(hidden_states))
        if isinstance(source, Tensor):
            source = source[:, : self.source_width]  # without the latent before its norm (`query_gates`)
        q = self.wq_b(source).unflatten(-1, (config.num_heads, config.head_dim))
        if self.head_factors is not None:
            q = self.head_factors(q, step.query_factor)
        is_fp8 = dcp.index_cache_dtype == "fp8"
        q, weights = rope_index_queries(q, weights, rotation, is_fp8)
        self.selector.select(q, weights, index_keys, sparse, sparse.block_table, sparse.selection)

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read every parameter, whole. weights_proj is published in bfloat16, so wk is dequantized as well.

        Args:
            weights: Whole weights by their names in a checkpoint, from "wq_b.weight" to "weights_proj.weight".
        Raises:
            ValueError: A weight is missing, or its shape does not match the config.
        """
        width, num_heads = self.config.head_dim, self.config.num_heads
        hidden, source = self.hidden_size, self.source_width
        wq_b = read_linear(weights, "wq_b.weight", (num_heads * width, source))
        wk = read_linear(weights, "wk.weight", (width, hidden))
        weight, bias = (read_weight(weights, f"k_norm.{name}", (width,)) for name in ("weight", "bias"))
        if self.config.rope_last:
            order = torch.arange(width).roll(self.rope_dim)
            wq_b, wk = reorder_rows(wq_b, order), reorder_rows(wk, order)
            weight, bias = weight[order], bias[order]
        self.wq_b.load(wq_b)
        self.fused_wk_weights_proj.load(wk, read_linear(weights, "weights_proj.weight", (num_heads, hidden)))
        fill(self.k_norm.weight, weight)
        fill(self.k_norm.bias, bias)
        if self.q_input_norm is not None:
            for name, parameter in self.q_input_norm.named_parameters():
                fill(parameter, read_weight(weights, f"q_input_norm.{name}", (source,)))
        if self.head_factors is not None:
            self.head_factors.load_weights(weights)
