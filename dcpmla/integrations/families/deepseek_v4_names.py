"""Names of DeepSeek-V4's tensors as published -> as transformers' modules call them."""

import re

# The rules apply in this order; names of modules stay.
RULES = [
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
