"""MLA whose heads' queries have learned factors, with or without positions (Mistral Large 4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dcpmla.attention.mla.layer import MLAAttention
from dcpmla.attention.mla.weights import Tokens, rows_or_none
from dcpmla.attention.placement import Placement
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.config import MLAConfig
from dcpmla.parallel.linear import Linear, Weight, unquantized
from dcpmla.parallel.quantized import PlainRows


@dataclass(frozen=True)
class ReusedLatents:
    """The latents of a step's tokens in the latest layer whose latents other layers attend to.

    Attributes:
        latents: Latents [T, L + R] of the latest such layer with positions (True), and without (False).
    """

    latents: dict[bool, Tensor] = field(default_factory=dict)


class FactoredAttention(MLAAttention):
    """MLA whose queries have factors (config.has_query_factors), in a model with and without positions.

    A layer without positions (config.use_rope false) takes the steps of a model whose other layers have them.

    Args:
        config, placement, skip_topk: Arguments of `MLAAttention`.
        is_source: Whether later layers attend to this layer's latents.
    Source: transformers' Mistral Large 4.
    """

    def __init__(self, config: MLAConfig, placement: Placement, skip_topk: bool, is_source: bool = False) -> None:
        super().__init__(config, placement, skip_topk)
        self.is_source = is_source

    def view(self, step: StepMetadata) -> StepMetadata:
        """Return the step without angles for a layer without positions."""
        has_own = self.config.use_rope or step.cos_sin is None
        return step if has_own else step.with_cos_sin(None, step.query_factor)

    def latents_of(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> tuple[PlainRows, Tensor]:
        """Cache the step's latents (`MLAAttention.latents_of`), and keep them for layers that attend to them."""
        q_c, latents = super().latents_of(hidden_states, kv_cache, step)
        if self.is_source:
            reused_latents(step)[self.config.use_rope] = latents
        return q_c, latents


class ReusingAttention(FactoredAttention):
    """A layer that attends to an earlier layer's latents, and neither projects nor caches any.

    Its cache is the source's. With an fp8 cache, its `kv_scale` has to be the source's, too.
    """

    def latents_of(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> tuple[PlainRows, Tensor]:
        """Return queries and the source's latents."""
        return self.fused_qkv_a_proj(hidden_states), reused_latents(step)[self.config.use_rope]

    def up_projection(self) -> Tensor:
        """Return each own head's W_UK stacked on its W_UV (`AttentionWeights.up_projection`)."""
        assert self.head_factors is not None
        return unquantized(self._w_kv_b(self.kv_heads.own, slice(0, None)), self.head_factors.scale)

    def _make_down(self, new: dict[str, Any]) -> None:
        """Make the projection of queries, the only one of hidden states."""
        self.fused_qkv_a_proj = Linear(self.config.input_parts * self.config.hidden_size, self._q_dim, **new)

    def _load_down(self, weights: Mapping[str, Weight]) -> None:
        """Read this rank's part of the projection of queries."""
        self.fused_qkv_a_proj.load(self._read_queries(weights, "q_proj.weight", self.fused_qkv_a_proj))

    def _calculate_scales(self, hidden_states: PlainRows, kv_cache: Tensor, step: StepMetadata) -> None:
        """Set the queries' scale from tokens of prompts; the source has set the latents'. Collective."""
        prefills = slice(step.num_decode_tokens, step.num_tokens)
        self._scales_pending = False
        factors = rows_or_none(step.query_factor, prefills)
        queries = self.fused_qkv_a_proj(hidden_states[prefills])
        self._calculate_q_scale(Tokens(queries, rows_or_none(step.cos_sin, prefills), factors))


def reused_latents(step: StepMetadata) -> dict[bool, Tensor]:
    """Return the latents that layers of a step share."""
    shared = step.get(ReusedLatents)
    assert shared is not None  # `FactoredSpec.prepare` adds it
    return shared.latents
