"""Tiny checkpoints as DeepSeek-V4.1's is published, without n-gram tables."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.skeleton import build_skeleton
from tests.support.deepseek_v41 import DeepseekV41

TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 192,
    "hidden_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 24,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 8,
    "o_groups": 24,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "compress_rope_theta": 1.6e5,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0],  # the last one is a draft's
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 32,  # fewer heads have exact ties at 0
    "index_head_dim": 16,
    "index_topk": 6,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 5,
    "candidate_block_size": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "engram_layer_ids": [],
    "num_nextn_predict_layers": 1,
}


class Reference:
    """The oracle with the interface of transformers' models."""

    def __init__(self, model: DeepseekV41) -> None:
        self.model = model

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        """Return logits [1, T, vocab] float32 of token ids [1, T]."""
        self.model.entries, self.model.chosen, self.model.candidates = {}, {}, None
        return SimpleNamespace(logits=self.model(ids[0], {})[None].float())


def v41_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the published names of a checkpoint's tensors, and their shapes."""
    hidden, vocab, streams = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    yield from (("embed.weight", (vocab, hidden)), ("head.weight", (vocab, hidden)), ("norm.weight", (hidden,)))
    for layer in range(config["num_hidden_layers"]):
        name, num = f"layers.{layer}", streams * (2 + streams)
        for part in ("attn", "ffn"):
            yield from ((f"{name}.{part}_norm.weight", (hidden,)), (f"{name}.hc_{part}_fn", (num, streams * hidden)))
            yield from ((f"{name}.hc_{part}_base", (num,)), (f"{name}.hc_{part}_scale", (3,)))
        yield from ((f"{name}.attn.{key}", shape) for key, shape in _attention(config, layer))
        yield f"{name}.ffn.gate.weight", (config["n_routed_experts"], hidden)
        yield f"{name}.ffn.gate.bias", (config["n_routed_experts"],)
        for expert in ("shared_experts", *(f"experts.{number}" for number in range(config["n_routed_experts"]))):
            size = config["moe_intermediate_size"]
            yield from ((f"{name}.ffn.{expert}.{side}.weight", (size, hidden)) for side in ("w1", "w3"))
            yield f"{name}.ffn.{expert}.w2.weight", (hidden, size)


def _attention(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, rank, dim, heads = (
        config[key] for key in ("hidden_size", "q_lora_rank", "head_dim", "num_attention_heads")
    )
    groups, o_rank, width = (config[key] for key in ("o_groups", "o_lora_rank", "index_head_dim"))
    yield from (("wq_a.weight", (rank, hidden)), ("q_norm.weight", (rank,)), ("wq_b.weight", (heads * dim, rank)))
    yield from (("wkv.weight", (dim, hidden)), ("kv_norm.weight", (dim,)), ("attn_sink", (heads,)))
    yield from (("wo_a.weight", (groups * o_rank, heads // groups * dim)), ("wo_b.weight", (hidden, groups * o_rank)))
    if layer in config["kv_source_layer_ids"]:
        gates = ("wkv", "wgate")[: config["compress_ratios"][layer]]
        yield from ((f"compressor.{name}.weight", (dim, hidden)) for name in gates)
        yield from (("compressor.norm.weight", (dim,)), ("indexer.wk.weight", (width, dim)))
        yield "indexer.k_norm.weight", (width,)
    if layer in config["index_source_layer_ids"]:
        yield "indexer.wq_b.weight", (config["index_n_heads"] * width, rank)
        yield "indexer.weights_proj.weight", (config["index_n_heads"], hidden)


def save_v41(directory: Path, **changes: Any) -> Reference:
    """Save a tiny checkpoint of random weights as DeepSeek-V4.1 is published, and return its model."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    config = TEXT | changes
    for name, shape in v41_shapes(config):
        values = torch.randn(shape, generator=generator) * 0.2
        if "norm" in name or name.endswith("scale"):
            values = torch.rand(shape, generator=generator) + 0.5
        tensors[name] = values
    whole = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "text_config": config}
    whole |= {"vision_config": {"num_hidden_layers": 1}, "eos_token_id": 191, "pad_token_id": 2, "dtype": "float32"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(whole))
    ignored = {name: torch.zeros(4, 4) for name in ("vision.patch_embed.weight", "mtp.0.main_proj.weight")}
    save_file(tensors | ignored, directory / "model.safetensors", metadata={"format": "pt"})
    rotary = build_skeleton(load_config(directory)).model.rotary_emb
    return Reference(DeepseekV41(config, tensors, (rotary.main_inv_freq, rotary.compress_inv_freq)))
