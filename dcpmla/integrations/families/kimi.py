"""Kimi Linear, and the text model of Kimi-K3, which has the same model type and more fields."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from torch import nn

from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.config import MLAConfig
from dcpmla.fields import OBJECT, SIZE, Flag, list_of, number, one_of, only, optional, rules_of, whole
from dcpmla.integrations.families.hybrid import HYBRID_NAMES, HybridFamily, check_hybrid
from dcpmla.integrations.parts import Parts, load_decoder
from dcpmla.integrations.sharded_model import DecoderModule
from dcpmla.model.glu import Glu, LayerGlus
from dcpmla.model.sum_decoder import SumBlock, SumDecoder
from dcpmla.model.sums import Mixer

_OF_LINEAR = ("use_full_rank_gate", "gate_lower_bound")  # fields of linear_attn_config


class _K3Fields(NamedTuple):
    """Kimi-K3's fields of a config and of its linear_attn_config, which Kimi Linear's need not have.

    Attributes:
        attn_res_block_size: Layers of a group, whose outputs have a sum of their own; None for one sum of all.
        routed_expert_hidden_size: Width of the routed experts' rows; None for the hidden size.
        latent_moe_use_norm: Whether the sum of routed experts is normed.
        mla_use_output_gate: Whether MLA has a gate for each column of its output.
        use_full_rank_gate: Whether gates of linear attention are projected at once, not through a low rank.
        gate_lower_bound: `DeltaConfig.decay_floor`.
    """

    attn_res_block_size: Annotated[int | None, optional(whole(1, 1024))] = None
    routed_expert_hidden_size: Annotated[int | None, optional(SIZE)] = None
    latent_moe_use_norm: Flag = False
    mla_use_output_gate: Flag = False
    use_full_rank_gate: Flag = False
    gate_lower_bound: Annotated[float | None, optional(number(-100, 0))] = None

    @classmethod
    def of(cls, config: Any) -> "_K3Fields":
        """Return the fields of a transformers config."""
        linear = getattr(config, "linear_attn_config", None) or {}
        values = {name: (linear if name in _OF_LINEAR else vars(config)).get(name) for name in cls._fields}
        return cls(**{name: value for name, value in values.items() if value is not None})


_LAYERS = list_of(whole(1, 1024))
_RULES = {
    "linear_attn_config": OBJECT,
    **{
        f"linear_attn_config.{name}" if name in _OF_LINEAR else name: rule for name, rule in rules_of(_K3Fields).items()
    },
    "mla_use_nope": only(True),
    "hidden_act": one_of(("silu", "swish", "situ")),
    **dict.fromkeys(("activation_situ_beta", "activation_situ_linear_beta"), optional(number(0, above=True))),
    "use_grouped_topk": only(True),
    **dict.fromkeys(("linear_attn_config.num_heads", "linear_attn_config.head_dim"), SIZE),
    "linear_attn_config.short_conv_kernel_size": whole(2, 64),
    **dict.fromkeys(("linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"), _LAYERS),
}


@dataclass(frozen=True)
class _Kimi(HybridFamily):
    """Kimi Linear, whose MLA has no positions, and Kimi-K3."""

    def complete(self, config: Any, raw: Mapping[str, Any]) -> None:
        """Add `situ_bounds` if the activation has them."""
        if raw.get("hidden_act") == "situ":
            config.situ_bounds = raw.get("activation_situ_beta") or 1.0, raw.get("activation_situ_linear_beta")

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with an activation that transformers has."""
        linear = raw.get("linear_attn_config") or {}
        if "kda_layers" in linear and "full_attn_layers" in linear:
            _check_layers(linear["kda_layers"], linear["full_attn_layers"], raw.get("num_hidden_layers"))
        return raw | {"hidden_act": "silu"} if raw.get("hidden_act") == "situ" else raw

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers of MLA, which have no positions; K3's have a gate for each column of a head."""
        gates_output = _K3Fields.of(config).mla_use_output_gate
        return replace(super().mla(config), use_rope=False, num_gates=config.v_head_dim if gates_output else 0)

    def delta(self, config: Any) -> DeltaConfig:
        """Return the geometry of layers of linear attention."""
        fields = _K3Fields.of(config)
        low_ranks = "f" if fields.use_full_rank_gate else "fg"
        return replace(super().delta(config), low_ranks=low_ranks, decay_floor=fields.gate_lower_bound)

    def glus(self, config: Any, layer: int) -> LayerGlus:
        """Return a layer's gated linear units: SiTU for Kimi-K3."""
        bounds = getattr(config, "situ_bounds", None)
        return super().glus(config, layer) if bounds is None else LayerGlus(*3 * [Glu(bounds[0], bounds[1], True)])

    def extend(self, model: Any) -> None:
        """Change modules of transformers' Kimi Linear into Kimi-K3's, by the config's fields."""
        config, fields = model.config, _K3Fields.of(model.config)
        for layer in model.model.layers:
            if fields.attn_res_block_size is not None:
                _add_mixture(layer, "self_attention_res", config.hidden_size)
                _add_mixture(layer, "mlp_res", config.hidden_size)
            is_linear = hasattr(layer.self_attn, "g_a_proj")
            if is_linear and fields.use_full_rank_gate:
                del layer.self_attn.g_a_proj, layer.self_attn.g_b_proj
            if fields.use_full_rank_gate if is_linear else fields.mla_use_output_gate:
                width = layer.self_attn.o_proj.in_features
                layer.self_attn.g_proj = nn.Linear(config.hidden_size, width, bias=False)
            if fields.routed_expert_hidden_size is not None and hasattr(layer.mlp, "experts"):
                _narrow_experts(
                    layer.mlp, config.hidden_size, fields.routed_expert_hidden_size, fields.latent_moe_use_norm
                )
        if fields.attn_res_block_size is not None:
            _add_mixture(model.model, "output_attn_res", config.hidden_size)


def _check_layers(kda_layers: list[int], full_attn_layers: list[int], num_layers: object) -> None:
    layers = sorted(kda_layers + full_attn_layers)
    if layers != [*range(1, len(layers) + 1)] or len(layers) != num_layers:
        raise ValueError(
            f"linear_attn_config.kda_layers and full_attn_layers are {kda_layers} and {full_attn_layers}; together "
            f"they must be the layers 1 to num_hidden_layers {num_layers}, each once"
        )


def _add_mixture(module: nn.Module, name: str, hidden_size: int) -> None:
    module.add_module(f"{name}_norm", nn.RMSNorm(hidden_size))
    module.add_module(f"{name}_proj", nn.Linear(hidden_size, 1, bias=False))


def _narrow_experts(mlp: Any, hidden_size: int, width: int, has_norm: bool) -> None:
    """Give routed experts the width of latents, and the projections to latents and back."""
    num_experts, _, size = mlp.experts.down_proj.shape
    mlp.experts.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * size, width))
    mlp.experts.down_proj = nn.Parameter(torch.empty(num_experts, width, size))
    mlp.routed_expert_down_proj = nn.Linear(hidden_size, width, bias=False)
    mlp.routed_expert_up_proj = nn.Linear(width, hidden_size, bias=False)
    if has_norm:
        mlp.routed_expert_norm = nn.RMSNorm(width)


def _load_decoder(parts: Parts, num_layers: int) -> DecoderModule:
    """Load a decoder, whose blocks come in groups in Kimi-K3."""
    group_size = _K3Fields.of(parts.model.config).attn_res_block_size
    if group_size is None:
        return load_decoder(parts, num_layers)

    def mixer(name: str, norm: str, stores: bool = False) -> Mixer:
        score = parts.vector(f"{name}_norm.weight").float() * parts.vector(f"{name}_proj.weight")[0].float()
        return Mixer(score, parts.vector(f"{norm}.weight"), parts.eps, stores)

    blocks = []
    for index, name in enumerate(parts.layer_names(num_layers)):
        attention, layer = parts.attention(f"{name}.self_attn")
        begins = index % group_size == 0
        to_attention = mixer(f"{name}.self_attention_res", f"{name}.input_layernorm", begins)
        to_mlp = mixer(f"{name}.mlp_res", f"{name}.post_attention_layernorm")
        blocks.append(SumBlock(layer, attention, parts.mlp(f"{name}.mlp"), (to_attention, to_mlp), parts.reduce))
    return SumDecoder(parts.vector("model.embed_tokens.weight"), blocks, mixer("model.output_attn_res", "model.norm"))


KIMI_LINEAR = _Kimi(
    "KimiLinear",
    check_attention=check_hybrid,
    load_decoder=_load_decoder,
    rules=_RULES,
    names=HYBRID_NAMES,
    no_mtp="; MTP modules of kimi_linear are not computed",
)
