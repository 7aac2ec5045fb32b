"""MLA of a Hugging Face config: what its fields mean as an `MLAConfig`."""

import math
from typing import Any

from dcpmla.config import MLAConfig

# eps of the norms of both latents. Whatever a config's rms_norm_eps is (it holds for the other norms), the modeling
# code published with DeepSeek-V2, V3 and V3.2, Kimi-K2 and LongCat, and transformers' for all families, leave these
# two at their class's default.
_LATENT_NORM_EPS = 1e-6


def mla_config(config: Any) -> MLAConfig:
    """Return the attention of a transformers config as DeepSeek-V3 reads its fields.

    Raises:
        ValueError: A field that no attention can have.
    Source: the attention classes of transformers; YaRN's mscale from the DeepSeek-V2 paper.
    """
    rope = config.rope_parameters or {}
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return MLAConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        scale=scale,
        rms_norm_eps=_LATENT_NORM_EPS,
        rope_interleaved=getattr(config, "rope_interleave", True),
        attention_bias=config.attention_bias,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature for a context stretched by `factor`: 0.1 mscale ln(factor) + 1.

    Source: YaRN, section 3.4.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
