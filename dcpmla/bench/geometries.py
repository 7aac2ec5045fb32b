"""Published models whose layers the benchmarks measure with random weights, as transformers configs."""

from typing import Any

# Class of the config, and the fields that differ from its defaults.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3Config", {}),
    "kimi-k2": (
        "DeepseekV3Config",
        {
            "vocab_size": 163840,
            "moe_intermediate_size": 2048,
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
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 163840,
        },
    ),
    "tiny": (  # for CPUs: seconds
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
        changes: fields that are to differ.
    """
    import transformers  # seconds: only where a config is wanted

    name, fields = _CONFIGS[geometry]
    return getattr(transformers, name)(**{**fields, **changes})
