"""Names of tensors: as they are published, or as transformers saves them -> as transformers' modules call them."""

import re
from collections.abc import Sequence

# The rules apply in this order; names of modules stay.
_TEXT_RULES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^language_model\.(?=model\.|lm_head\.)", ""),
        (r"^model\.language_model\.", "model."),
        (r"\.weight_packed$", ".weight"),
        (r"\.([kq])_proj\.output_scale$", r".\1_scale"),  # a calibrated cache's, and its queries'
        (r"(?<!\.mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),  # A.X-K1
    )
]
_V4_RULES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^norm\.", "model.norm."),
        (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
        (r"^layers\.", "model.layers."),
        (r"(?<!_hc)\.scale$", ".weight_scale_inv"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"(experts\.(?:\d+\.)?)w1\.", r"\1gate_proj."),
        (r"(experts\.(?:\d+\.)?)w2\.", r"\1down_proj."),
        (r"(experts\.(?:\d+\.)?)w3\.", r"\1up_proj."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
        (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
        (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
        (r"(\.self_attn\.(?:compressor\.)?(?:indexer\.)?)norm\.", r"\1kv_norm."),
        (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
        (r"\.ape$", ".position_bias"),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.w([qo])_([ab])\.", r".\1_\2_proj."),
    )
]


def module_name(name: str, num_layers: int) -> str:
    """Return the name that transformers' module has for a tensor of a checkpoint of DeepSeek-V4.

    Args:
        num_layers: decoder layers; the MTP module, for which transformers has none, is the one after the last.
    """
    return _rename(re.sub(r"^mtp\.0\.", f"layers.{num_layers}.", name), _V4_RULES)


def text_module_name(name: str) -> str:
    """Return the name that transformers' text model has for a tensor of any other checkpoint: without what the model
    is called inside a multimodal one, and with compressed-tensors' packed codes as weights.
    """
    return _rename(name, _TEXT_RULES)


def _rename(name: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name
