"""Kimi Linear, and the text model of Kimi-K3, which has the same model type and more fields."""

from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.linear.kind import HybridKind
from dcpmla.fields import FLAG, SIZE, Rule, check_fields, list_of, number, one_of, optional, whole
from dcpmla.integrations.decoder import load_decoder
from dcpmla.integrations.families.family import NO_MTP
from dcpmla.integrations.families.hybrid import HybridFamily, check_hybrid
from dcpmla.integrations.families.kimi_k3 import K3Fields, extend_to_k3, load_sum_decoder
from dcpmla.integrations.parts import Parts
from dcpmla.integrations.sharded_model import DecoderModule

_LAYERS = list_of(whole(1, 1024))
_RULES = {
    "linear_attn_config": Rule("an object", lambda value: isinstance(value, dict)),
    "attn_res_block_size": optional(whole(1, 1024)),
    "routed_expert_hidden_size": optional(SIZE),
    **dict.fromkeys(("latent_moe_use_norm", "mla_use_output_gate"), FLAG),
    "mla_use_nope": Rule("true", lambda value: value is True),
    "hidden_act": one_of(("silu", "swish", "situ")),
    **dict.fromkeys(("activation_situ_beta", "activation_situ_linear_beta"), optional(number(0, above=True))),
    "moe_router_activation_func": one_of(("sigmoid",)),
    "topk_method": one_of(("noaux_tc",)),
    "moe_layer_freq": whole(1, 1),
}
_DELTA_RULES = {
    **dict.fromkeys(("num_heads", "head_dim"), SIZE),
    "short_conv_kernel_size": whole(2, 64),
    **dict.fromkeys(("kda_layers", "full_attn_layers"), _LAYERS),
    "use_full_rank_gate": FLAG,
    "gate_lower_bound": optional(number(-100, 0)),
}


@dataclass(frozen=True)
class _Kimi(HybridFamily):
    """Kimi Linear, whose MLA has no positions, and Kimi-K3."""

    def read_config(self, raw: dict[str, Any]) -> Any:
        """Return Kimi Linear's config, with `situ_bounds` if the activation has them."""
        check_fields(_RULES, raw)
        linear = raw.get("linear_attn_config") or {}
        check_fields(_DELTA_RULES, linear, "linear_attn_config.{}".format)
        if "kda_layers" in linear and "full_attn_layers" in linear:
            _check_layers(linear["kda_layers"], linear["full_attn_layers"], raw.get("num_hidden_layers"))
        if raw.get("hidden_act") != "situ":
            return super().read_config(raw)
        config = super().read_config(raw | {"hidden_act": "silu"})  # transformers has no SiTU
        config.situ_bounds = raw.get("activation_situ_beta") or 1.0, raw.get("activation_situ_linear_beta")
        return config

    def attention(self, config: Any, has_mtp: bool = False) -> HybridKind:
        """Return layers of MLA and of linear attention."""
        kind, fields = super().attention(config), K3Fields.of(config)
        low_ranks = "f" if fields.has_full_gate else "fg"
        return replace(
            kind,
            config=replace(kind.config, use_rope=False),
            delta=replace(kind.delta, low_ranks=low_ranks, decay_floor=fields.decay_floor),
            num_gates=config.v_head_dim if fields.gates_output else 0,
        )

    def check_mtp(self, config: Any) -> None:
        """Raise ValueError: no published model has a module."""
        raise ValueError(
            f"speculative_method (--speculative-method) is 'mtp'; MTP modules of {config.model_type} are not "
            f"computed: {NO_MTP}"
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


KIMI_LINEAR = _Kimi("KimiLinear", check_attention=check_hybrid, load_decoder=_load_decoder)
