"""Fields of configs that a family does not take: each is refused with its name, and what it must be."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from tests.integrations.test_published_checkpoints import flat_dots3
from tests.support.deepseek_v41_files import TEXT as V41
from tests.support.kimi_k3_files import TEXT as K3
from tests.support.models import FAMILIES, tiny_config

ROPE = tiny_config("glm4_moe_lite").rope_parameters
FACTORS = [1.0, 1.25, 1.5, 2.0]
LONGROPE = {"type": "longrope", "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": FACTORS, "long_factor": FACTORS}
EQUAL_LISTS = "short_factor is .* both must be the same 4 numbers"
# By family, changes of a tiny config, and the message. A field whose change is ... is left out.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "axk2": [
        ({"gated_norm_rank": 0}, "gated_norm_rank is 0; it must be a whole number in"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"n_group": None}, "`n_group` and `topk_group` must be set together"),
        ({"n_group": 3}, "n_group"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is .*full_attention.*indexed_attention"),
        ({"mlp_layer_types": ["moe"] * 2}, "mlp_layer_types is .*dense, sparse"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ],
    "glm4_moe_lite": [  # what fails in transformers or in floats; its qk_rope_head_dim is head_dim to transformers
        ({"qk_rope_head_dim": 5}, r"qk_rope_head_dim is 5; it must be an even number in \[2, "),
        ({"rope_parameters": ROPE | {"mscale_all_dim": 1e200}}, r"rope_parameters.mscale_all_dim is 1e\+200"),
        ({"rope_parameters": ROPE | {"rope_type": "longrope"}}, "'rope_type'='longrope': .*_factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be one of silu, swish"),
    ],
    "minicpm3": [
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0, 1.25, 1.5, 2.5]}}, EQUAL_LISTS),
        ({"rope_scaling": LONGROPE | {"long_factor": FACTORS[1:], "short_factor": FACTORS[1:]}}, EQUAL_LISTS),
        (
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings is 1; it must be a whole number",
        ),
        (
            {"rope_scaling": LONGROPE | {"mscale_all_dim": 1.0}},
            "mscale_all_dim is 1.0; it must be 0 where there is no factor",
        ),
    ],
    "glm5_next_text": [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64; it must be"),
        ({"mla_use_nope": False}, "mla_use_nope is False; it must be true"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail is False; it must be true"),
        ({"index_kpool": 1}, "index_kpool is 1; it must be"),
        ({"index_kpool": 5}, "index_topk .*24.* index_kpool .*5"),
        ({"indexer_types": ["full", "shared", "full", "full", "full"]}, "indexer_types is .* layer 1, .* must be full"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types is .* must both be there"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound is 1.0; it must be"),
        ({"linear_attn_config": {"safe_gate": 3}}, "linear_attn_config.safe_gate is 3; it must be"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0; it must be"),
    ],
    "hy_v4": [
        ({"enable_ihc": False}, "enable_ihc is False; it must be true"),
        ({"gated_mla": False}, "gated_mla is False; it must be true"),
        ({"learnable_sink": False}, "learnable_sink is False; it must be true"),
        ({"gating_type": "headwise"}, "gating_type is 'headwise'; it must be one of elementwise"),
        ({"layer_types": ["full_attention"] * 3}, r"layer_types is \['full_attention'.*; it must be"),
        ({"hc_magnitude": -1.0}, "hc_magnitude is -1.0; it must be"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0; it must be"),
        ({"indexer_types": ["shared", "full", "full"]}, "indexer_types give .* the first is full"),
    ],
    "mistral_large4_text": [
        ({"q_lora_rank": 24}, "q_lora_rank is 24; it must be null"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; it must be true"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types is .* each one of indexed_attention"),
        ({"kv_source_layers": [0, 1, 2]}, "kv_source_layers has 3 entries; num_hidden_layers is 4"),
        ({"kv_source_layers": [0, 1, 2, 3, 4]}, "kv_source_layers has 5 entries; num_hidden_layers is 4"),
        ({"kv_source_layers": [1, 1, 2, 3]}, "kv_source_layers has 1 for layer 0; it must be 0, or an earlier"),
        ({"kv_source_layers": [0, 1, 1, 2]}, "kv_source_layers has 2 for layer 3; it must be 3, or an earlier"),
        ({"kv_source_layers": [0, 0, 2, 3]}, "kv_source_layers has 0 for layer 1; .* same entry .*: there is none"),
        (
            {"num_hidden_layers": 5, "no_rope_layers": [1] * 5, "kv_source_layers": [0, 1, 0, 1, 0]},
            "kv_source_layers has 0 for layer 2; it must be the latest source before it .*: 1",
        ),
    ],
    "bailing_hybrid": [
        (
            {"expert_swiglu_limit_list": [1.0]},
            r"expert_swiglu_limit_list has 1 entries; each of 4 layers \(num_hidden_layers\) has one",
        ),
        (
            {"share_expert_swiglu_limit_list": [0, -1, 0, 0]},
            r"share_expert_swiglu_limit_list is \[0, \-1, 0, 0\]; it must be a list",
        ),
        ({"share_expert_swiglu_limit_list": 4.0}, r"share_expert_swiglu_limit_list is 4\.0; it must be a list"),
        ({"rotary_dim": 6}, r"rotary_dim is 6; it must be qk_rope_head_dim, which is 8"),
        ({"moe_shared_expert_intermediate_size": 96}, r"it must be moe_intermediate_size, which is 48"),
        ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, r"architectures is \['BailingMoeV2_5ForCausalLM'\]"),
    ],
    "kimi_k3": [
        ({"mla_use_nope": False}, "mla_use_nope is False; it must be true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func is 'softmax'; it must be one of sigmoid",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be one of silu, swish, situ"),
        (
            {"linear_attn_config": K3["linear_attn_config"] | {"kda_layers": [1, 3]}},
            r"kda_layers and full_attn_layers are \[1, 3\] and \[2, 5\]; together they must be the layers 1 to .* 5",
        ),
        (
            {"linear_attn_config": K3["linear_attn_config"] | {"gate_lower_bound": 1.0}},
            "linear_attn_config.gate_lower_bound is 1.0; it must be",
        ),
    ],
    "dots3_note_text": [
        ({"apply_mla_qkv_lora_rescale": False}, "apply_mla_qkv_lora_rescale is False; it must be true"),
        (
            {"swa_attention_gate_type": "elementwise"},
            "swa_attention_gate_type is 'elementwise'; it must be one of head",
        ),
        ({"use_dsa": False}, "use_dsa is False; it must be true"),
        ({"use_sliding_window": False, "layer_types": None}, "use_sliding_window is False; it must be true"),
        ({"swa_qk_nope_head_dim": 10}, "qk_rope_head_dim of sliding_attention is 10; it must be the model's 8"),
        ({"per_layer_config": {"9": {"head_dim": 4}}}, "per_layer_config has '9': .*; each layer below num_hidden_lay"),
        ({"per_layer_config": {"1": {"hidden_size": 4}}}, "per_layer_config has '1': .* may have num_attention_heads"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be one of sigmoid"),
    ],
    "deepseek_v41": [
        ({"engram_layer_ids": [1]}, "engram_num_embeddings is missing; layers in engram_layer_ids"),
        ({"q_lora_rank": ...}, "q_lora_rank is missing; a DeepSeek-V4.1 config has vocab_size,"),
        ({"candidate_block_size": ...}, "candidate_block_size is missing"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; it must be 1"),
        ({"attention_bias": True}, "attention_bias is True; it must be false"),
        ({"compress_ratios": [0, 4, 4, 1, 1, 1, 1]}, "compress_ratios is .*each a whole number in .0, 2."),
        ({"compress_ratios": [0, 2, 2, 1, 1, 1]}, "compress_ratios has 6 entries; each of 7 layers .* has one"),
        ({"kv_source_layer_ids": [3, 1]}, "kv_source_layer_ids is .3, 1.; it must be ascending layers"),
        ({"kv_source_layer_ids": [0, 1, 3]}, "kv_source_layer_ids is .*whose compress_ratios are not 0"),
        ({"kv_source_layer_ids": [1]}, "kv_source_layer_ids is .1.; for layer 3, .* the latest source is 1"),
        ({"index_source_layer_ids": [3, 5]}, "index_source_layer_ids is .3, 5.; for layer 1, .* source is None"),
        ({"kv_source_layer_ids": [1, 3, 4]}, "index_source_layer_ids is .*it must have layer 4 of kv_source_layer_ids"),
        ({"candidate_source_layer_id": 4}, "candidate_source_layer_id is 4; it must be in index_source_layer_ids"),
        ({"candidate_source_layer_id": 1}, "candidate_source_layer_id is 1; .* compress_ratios of all later ones"),
        ({"candidate_topk_blocks": 3}, "candidate_topk_blocks is 3 and candidate_block_size 2, which hold 5"),
    ],
}


def config_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a file of a family as it is saved or published, with changes of its text model."""
    if family in ("deepseek_v41", "kimi_k3"):
        text = {"deepseek_v41": V41, "kimi_k3": K3}[family] | changes
        fields = {name: value for name, value in text.items() if value is not ...}
        return {"model_type": family, "image_token_id": 129264, "text_config": fields}
    text = json.loads(tiny_config(family).to_json_string()) | {"model_type": family}
    if family == "dots3_note_text":
        return flat_dots3(text) | {"model_type": "dots3_note", "layer_types": text["layer_types"]} | changes
    if family == "bailing_hybrid":
        text["pad_token_id"] = 0
    if family == "minicpm3":
        del text["rope_parameters"]
    if family == "mistral_large4_text":
        for name in ("indexer_types", "mlp_layer_types", "layer_types") if "num_hidden_layers" in changes else ():
            del text[name]
        return {"model_type": "mistral_large4", "text_config": text | changes}
    return text | changes


def cases() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the cases of families that the installed transformers has."""
    for family, rows in REFUSED.items():
        if family in (*FAMILIES, "deepseek_v41"):
            yield from ((family, *row) for row in rows)


@pytest.mark.parametrize(("family", "changes", "message"), [*cases()])
def test_fields_are_refused_by_name(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(family, changes)))
    with pytest.raises(ValueError, match=message):
        attention_of(load_config(file))


@pytest.mark.skipif("mistral_large4_text" not in FAMILIES, reason="needs a transformers with Mistral Large 4")
def test_layers_with_positions_share_latents(tmp_path: Path) -> None:
    changes = {"no_rope_layers": [1, 1, 1, 1], "kv_source_layers": [0, 0, 2, 0]}
    (tmp_path / "config.json").write_text(json.dumps(config_of("mistral_large4_text", changes)))
    load_config(tmp_path)
