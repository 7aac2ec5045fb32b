"""dots3: sparse MLA and MLA with a window, with gates of both; the text model of its multimodal checkpoints."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.layers.windowed.spec import WindowSpec
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.spec import LayerSpec
from dcpmla.config import MLAConfig
from dcpmla.fields import EVEN_SIZE, SIZE, Rule, check_fields, either, list_of, number, one_of, only, optional, whole
from dcpmla.integrations.config_checks import check_kinds, check_model, check_rope_fields
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.sparse import read_indexer
from dcpmla.integrations.parts import Shapes

# Types of layers, and of transformers' rotary embedding.
FULL, WINDOW = _TYPES = "indexed_attention", "sliding_attention"
_SIZES = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "head_dim", "qk_nope_head_dim"), SIZE
) | {"v_head_dim": SIZE, "qk_rope_head_dim": EVEN_SIZE}
_RAW_RULES = {
    "head_dim": optional(SIZE),
    **{f"swa_{name}": rule for name, rule in _SIZES.items() if name not in ("num_key_value_heads", "qk_rope_head_dim")},
    "swa_rope_theta": number(1, above=True),
    "sliding_window_size": SIZE,
    "moe_shared_expert_intermediate_size": SIZE,
    "per_layer_config": optional(Rule("an object of objects", lambda value: _holds_objects(value))),
    "n_routed_experts": whole(2, 1 << 16),
    "mtp_layer_types": optional(list_of(one_of(("full_attention", FULL, WINDOW)))),
    "moe_layer_freq": either(whole(1), list_of(whole(0, 1))),
    **dict.fromkeys(("use_dsa", "use_sliding_window"), only(True)),
    "apply_mla_qkv_lora_rescale": only(True),
    **dict.fromkeys(("attention_gate_type", "swa_attention_gate_type"), one_of(("headwise",))),
}


@dataclass(frozen=True)
class _Dots3(Family):
    """dots3, whose layers with a window have sizes of their own."""

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with the number of MTP modules, which published configs do not have."""
        if raw.get("per_layer_config") is not None:
            check_fields({"layer_types": list_of(one_of(_TYPES))}, raw)
            _check_sizes(raw["per_layer_config"], raw.get("num_hidden_layers"))
        return {"num_nextn_predict_layers": 1, **raw}

    def check(self, config: Any) -> None:
        """Raise ValueError for fields that no such model can have; sizes of layers are read from a layer's config."""
        self.check_attention(config)
        check_model(config.per_layer_config[FULL], self.routing)

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers with an indexer."""
        return replace(self._mla(config, FULL), indexer=read_indexer(config))

    def layers(self, config: Any, mla: MLAConfig, has_mtp: bool) -> Iterable[LayerSpec]:
        """Return layers with indexers and layers with a window; the first of a pass with a window writes the windows
        for all.
        """
        full = LatentSpec(mla, True, rotary=FULL)
        windowed = replace(self._mla(config, WINDOW), window=config.sliding_window)
        window = WindowSpec(windowed, rotary=WINDOW)
        layers: list[LatentSpec] = [window if each == WINDOW else full for each in config.layer_types]
        for layer in (config.layer_types.index(WINDOW), *([len(layers) - 1] if has_mtp else [])):
            if layers[layer] is window:
                layers[layer] = replace(window, selects=True)
        return layers

    def _mla(self, config: Any, kind: str) -> MLAConfig:
        """Return the geometry of layers of a type. The factor of the query latent is in the scale of scores; the
        indexer's choice does not depend on it.
        """
        mla = super().mla(config.per_layer_config[kind])
        assert mla.q_lora_rank is not None
        return replace(
            mla,
            softmax_scale=mla.qk_head_dim**-0.5 * math.sqrt(mla.hidden_size / mla.q_lora_rank),
            kv_lora_scale=math.sqrt(mla.hidden_size / mla.kv_lora_rank),
            rms_norm_eps=config.rms_norm_eps,
            norms_k_pe=True,
            num_gates=1,
        )

    def with_mtp_layer(self, config: Any) -> Any:
        """Return a config with the MTP module's layer: an MLP, and attention of the kind that mtp_layer_types has."""
        config = super().with_mtp_layer(config)
        kind = (getattr(config, "mtp_layer_types", None) or [WINDOW])[0]
        config.layer_types[-1] = WINDOW if kind == WINDOW else FULL
        sizes = {int(layer): own for layer, own in config.to_dict()["per_layer_config"].items()}
        first = config.layer_types.index(config.layer_types[-1])
        config.per_layer_config = sizes | {config.num_hidden_layers - 1: sizes.get(first, {})}
        return config

    def mtp_shapes(self, config: Any, block: str, of_model: Shapes) -> Shapes:
        """Return the shapes of the MTP module's weights that are in no decoder layer, among them its own embedding."""
        embedding = config.vocab_size, config.hidden_size
        return super().mtp_shapes(config, block, of_model) | {f"{block}.embed_tokens.weight": embedding}


def _holds_objects(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(sizes, dict) for sizes in value.values())


def _check_sizes(sizes_of_layers: dict[str, dict[str, Any]], num_layers: int | None) -> None:
    """Raise ValueError for sizes of layers that do not exist, or that are no sizes of attention."""
    for layer, sizes in sizes_of_layers.items():
        if not layer.isdecimal() or (num_layers is not None and int(layer) >= num_layers) or sizes.keys() - _SIZES:
            raise ValueError(
                f"per_layer_config has {layer!r}: {sizes}; each layer below num_hidden_layers {num_layers} may have "
                f"{', '.join(_SIZES)}"
            )
        check_fields(_SIZES, sizes, f"per_layer_config.{layer}.{{}}".format)


def _check(config: Any) -> None:
    """Raise ValueError for layers of other kinds, and for sizes that do not go together."""
    check_fields({"layer_types": list_of(one_of(_TYPES))}, vars(config))
    check_kinds(config, _TYPES)
    full = config.per_layer_config[FULL]
    for kind in _TYPES:
        sizes, rope = config.per_layer_config[kind], config.rope_parameters[kind]
        rotated = int(sizes.head_dim * rope["partial_rotary_factor"])
        if rotated > sizes.head_dim or rotated != sizes.qk_rope_head_dim or rotated != full.qk_rope_head_dim:
            raise ValueError(
                f"qk_rope_head_dim of {kind} is {sizes.qk_rope_head_dim}; it must be the model's "
                f"{full.qk_rope_head_dim}, and the {rotated} dims that head_dim {sizes.head_dim} and "
                f"partial_rotary_factor {rope['partial_rotary_factor']} give"
            )
        check_rope_fields(rope, rotated, f"rope_parameters.{kind}.{{}}")


DOTS3 = _Dots3(
    "Dots3NoteText",
    check_attention=_check,
    rules=_RAW_RULES,
    mtp_layer={"mlp_layer_types": "dense"},
    # The MTP module's embedding is published outside of its layer.
    names=((r"model\.mtp\.embed_tokens\.", "model.layers.{mtp}.embed_tokens."),),
)
