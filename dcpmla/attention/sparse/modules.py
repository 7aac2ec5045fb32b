"""The projections of an indexer that another engine passes to a layer of sparse MLA (`attention/modules.py`)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dcpmla.config import MLAConfig


@dataclass(frozen=True, kw_only=True)
class IndexerModules:
    """The projections of an indexer, any callables, and the weights of its keys' norm; the same on all ranks.

    Queries and keys are rotated by the step's cos_sin, in pairs as config.indexer.rope_interleaved says, in their first
    qk_rope_head_dim columns. For a model whose rotated columns are the last ones (rope_last), an engine reorders the
    weights' rows when it loads them, or the projections' outputs by `attention.modules.rotated_first`: of q_proj, of
    the keys, and both weights of k_norm.

    Dims: T tokens, H heads of the indexer, D their width, Lq the width of the query latent.

    Attributes:
        q_proj: Projection of q_c [T, Lq] after its norm -> [T, H D], before RoPE.
        down_proj: Projection of hidden states [T, hidden] to keys [T, D] before their norm, in the layer's dtype, and
            weights of the heads [T, H], any float dtype; any row stride, contiguous columns.
        k_norm: Weight and bias of the keys' LayerNorm, [D] each; its epsilon is config.indexer.norm_eps.
    """

    q_proj: Callable[[Tensor], Tensor]
    down_proj: Callable[[Tensor], tuple[Tensor, ...]]
    k_norm: tuple[Tensor, Tensor]

    def check(self, config: MLAConfig) -> None:
        """Raise ValueError for weights of another width, or for an indexer that takes more than these projections."""
        indexer = config.indexer
        if indexer is None:
            raise ValueError("modules have an indexer, but config.indexer is None")
        for name, value in (
            ("indexer.norms_hidden", indexer.norms_hidden),
            ("indexer.pool_size", indexer.pool_size > 1),
            ("has_query_factors", config.has_query_factors),
        ):
            if value:
                raise ValueError(f"config sets {name}, which an engine's indexer cannot have; leave indexer out: None")
        shapes, expected = [tuple(weight.shape) for weight in self.k_norm], [(indexer.head_dim,)] * 2
        if shapes != expected:
            raise ValueError(f"indexer.k_norm has shapes {shapes}; the config asks for {expected}, weight and bias")
