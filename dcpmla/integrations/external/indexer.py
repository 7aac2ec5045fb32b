"""The indexer of sparse MLA over the projections of another engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dcpmla.attention.placement import Placement
from dcpmla.attention.select.indexer import Indexer
from dcpmla.config import MLAConfig
from dcpmla.integrations.external.linear import ExternalLinear, Projection, check_parts, external_parameters
from dcpmla.parallel.linear import Weight
from dcpmla.parallel.quantized import PlainRows, plain


@dataclass(frozen=True, kw_only=True)
class IndexerModules:
    """The projections of an indexer, any callables, and the weights of its keys' norm; the same on all ranks.

    Queries and keys are rotated by the step's cos_sin, in pairs as config.indexer.rope_interleaved says, in their first
    qk_rope_head_dim columns. For a model whose rotated columns are the last ones (rope_last), an engine reorders the
    weights' rows when it loads them, or the projections' outputs by `rotated_first`: of q_proj, of
    the keys, and both weights of k_norm.

    Dims: T tokens, H heads of the indexer, D their width, Lq the width of the query latent.

    Attributes:
        q_proj: Projection of q_c [T, Lq] after its norm -> [T, H D], before RoPE.
        down_proj: Projection of hidden states [T, hidden] to keys [T, D] before their norm, in the layer's dtype, and
            weights of the heads [T, H], any float dtype; any row stride, contiguous columns.
        k_norm: Weight and bias of the keys' LayerNorm, [D] each; its epsilon is config.indexer.norm_eps.
    """

    q_proj: Projection
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


class ExternalIndexer(Indexer):
    """`Indexer` over an engine's projections, which `IndexerModules.check` has checked; `load_weights` reads nothing.

    Args:
        config, placement: Arguments of `Indexer`.
        modules: Projections and weights that the engine has made and loaded.
    """

    def __init__(self, config: MLAConfig, placement: Placement, modules: IndexerModules) -> None:
        super().__init__(config, placement)
        self._external, self.wq_b = modules, ExternalLinear(modules.q_proj)
        weight, bias = modules.k_norm
        self.k_norm = external_parameters(nn.LayerNorm(len(weight), device="meta"), weight=weight, bias=bias)

    def make_parameters(self, new: dict[str, Any]) -> None:
        """Make nothing; the engine has."""

    def down_project(self, hidden_states: PlainRows) -> tuple[Tensor, ...]:
        """Return keys [T, D] before their norm, and weights of the heads [T, H]."""
        x = plain(hidden_states)
        parts = self._external.down_proj(x)
        check_parts(parts, len(x), [self.config.head_dim, self.config.num_heads])
        return parts

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Raise ValueError for any weight."""
        if weights:
            name = next(iter(weights))
            raise ValueError(f"weights have 'indexer.{name}', but the layer's modules hold its indexer; leave it out")


def rotated_first(x: Tensor, head_dim: int, rope_dim: int) -> Tensor:
    """Return x [.., n head_dim] with the last rope_dim of each head_dim columns first, where an indexer expects them.

    Rows of a weight are reordered as columns of its transpose.
    """
    return x.unflatten(-1, (-1, head_dim)).roll(rope_dim, -1).flatten(-2)
