"""The model that engines run, of DeepSeek-V3's kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}
ROPE |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model whose heads are narrow, for CPUs."""
    return save_model(tmp_path_factory.mktemp("model"), num_heads=8, head_dim=32)


def save_model(directory: Path, num_heads: int, head_dim: int, num_layers: int = 2, num_dense: int = 2) -> Path:
    """Save a DeepSeek-V3 whose first layers are dense; return its directory."""
    routing = {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    config = DeepseekV3Config(**small_fields(num_heads, head_dim, num_layers, num_dense), **routing)
    return save_random(DeepseekV3ForCausalLM, config, directory)


def small_fields(num_heads: int, head_dim: int, num_layers: int, num_dense: int) -> dict[str, Any]:
    """Return fields of a config, with what vLLM asks of one, and widths that it has for MLA."""
    return {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_dense,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": ROPE,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def save_random(kind: Any, config: Any, directory: Path) -> Path:
    """Save a model of a class with random weights; return its directory."""
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    for layer in model.model.layers[config.first_k_dense_replace :]:
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.1)
    model.float().save_pretrained(directory)
    return directory
