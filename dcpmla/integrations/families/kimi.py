"""Kimi Linear, and the text model of Kimi-K3, which has the same model type and more fields."""

from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.config import MLAConfig
from dcpmla.fields import FLAG, OBJECT, SIZE, list_of, number, one_of, only, optional, whole
from dcpmla.integrations.decoder import load_decoder
from dcpmla.integrations.families.hybrid import HYBRID_NAMES, HybridFamily, check_hybrid
from dcpmla.integrations.families.kimi_k3 import K3Fields, extend_to_k3, load_sum_decoder
from dcpmla.integrations.parts import Parts
from dcpmla.integrations.sharded_model import DecoderModule
from dcpmla.model.glu import Glu, LayerGlus

_LAYERS = list_of(whole(1, 1024))
_RULES = {
    "linear_attn_config": OBJECT,
    "attn_res_block_size": optional(whole(1, 1024)),
    "routed_expert_hidden_size": optional(SIZE),
    **dict.fromkeys(("latent_moe_use_norm", "mla_use_output_gate"), FLAG),
    "mla_use_nope": only(True),
    "hidden_act": one_of(("silu", "swish", "situ")),
    **dict.fromkeys(("activation_situ_beta", "activation_situ_linear_beta"), optional(number(0, above=True))),
    "use_grouped_topk": only(True),
    **dict.fromkeys(("linear_attn_config.num_heads", "linear_attn_config.head_dim"), SIZE),
    "linear_attn_config.short_conv_kernel_size": whole(2, 64),
    **dict.fromkeys(("linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"), _LAYERS),
    "linear_attn_config.use_full_rank_gate": FLAG,
    "linear_attn_config.gate_lower_bound": optional(number(-100, 0)),
}


@dataclass(frozen=True)
class _Kimi(HybridFamily):
    """Kimi Linear, whose MLA has no positions, and Kimi-K3."""

    def read_config(self, raw: dict[str, Any]) -> Any:
        """Return Kimi Linear's config, with `situ_bounds` if the activation has them."""
        config = super().read_config(raw)
        if raw.get("hidden_act") == "situ":
            config.situ_bounds = raw.get("activation_situ_beta") or 1.0, raw.get("activation_situ_linear_beta")
        return config

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with an activation that transformers has."""
        linear = raw.get("linear_attn_config") or {}
        if "kda_layers" in linear and "full_attn_layers" in linear:
            _check_layers(linear["kda_layers"], linear["full_attn_layers"], raw.get("num_hidden_layers"))
        return raw | {"hidden_act": "silu"} if raw.get("hidden_act") == "situ" else raw

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers of MLA, which have no positions; K3's have a gate for each column of a head."""
        gates_output = K3Fields.of(config).gates_output
        return replace(super().mla(config), use_rope=False, num_gates=config.v_head_dim if gates_output else 0)

    def delta(self, config: Any) -> DeltaConfig:
        """Return the geometry of layers of linear attention."""
        fields = K3Fields.of(config)
        low_ranks = "f" if fields.has_full_gate else "fg"
        return replace(super().delta(config), low_ranks=low_ranks, decay_floor=fields.decay_floor)

    def glus(self, config: Any, layer: int) -> LayerGlus:
        """Return a layer's gated linear units: SiTU for Kimi-K3."""
        bounds = getattr(config, "situ_bounds", None)
        return (
            super().glus(config, layer)
            if bounds is None
            else LayerGlus(*3 * [Glu(bounds[0], bounds[1], is_smooth=True)])
        )

    def extend(self, model: Any) -> None:
        """Give Kimi Linear's model the weights of Kimi-K3's."""
        extend_to_k3(model)


def _check_layers(kda_layers: list[int], full_attn_layers: list[int], num_layers: object) -> None:
    layers = sorted(kda_layers + full_attn_layers)
    if layers != [*range(1, len(layers) + 1)] or len(layers) != num_layers:
        raise ValueError(
            f"linear_attn_config.kda_layers and full_attn_layers are {kda_layers} and {full_attn_layers}; together "
            f"they must be the layers 1 to num_hidden_layers {num_layers}, each once"
        )


def _load_decoder(parts: Parts, num_layers: int) -> DecoderModule:
    is_mixed = K3Fields.of(parts.model.config).group_size is not None
    return load_sum_decoder(parts, num_layers) if is_mixed else load_decoder(parts, num_layers)


KIMI_LINEAR = _Kimi(
    "KimiLinear",
    check_attention=check_hybrid,
    load_decoder=_load_decoder,
    rules=_RULES,
    names=HYBRID_NAMES,
    no_mtp="; MTP modules of kimi_linear are not computed",
)
