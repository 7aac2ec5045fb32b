"""Published models whose layers the benchmarks measure with random weights, as transformers configs."""

from typing import Any

_V4 = {  # shared by DeepSeek-V4-Flash and -Pro, besides the config's defaults
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
# Class of the config, and the fields that differ from its defaults.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3Config", {}),
    "kimi-k2": (
        "DeepseekV3Config",
        {
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
        },
    ),
    "v2-lite": (
        "DeepseekV2Config",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 163840,
        },
    ),
    "deepseek-v4-flash": (
        "DeepseekV4Config",
        {**_V4, "compress_ratios": [0, 0, *[4, 128] * 20, 4]},
    ),
    "deepseek-v4-pro": (
        "DeepseekV4Config",
        {
            **_V4,
            "hidden_size": 7168,
            "moe_intermediate_size": 3072,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "o_groups": 16,
            "index_topk": 1024,
            "n_routed_experts": 384,
            "routed_scaling_factor": 2.5,
            "compress_ratios": [128, 128, *[4, 128] * 29, 4],
        },
    ),
    "tiny-v4": (
        "DeepseekV4Config",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "head_dim": 128,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 48,
            "o_groups": 4,
            "o_lora_rank": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "index_n_heads": 4,
            "index_head_dim": 64,
            "index_topk": 8,
            "compress_ratios": [0, 4, 128],
        },
    ),
    "tiny": (  # runs on CPUs in seconds
        "DeepseekV3Config",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}
GEOMETRIES = tuple(_CONFIGS)


def config_of(geometry: str, **changes: Any) -> Any:
    """Return the transformers config of one of GEOMETRIES.

    Args:
        changes: Fields that are to differ.
    """
    import transformers  # seconds: only where a config is wanted

    name, fields = _CONFIGS[geometry]
    return getattr(transformers, name)(**{**fields, **changes})
