"""Tiny checkpoints as DeepSeek-V4.1's is published."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.ngrams import NgramSizes
from dcpmla.integrations.skeleton import build_skeleton
from tests.support.deepseek_v41 import DeepseekV41
from tests.support.plain_ngrams import FIELDS, PlainHash, compress, save_tokenizer
from tests.support.quantized_models import dequantize, quantize, quantize_fp4
from tests.support.small_tokenizers import tokenizer_of

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

QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
NUM_BLOCKS = 3  # of a DSpark module
DSPARK: dict[str, Any] = {
    "compress_ratios": [*TEXT["compress_ratios"][:-1], *[0] * NUM_BLOCKS],
    "num_nextn_predict_layers": NUM_BLOCKS,
    "dspark_block_size": 5,
    "dspark_markov_rank": 6,
    "dspark_noise_token_id": 189,
    "dspark_target_layer_ids": [4, 6],
    "dspark_n_routed_experts": 6,
    "dspark_num_experts_per_tok": 3,
}
_IN_FP4 = re.compile(r"\.experts\.")
_IN_FP8 = re.compile(
    r"\.attn\.(indexer\.)?w(q_a|q_b|kv|o_a|o_b)\.|\.(shared_experts|main_proj)\.|\.engram\.(embed|wkv)\."
)


class Reference:
    """The oracle with the interface of transformers' models."""

    def __init__(self, model: DeepseekV41, hashes: PlainHash | None) -> None:
        self.model, self.hashes = model, hashes

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        """Return logits [1, T, vocab] float32 of token ids [1, T]."""
        self.model.entries, self.model.chosen, self.model.candidates = {}, {}, None
        rows = [] if self.hashes is None else self.hashes(ids[0], None, None).long()
        hashes = dict(zip(self.model.config["engram_layer_ids"], rows, strict=True))
        return SimpleNamespace(logits=self.model(ids[0], hashes)[None].float())


def v41_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the published names of a checkpoint's tensors, and their shapes."""
    hidden, vocab, streams = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    yield from (("embed.weight", (vocab, hidden)), ("head.weight", (vocab, hidden)), ("norm.weight", (hidden,)))
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        yield from _block(config, name, layer, config["n_routed_experts"])
        if layer in config["engram_layer_ids"]:
            num_rows = config["engram_num_embeddings"][config["engram_layer_ids"].index(layer)]
            dim = config["engram_head_dim"]
            num_columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
            yield f"{name}.engram.embed.weight", (num_rows, dim)
            yield f"{name}.engram.wkv.weight", ((streams + 1) * hidden, num_columns * dim)
            yield from ((f"{name}.engram.{which}_weight", (streams, hidden)) for which in "qk")
    if "dspark_block_size" in config:
        for number in range(NUM_BLOCKS):
            yield from _block(config, f"mtp.{number}", -1, config["dspark_n_routed_experts"])
        last, rank = f"mtp.{NUM_BLOCKS - 1}", config["dspark_markov_rank"]
        yield "mtp.0.main_proj.weight", (hidden, len(config["dspark_target_layer_ids"]) * hidden)
        yield from (("mtp.0.main_norm.weight", (hidden,)), (f"{last}.norm.weight", (hidden,)))
        yield from ((f"{last}.markov_head.{part}.weight", (vocab, rank)) for part in ("embed", "head"))
        yield f"{last}.confidence_head.proj.weight", (1, hidden + rank)


def _block(config: dict[str, Any], name: str, layer: int, num_experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, streams, size = config["hidden_size"], config["hc_mult"], config["moe_intermediate_size"]
    num = streams * (2 + streams)
    for part in ("attn", "ffn"):
        yield from ((f"{name}.{part}_norm.weight", (hidden,)), (f"{name}.hc_{part}_fn", (num, streams * hidden)))
        yield from ((f"{name}.hc_{part}_base", (num,)), (f"{name}.hc_{part}_scale", (3,)))
    yield from ((f"{name}.attn.{key}", shape) for key, shape in _attention(config, layer))
    yield f"{name}.ffn.gate.weight", (num_experts, hidden)
    yield f"{name}.ffn.gate.bias", (num_experts,)
    for expert in ("shared_experts", *(f"experts.{number}" for number in range(num_experts))):
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


def save_v41(directory: Path, is_quantized: bool = False, **changes: Any) -> Reference:
    """Save a tiny checkpoint of random weights as DeepSeek-V4.1 is published, and return its model.

    Args:
        is_quantized: Whether routed experts are in e2m1, other linear layers and tables in e4m3.
    """
    generator, tensors, stored = torch.Generator().manual_seed(0), {}, {}
    config, hashes = TEXT | changes, None
    directory.mkdir(parents=True, exist_ok=True)
    if config["engram_layer_ids"]:
        config |= {**FIELDS, "engram_layer_ids": config["engram_layer_ids"]}
        config["engram_compressed_vocab_size"] = save_tokenizer(directory)
        sizes, ids = NgramSizes.of(SimpleNamespace(**config)), compress(tokenizer_of("byte_level"))
        pad_id = ids[config["engram_pad_token_id"]]
        ids += [pad_id] * (config["vocab_size"] - len(ids))
        hashes = PlainHash(ids, pad_id, sizes.multipliers().tolist())
    for name, shape in v41_shapes(config):
        values = torch.randn(shape, generator=generator) * 0.2
        if "norm" in name or name.endswith("scale"):
            values = torch.rand(shape, generator=generator) + 0.5
        tensors[name] = values
        stored |= _quantized(tensors, name) if is_quantized else {name: values}
    whole = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "text_config": config}
    whole |= {"vision_config": {"num_hidden_layers": 1}, "eos_token_id": 191, "pad_token_id": 2, "dtype": "float32"}
    if is_quantized:
        whole["quantization_config"] = QUANTIZATION
    (directory / "config.json").write_text(json.dumps(whole))
    ignored = {name: torch.zeros(4, 4) for name in ("vision.patch_embed.weight", "mtp.0.main_proj.weight")}
    ignored = {name: tensor for name, tensor in ignored.items() if name not in tensors}
    save_file(stored | ignored, directory / "model.safetensors", metadata={"format": "pt"})
    rotary = build_skeleton(load_config(directory)).model.rotary_emb
    return Reference(DeepseekV41(config, tensors, (rotary.main_inv_freq, rotary.compress_inv_freq)), hashes)


def _quantized(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Round a tensor as the published checkpoint does; return it as it is stored."""
    values, scale = tensors[name], name.replace(".weight", ".scale")
    if _IN_FP4.search(name):
        codes, scales, tensors[name] = quantize_fp4(values)
    elif _IN_FP8.search(name):
        block = (1, 32) if ".embed." in name else (32, 32)
        codes, scales = quantize(values, block, powers_of_two=True)
        tensors[name] = dequantize(codes, scales, block)
    else:
        return {name: values}
    return {name: codes, scale: scales.to(torch.float8_e8m0fnu)}
