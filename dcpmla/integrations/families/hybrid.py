"""Families of layers of MLA and of Kimi Delta Attention, and Ling."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.attention.layers.linear.spec import DeltaSpec
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.spec import LayerSpec
from dcpmla.config import MLAConfig
from dcpmla.fields import FLAG, check_fields, list_of, number, one_of, only, optional, rules_of, whole
from dcpmla.integrations.config_checks import check_kinds, check_lengths, check_rope
from dcpmla.integrations.families.family import Family
from dcpmla.model.glu import SWIGLU, LayerGlus, clamp_after_silu

HYBRID_NAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),  # Kimi's
    (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"^model\.word_embeddings\.", "model.embed_tokens."),  # Ling's
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"^(model\.layers\.\d+)\.final_layernorm\.", r"\1.shared_head.norm."),  # Ling's MTP module
)
_TYPES = ("full_attention", "linear_attention")
_DELTA_FIELDS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "conv_size": "linear_conv_kernel_dim",
    "decay_floor": "kda_lower_bound",  # Ling's
}
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")  # of routed and of shared experts
# Ling-2.5 and 2.6 have the model type of Ling-3.0, and Lightning attention. Other fields are of Ling's older models.
_LING_RULES = {
    "architectures": optional(list_of(one_of(("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")))),
    **dict.fromkeys(("no_kda_lora", "linear_silu", "use_qk_norm", "use_rmsnorm"), only(True)),
    "moe_router_enable_expert_bias": only(True),
    **dict.fromkeys(("use_kda_lora", "use_mla_nope", "mtp_use_kda", "pregate_inference"), only(False)),
    **dict.fromkeys(("value_norm", "up_proj_norm", "use_nGPT", "scale_router_input"), only(False)),
    "gated_attention_proj_granularity_type": one_of(("head_wise",)),
    **dict.fromkeys(_LIMITS, optional(list_of(optional(number(0))))),
    "layer_group_size": whole(1, 1024),
    "short_conv_kernel_size": whole(2, 64),
    "group_norm_size": only(1),
    "num_kv_heads_for_linear_attn": only(0),
    "router_dtype": one_of(("fp32", "float32")),
}


@dataclass(frozen=True)
class HybridFamily(Family):
    """A family whose blocks are DeepSeek-V3's but for their attention."""

    def delta(self, config: Any) -> DeltaConfig:
        """Return the geometry of layers of linear attention."""
        return DeltaConfig(
            hidden_size=config.hidden_size,
            num_heads=config.linear_num_heads,
            head_dim=config.linear_head_dim,
            conv_size=config.linear_conv_kernel_dim,
            rms_norm_eps=config.rms_norm_eps,
        )

    def layers(self, config: Any, mla: MLAConfig, has_mtp: bool) -> Iterable[LayerSpec]:
        """Return layers of MLA and of linear attention."""
        linear = DeltaSpec(self.delta(config))
        return (linear if each == "linear_attention" else LatentSpec(mla) for each in config.layer_types)

    def with_mtp_layer(self, config: Any) -> Any:
        """Return a config with the MTP module's decoder layer, which has MLA."""
        config = super().with_mtp_layer(config)
        config.layer_types[-1] = next(kind for kind in config.layer_types if kind != "linear_attention")
        return config


@dataclass(frozen=True)
class _Ling(HybridFamily):
    """Ling, whose MLA has gates of its output, and whose linear attention has a floor of its decays."""

    def delta(self, config: Any) -> DeltaConfig:
        """Return the geometry of layers of linear attention."""
        floor = config.kda_lower_bound if config.kda_safe_gate else None
        return replace(super().delta(config), low_ranks="", decay_floor=floor)

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers of MLA, with a gate for each head."""
        return replace(super().mla(config), num_gates=1)

    def glus(self, config: Any, layer: int) -> LayerGlus:
        """Return a layer's gated linear units; transformers' model has no bounds.

        Source: vLLM's and SGLang's models of Ling-3.0.
        """
        lists = [getattr(config, name, None) or [] for name in _LIMITS]
        routed, shared = (clamp_after_silu((limits[layer] or 0) if layer < len(limits) else 0) for limits in lists)
        return LayerGlus(routed, shared, SWIGLU)


def check_linear(config: Any) -> None:
    """Raise ValueError for a field of linear attention that no layer can have."""
    check_fields({_DELTA_FIELDS.get(name, name): rule for name, rule in rules_of(DeltaConfig).items()}, vars(config))


def check_hybrid(config: Any) -> None:
    """Raise ValueError unless each layer is MLA or linear attention, and both exist."""
    check_linear(config)
    check_fields({"layer_types": list_of(one_of(_TYPES)), "kda_safe_gate": FLAG}, vars(config))
    check_kinds(config, _TYPES)


def _check_ling(config: Any) -> None:
    """Raise ValueError for inconsistent fields of layers and of the rotary embedding."""
    check_hybrid(config)
    check_rope(config)
    check_lengths(vars(config), _LIMITS, config.num_hidden_layers)


LING = _Ling("BailingHybrid", check_attention=_check_ling, rules=_LING_RULES, names=HYBRID_NAMES)
