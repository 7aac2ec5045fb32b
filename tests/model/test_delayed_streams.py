"""Delayed connections through a whole decoder: as in float64, with the parts of DeepSeek-V4.1 between them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.model.mixing import Constants, Projection, Streams
from dcpmla.model.streams import Connection, DelayedCollapse, finish
from dcpmla.parallel.quantized import plain
from tests.support.deepseek_v41 import DeepseekV41

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 4,
    "compress_ratios": [0, 1, 1, 2, 2, 2],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 3,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 5,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "vocab_size": 40,
    "engram_layer_ids": [1],
}
ANGLES = torch.tensor([1.0, 0.1]), torch.tensor([0.7, 0.05])
NUM_TOKENS = 23


def make_shapes() -> dict[str, tuple[int, ...]]:
    size, dim, rank, inner = 32, 16, 12, 10
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (40, size), "head.weight": (40, size), "norm.weight": (size,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name, attn = f"layers.{layer}", f"layers.{layer}.attn"
        for part in ("attn", "ffn"):
            shapes |= {f"{name}.{part}_norm.weight": (size,), f"{name}.hc_{part}_fn": (24, 4 * size)}
            shapes |= {f"{name}.hc_{part}_base": (24,), f"{name}.hc_{part}_scale": (3,)}
        shapes |= {f"{attn}.wq_a.weight": (rank, size), f"{attn}.q_norm.weight": (rank,)}
        shapes |= {f"{attn}.wq_b.weight": (4 * dim, rank), f"{attn}.attn_sink": (4,)}
        shapes |= {f"{attn}.wkv.weight": (dim, size), f"{attn}.kv_norm.weight": (dim,)}
        shapes |= {f"{attn}.wo_a.weight": (12, 2 * dim), f"{attn}.wo_b.weight": (size, 12)}
        if layer in CONFIG["kv_source_layer_ids"]:
            shapes |= {f"{attn}.compressor.{part}.weight": (dim, size) for part in ("wkv", "wgate")}
            shapes |= {f"{attn}.compressor.norm.weight": (dim,), f"{attn}.indexer.wk.weight": (8, dim)}
            shapes |= {f"{attn}.indexer.k_norm.weight": (8,)}
        if layer in CONFIG["index_source_layer_ids"]:
            shapes |= {f"{attn}.indexer.wq_b.weight": (16, rank), f"{attn}.indexer.weights_proj.weight": (2, size)}
        shapes |= {f"{name}.ffn.gate.weight": (4, size), f"{name}.ffn.gate.bias": (4,)}
        for expert in ("shared_experts", *(f"experts.{number}" for number in range(4))):
            shapes |= {f"{name}.ffn.{expert}.{part}.weight": (inner, size) for part in ("w1", "w3")}
            shapes |= {f"{name}.ffn.{expert}.w2.weight": (size, inner)}
        if layer in CONFIG["engram_layer_ids"]:
            shapes |= {f"{name}.engram.embed.weight": (50, 4), f"{name}.engram.wkv.weight": (5 * size, 24)}
            shapes |= {f"{name}.engram.{part}_weight": (4, size) for part in ("q", "k")}
    return shapes


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in make_shapes().items()}
    return {name: tensor * 0.3 if tensor.dim() > 1 else tensor for name, tensor in drawn.items()}


def draw_tokens() -> tuple[Tensor, dict[int, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CONFIG["vocab_size"], (NUM_TOKENS,), generator=generator)
    return ids, {1: torch.randint(0, 50, (NUM_TOKENS, 6), generator=generator)}


@pytest.mark.parametrize("num_tokens", [1, 6, 17])
def test_no_token_sees_later_ones(tensors: dict[str, Tensor], num_tokens: int) -> None:
    ids, hashes = draw_tokens()
    whole = DeepseekV41(CONFIG, tensors, ANGLES)(ids, hashes)
    first = {layer: rows[:num_tokens] for layer, rows in hashes.items()}
    actual = DeepseekV41(CONFIG, tensors, ANGLES)(ids[:num_tokens], first)
    torch.testing.assert_close(actual, whole[:num_tokens])


def test_candidates_and_selections_matter(tensors: dict[str, Tensor]) -> None:
    """In contexts of more entries than an indexer chooses, and for later layers' choice alone."""
    ids, hashes = draw_tokens()
    whole = DeepseekV41(CONFIG, tensors, ANGLES)(ids, hashes)
    for field in ("index_topk", "candidate_topk_blocks"):
        wider = DeepseekV41(CONFIG | {field: 20}, tensors, ANGLES)(ids, hashes)
        is_equal = torch.isclose(wider, whole).all(1)
        assert is_equal[:3].all()
        assert not is_equal.all()


def test_connections_as_in_float64(tensors: dict[str, Tensor]) -> None:
    model = DeepseekV41(CONFIG, tensors, ANGLES)
    ids, hashes = draw_tokens()
    expected = model(ids, hashes)
    constants = Constants(CONFIG["rms_norm_eps"], CONFIG["hc_eps"], CONFIG["hc_sinkhorn_iters"], delays=True)
    streams = Streams(tensors["embed.weight"][ids][:, None].repeat(1, CONFIG["hc_mult"], 1))
    for layer in range(CONFIG["num_hidden_layers"]):
        if layer in hashes:
            streams = Streams(model.add_memory(layer, finish(streams).double(), hashes[layer]).float(), pre=streams.pre)
        for part, compute in (("attn", model.attend), ("ffn", model.route)):
            projection = Projection(*(tensors[f"layers.{layer}.hc_{part}_{name}"] for name in Projection._fields))
            x, streams = Connection(projection, tensors[f"layers.{layer}.{part}_norm.weight"], constants)(streams)
            streams = streams._replace(out=compute(layer, plain(x).double()).float())
    x, _ = DelayedCollapse(tensors["norm.weight"], constants.eps)(streams)
    torch.testing.assert_close(x.double() @ tensors["head.weight"].double().T, expected, atol=1e-3, rtol=1e-3)
