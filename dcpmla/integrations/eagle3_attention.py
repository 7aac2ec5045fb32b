"""The two kinds of attention of EAGLE3 heads: MLA as DeepSeek-V3's, or keys and values of each head as Llama's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dcpmla.attention.layers.grouped.config import GroupedConfig
from dcpmla.attention.layers.grouped.spec import GroupedSpec
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.spec import LayerSpec
from dcpmla.fields import EVEN_SIZE, SIZE, Rule, list_of, one_of, only, optional
from dcpmla.integrations.config_checks import check_rope_fields
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.table import find_family


@dataclass(frozen=True)
class HeadAttention:
    """A kind of attention.

    Attributes:
        family: Family of models of which a head has one layer.
        spec: Function of a config that returns the layer's spec.
        widened: Projections that take embeddings and hidden states side by side.
        required: Fields of config.json without a default.
        fields: Other fields of config.json that the layer's attention is made from.
        rules: Rules for fields of config.json.
        fixed: Fields of the family's models that heads do not have.
    """

    family: Family
    spec: Callable[[Any], LayerSpec]
    widened: tuple[str, ...]
    required: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    rules: Mapping[str, Rule] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


def _latent_spec(config: Any) -> LatentSpec:
    return LatentSpec(replace(find_family("deepseek_v3").mla(config), input_parts=2))


def _grouped_spec(config: Any) -> GroupedSpec:
    return GroupedSpec(
        GroupedConfig(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            input_parts=2,
        )
    )


def _check_grouped(config: Any) -> None:
    """Raise ValueError for a Llama config whose attention is not `GroupedAttention`."""
    check_rope_fields(config.rope_parameters, config.head_dim, "rope_parameters.{}")
    _grouped_spec(config)


_MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_LATENT = HeadAttention(
    find_family("deepseek_v3"),
    _latent_spec,
    ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    (*_MLA_SIZES, "qk_rope_head_dim"),
    ("q_lora_rank", "rope_interleave", "attention_bias"),
    # Attention without positions, and gates of its output, in the heads of other publishers.
    {
        **dict.fromkeys(_MLA_SIZES, SIZE),
        "qk_rope_head_dim": EVEN_SIZE,
        **dict.fromkeys(("mla_use_nope", "mla_use_output_gate"), optional(only(False))),
    },
    {"first_k_dense_replace": 1},
)
_GROUPED = HeadAttention(
    Family(
        "Llama",
        check_attention=_check_grouped,
        rules=dict.fromkeys(("num_key_value_heads", "head_dim"), optional(SIZE)),
    ),
    _grouped_spec,
    ("q_proj", "k_proj", "v_proj"),
    fields=("num_key_value_heads", "head_dim", "mlp_bias"),
    rules={
        "head_dim": optional(EVEN_SIZE),
        **dict.fromkeys(("attention_bias", "qkv_bias", "use_qk_norm"), optional(only(False))),
        "partial_rotary_factor": optional(only(1.0)),
        "layer_types": optional(list_of(one_of(("full_attention",)))),
    },
)
ATTENTION = {
    "Eagle3DeepseekV2ForCausalLM": _LATENT,
    "Eagle3DeepseekV3ForCausalLM": _LATENT,
    "LlamaForCausalLMEagle3": _GROUPED,
}
