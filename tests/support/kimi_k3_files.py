"""Tiny checkpoints as Kimi-K3's is published."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.kimi_k3 import KimiK3

TEXT = {
    "model_type": "kimi_linear",
    "vocab_size": 192,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 3,
    "num_hidden_layers": 5,
    "num_attention_heads": 24,
    "num_key_value_heads": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 4,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "linear_attn_config": {
        "kda_layers": [1, 3, 4],
        "full_attn_layers": [2, 5],
        "num_heads": 24,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -2.0,
    },
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 191,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def k3_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the published names of a checkpoint's tensors, without "language_model.", and their shapes."""
    hidden, vocab, kda_layers = config["hidden_size"], config["vocab_size"], config["linear_attn_config"]["kda_layers"]
    yield from (("model.embed_tokens.weight", (vocab, hidden)), ("lm_head.weight", (vocab, hidden)))
    yield from (("model.norm.weight", (hidden,)), ("model.output_attn_res_norm.weight", (hidden,)))
    yield "model.output_attn_res_proj.weight", (1, hidden)
    for number in range(config["num_hidden_layers"]):
        name = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield f"{name}.{norm}.weight", (hidden,)
        for proj in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{name}.{proj}.weight", (1, hidden)
        attention = _delta(config) if number + 1 in kda_layers else _mla(config)
        yield from ((f"{name}.self_attn.{key}", shape) for key, shape in attention)
        if number < config["first_k_dense_replace"]:
            yield from _mlp(f"{name}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _moe(f"{name}.block_sparse_moe", config)


def _delta(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    yield from ((f"{name}_proj.weight", (heads * dim, hidden)) for name in "qkvg")
    yield from ((f"{name}_conv1d.weight", (heads * dim, 1, linear["short_conv_kernel_size"])) for name in "qkv")
    yield from (
        ("f_a_proj.weight", (dim, hidden)),
        ("f_b_proj.weight", (heads * dim, dim)),
        ("dt_bias", (heads * dim,)),
    )
    yield from (("A_log", (1, 1, heads, 1)), ("b_proj.weight", (heads, hidden)))
    yield from (("o_norm.weight", (dim,)), ("o_proj.weight", (hidden, heads * dim)))


def _mla(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, q_rank, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    yield from (("q_a_proj.weight", (q_rank, hidden)), ("q_a_layernorm.weight", (q_rank,)))
    yield from (("q_b_proj.weight", (heads * (nope + rope), q_rank)), ("kv_a_layernorm.weight", (rank,)))
    yield from (("kv_a_proj_with_mqa.weight", (rank + rope, hidden)), ("g_proj.weight", (heads * value, hidden)))
    yield from (("kv_b_proj.weight", (heads * (nope + value), rank)), ("o_proj.weight", (hidden, heads * value)))


def _moe(name: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, latent, size = (
        config[key] for key in ("hidden_size", "routed_expert_hidden_size", "moe_intermediate_size")
    )
    yield f"{name}.gate.weight", (config["num_experts"], hidden)
    yield f"{name}.gate.e_score_correction_bias", (config["num_experts"],)
    yield f"{name}.routed_expert_down_proj.weight", (latent, hidden)
    yield f"{name}.routed_expert_up_proj.weight", (hidden, latent)
    yield f"{name}.routed_expert_norm.weight", (latent,)
    yield from _mlp(f"{name}.shared_experts", hidden, size * config["num_shared_experts"])
    for expert in range(config["num_experts"]):
        yield from ((f"{name}.experts.{expert}.{side}.weight", (size, latent)) for side in ("w1", "w3"))
        yield f"{name}.experts.{expert}.w2.weight", (latent, size)


def _mlp(name: str, hidden: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((f"{name}.{side}_proj.weight", (size, hidden)) for side in ("gate", "up"))
    yield f"{name}.down_proj.weight", (hidden, size)


def save_k3(directory: Path, latent_factor: float = 1.0, **changes: Any) -> KimiK3:
    """Save a tiny checkpoint of random weights as Kimi-K3 is published, and return its model.

    latent_factor: of the projections to latents; changes: of the config's fields.
    """
    config = TEXT | changes
    tensors = k3_tensors(config, latent_factor)
    whole = {"model_type": "kimi_k3", "text_config": config, "vision_config": {"vt_hidden_size": 32}, "pad_token_id": 0}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(whole))
    if "quantization_config" in config:
        tensors, packed = _pack_experts(tensors)
    else:
        packed = tensors
    stored = {f"language_model.{name}": tensor for name, tensor in packed.items()}
    stored["vision_tower.patch_embed.proj.weight"] = torch.zeros(32, 3, 14, 14)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return KimiK3(config, tensors)


def k3_tensors(config: dict[str, Any], latent_factor: float = 1.0, std: float = 0.2) -> dict[str, Tensor]:
    """Return random tensors of a checkpoint by their names.

    latent_factor: of the projections to latents; std: of all projections.
    """
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in k3_shapes(config):
        values = torch.randn(shape, generator=generator) * std
        if "norm" in name:
            values = torch.rand(shape, generator=generator) + 0.5
        elif name.endswith("A_log"):
            values = torch.rand(shape, generator=generator) * -4
        elif "conv1d" in name:
            values = torch.randn(shape, generator=generator) * 0.5
        tensors[name] = values * latent_factor if "q_a_proj" in name or "kv_a_proj" in name else values
    return tensors


def _pack_experts(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tensors with routed experts' values in MXFP4, and as they are stored."""
    from tests.support.quantized_models import quantize_fp4  # which imports tests.support.models, and that this file

    values, stored = dict(tensors), {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stored[name] = tensor
            continue
        codes, scales, values[name] = quantize_fp4(tensor)
        exponents = (scales.log2() + 127).to(torch.uint8)
        stored |= {f"{name}_packed": codes.view(torch.uint8), f"{name}_scale": exponents}
    return values, stored
