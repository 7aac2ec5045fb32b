"""Tiny checkpoints of Sarvam, with the fields of its published config."""

import json
from pathlib import Path
from typing import Any

import transformers

from tests.support.models import random_model, tiny_config

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("max_position_embeddings", "num_experts_per_tok"),
)


def save_sarvam(directory: Path) -> Any:
    """Save a checkpoint of random weights, and return its model, transformers' DeepSeek-V3."""
    common = tiny_config("deepseek_v3_neox").to_dict()
    published = {
        **{name: common[name] for name in _SIZES},
        "model_type": "sarvam_mla",
        "architectures": ["SarvamMLAForCausalLM"],
        "num_experts": 8,
        "num_shared_experts": 1,
        "head_dim": common["kv_lora_rank"] + common["qk_rope_head_dim"],
        "q_head_dim": common["qk_nope_head_dim"] + common["qk_rope_head_dim"],
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "deepseek_yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": common["eos_token_id"],
    }
    model = random_model(transformers.SarvamMLAConfig.from_dict(dict(published)))
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(published))
    return model
