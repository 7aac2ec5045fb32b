"""MLA whose heads' queries have learned factors, with or without positions (Mistral Large 4)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dcpmla.attention.head_factors import HeadFactors
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.output.rows import OutputQuant
from dcpmla.attention.placement import Placement
from dcpmla.attention.projections import Tokens
from dcpmla.attention.step import StepMetadata
from dcpmla.cache.latent import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.fp8 import PlainRows, QuantizedRows
from dcpmla.parallel.linear import Weight


class ScaledAttention(MLAAttention):
    """MLA whose queries are multiplied by factors of their heads that grow with their positions.

    A layer without positions (config.use_rope false) takes the steps of a model whose other layers have them.

    Args:
        config, placement, skip_topk: Arguments of `MLAAttention`; config.has_query_factors is true.
    Source: transformers' Mistral Large 4.
    """

    def __init__(self, config: MLAConfig, placement: Placement, skip_topk: bool) -> None:
        super().__init__(config, placement, skip_topk)
        self.head_factors = HeadFactors(config.num_heads, placement)

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Load weights as `MLAAttention.load_weights` documents, and the factors' two numbers for each head."""
        super().load_weights(weights)
        self.head_factors.load_weights(weights)

    def project_query(self, tokens: Tokens, heads: slice) -> Tensor:
        """Return queries [T, n, P + R] before RoPE, times their factors; `heads` is a slice of the held q_heads."""
        q = super().project_query(tokens._replace(query_factor=None), heads)
        first, last, _ = heads.indices(self.q_heads.count)
        held = slice(self.q_heads.first + first, self.q_heads.first + last)
        return self.head_factors(q, tokens.query_factor, held, self.config.qk_head_dim - self.config.query_width)

    def attend(
        self,
        hidden_states: PlainRows,
        cache: LayerCache | None,
        step: StepMetadata | None,
        output_quant: OutputQuant | None = None,
    ) -> Tensor | QuantizedRows:
        """Return the input of o_proj (`MLAAttention.attend`). Collective."""
        return super().attend(hidden_states, cache, None if step is None else self._own(step), output_quant)

    def _attend(self, *arguments: Any) -> None:
        """Write the step's rows (`MLAAttention._attend`); the step, the last argument, may be a graph's. Collective."""
        *others, step = arguments
        super()._attend(*others, self._own(step))

    def _own(self, step: StepMetadata) -> StepMetadata:
        """Return the step without angles for a layer without positions."""
        return step if self.config.use_rope else step.with_cos_sin(None, step.query_factor)
