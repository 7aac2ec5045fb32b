"""MiniCPM3, whose embedding, residual branches and logits have factors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dcpmla.config import MLAConfig
from dcpmla.fields import SIZE, number
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.parts import Parts, load_decoder
from dcpmla.model.block import Decoder

_RULES = {
    "scale_emb": number(0, 1e4, above=True),
    "scale_depth": number(1e-3, 1e3),
    "dim_model_base": SIZE,
}


@dataclass(frozen=True)
class _MiniCPM3(Family):
    """MiniCPM3, whose rotary embedding rotates halves."""

    def complete(self, config: Any, raw: Mapping[str, Any]) -> None:
        """Add the factor that `longrope` computes where the file has none.

        transformers before 5.24 builds no model without it.
        """
        rope = config.rope_parameters
        if rope["rope_type"] == "longrope":
            rope.setdefault("factor", config.max_position_embeddings / rope["original_max_position_embeddings"])

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers that rotate halves."""
        return replace(super().mla(config), rope_interleaved=False)


def _load_decoder(parts: Parts, num_layers: int) -> Decoder:
    """Load a decoder whose residual is x / s for MiniCPM3's x.

    With s the factor of branches, x + s f(norm(x)) is s times y + f(norm(y)) for y = x / s, where norm's eps is divided
    by s^2. So the embedding and the eps hold the factor, and blocks are DeepSeek-V3's. The weight of the last norm
    holds the factor of logits.
    """
    config = parts.model.config
    branch = config.scale_depth / math.sqrt(config.num_hidden_layers)
    parts.eps /= branch**2
    decoder = load_decoder(parts, num_layers)
    decoder.embedding = nn.Parameter(decoder.embedding * (config.scale_emb / branch), requires_grad=False)
    last = decoder.blocks[-1]
    last.output_norm = nn.Parameter(
        last.output_norm * (config.dim_model_base / config.hidden_size), requires_grad=False
    )
    return decoder


MINICPM3 = _MiniCPM3("MiniCPM3", load_decoder=_load_decoder, rules=_RULES)
