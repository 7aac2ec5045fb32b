"""MLA whose heads' queries have learned factors, with or without positions (Mistral Large 4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dcpmla.attention.head_factors import HeadFactors
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.output.rows import OutputQuant
from dcpmla.attention.placement import Placement
from dcpmla.attention.projections import Tokens, rows_or_none
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.fp8 import PlainRows, QuantizedRows, unquantized
from dcpmla.parallel.linear import Linear, Weight


@dataclass(frozen=True)
class SharedLatents:
    """The latents of a step's tokens in the latest layer whose latents other layers attend to.

    Attributes:
        latents: Latents [T, L + R] of the latest such layer with positions (True), and without (False).
    """

    latents: dict[bool, Tensor] = field(default_factory=dict)


class ScaledAttention(MLAAttention):
    """MLA whose queries are multiplied by factors of their heads that grow with their positions.

    A layer without positions (config.use_rope false) takes the steps of a model whose other layers have them.

    Args:
        config, placement, skip_topk: Arguments of `MLAAttention`; config.has_query_factors is true.
        is_source: Whether later layers attend to this layer's latents.
    Source: transformers' Mistral Large 4.
    """

    def __init__(self, config: MLAConfig, placement: Placement, skip_topk: bool, is_source: bool = False) -> None:
        super().__init__(config, placement, skip_topk)
        self.is_source = is_source
        self.head_factors = HeadFactors(config.num_heads, placement)

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Load weights as `MLAAttention.load_weights` documents, and the factors' two numbers for each head."""
        super().load_weights(weights)
        self.head_factors.load_weights(weights)

    def project_query(self, tokens: Tokens, heads: slice) -> tuple[Tensor, Tensor | None]:
        """Return queries [T, n, P + R] before RoPE, times their factors; `heads` is a slice of the held q_heads."""
        q, gates = super().project_query(tokens._replace(query_factor=None), heads)
        start, stop, _ = heads.indices(self.q_heads.count)
        of_model = slice(self.q_heads.first + start, self.q_heads.first + stop)
        num_zeros = self.config.qk_head_dim - self.config.query_width
        return self.head_factors(q, tokens.query_factor, of_model, num_zeros), gates

    def attend(
        self,
        hidden_states: PlainRows,
        cache: LayerCache | None,
        step: StepMetadata | None,
        output_quant: OutputQuant | None = None,
    ) -> Tensor | QuantizedRows:
        """Return the input of o_proj (`MLAAttention.attend`). Collective."""
        return super().attend(hidden_states, cache, None if step is None else self._own(step), output_quant)

    def latents_of(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> tuple[PlainRows, Tensor]:
        """Cache the step's latents (`MLAAttention.latents_of`), and keep them for layers that attend to them."""
        q_c, latents = super().latents_of(hidden_states, kv_cache, step)
        if self.is_source:
            shared_latents(step)[self.config.use_rope] = latents
        return q_c, latents

    def _attend(self, *arguments: Any) -> None:
        """Write the step's rows (`MLAAttention._attend`); the step, the last argument, may be a graph's. Collective."""
        *before, step = arguments
        arguments = (*before, self._own(step))
        super()._attend(*arguments)

    def _own(self, step: StepMetadata) -> StepMetadata:
        """Return the step without angles for a layer without positions."""
        return step if self.config.use_rope else step.with_cos_sin(None, step.query_factor)


class ReusingAttention(ScaledAttention):
    """A layer that attends to an earlier layer's latents, and neither projects nor caches any.

    Its cache is the source's. With an fp8 cache, its `kv_scale` has to be the source's, too.
    """

    @property
    def down_proj(self) -> Linear:
        """The projection of queries, the only one of hidden states."""
        return self.q_proj

    def latents_of(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> tuple[PlainRows, Tensor]:
        """Return the query projection's input and the source's latents."""
        return hidden_states, shared_latents(step)[self.config.use_rope]

    def up_projection(self) -> Tensor:
        """Return each own head's W_UK stacked on its W_UV (`AttentionWeights.up_projection`)."""
        return unquantized(self._w_kv_b(self.kv_heads.own, slice(0, None)), self.head_factors.scale)

    def _make_down(self, new: dict[str, Any]) -> None:
        """Make nothing."""

    def _load_down(self, weights: Mapping[str, Weight]) -> None:
        """Load nothing."""

    def _calculate_scales(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> None:
        """Set the queries' scale from tokens of prompts; the source has set the latents'. Collective."""
        prefills = slice(step.num_decode_tokens, step.num_tokens)
        self._scales_pending = False
        factors = rows_or_none(step.query_factor, prefills)
        self._calculate_q_scale(Tokens(hidden_states[prefills], rows_or_none(step.cos_sin, prefills), factors))


def shared_latents(step: StepMetadata) -> dict[bool, Tensor]:
    """Return the latents that layers of a step share."""
    shared = step.get(SharedLatents)
    assert shared is not None  # `FactoredSpec.prepare` adds it
    return shared.latents
