"""Layers with weights in block fp8: on a CPU exactly the layers of the dequantized weights."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from dcpmla import DCPConfig, Placement, init_mesh
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.attention.mla import layer as layer_module
from dcpmla.attention.mla.fp8_scales import OUTPUT_SCALE_NAMES, read_scale
from dcpmla.comm.select import select_exchange
from dcpmla.indexer_config import IndexerConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.parallel.formats import Quantized, dequantize
from dcpmla.parallel.linear import Linear
from tests.attention.test_compile import DECODES, MIXED, PREFILL, Batch, run_layer
from tests.attention.test_compressed_layer import modules_of, tiny
from tests.support.fp8_layers import CONFIG, TOLERANCE, dequantized, layers, stored
from tests.support.ranks import on_ranks, run_ranks

EXACT = 1e-12  # in float64: sums in another order, where memory lies otherwise


def assert_equal_weights(in_fp8: nn.Module, plain: nn.Module, kept: set[str]) -> None:
    """Compare values, and which linear layers hold codes."""
    for name, module in plain.named_modules():
        if isinstance(module, Linear):
            mine = in_fp8.get_submodule(name)
            assert isinstance(mine, Linear)
            assert (mine.weight_scale is not None) == (name in kept), name
            weight = mine.weight if mine.weight_scale is None else Quantized(mine.weight, mine.weight_scale)
            assert torch.equal(dequantize(weight, module.weight.dtype), module.weight)


def check_layers(size: int, batches: tuple[Batch, ...]) -> None:
    """Compare outputs and caches, with each option that changes which heads a rank holds."""
    layer_module.PROJECT_FIRST_TOKENS = 1
    for q_replicate, project_first in ((False, False), (True, False), (False, True)):
        options = {"dcp_q_replicate": q_replicate, "dcp_project_before_merge": project_first}
        in_fp8, plain = layers(CONFIG, size, dtype=torch.float64, **options)
        assert_equal_weights(in_fp8, plain, {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"})
        for batch in batches:
            for got, wanted in zip(run_layer(in_fp8, batch), run_layer(plain, batch), strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("size", [1, 2])
def test_layers_are_those_of_dequantized_weights(size: int) -> None:
    run_ranks(size, check_layers, size, (MIXED, DECODES[0], PREFILL))


@on_ranks(1)
def test_blocks_that_heads_share() -> None:
    """Compare heads whose parts share blocks, and an indexer, whose wk lies beside a wide weight."""
    indexer = IndexerConfig(num_heads=4, head_dim=128, topk=8, rope_interleaved=False)
    config = dataclasses.replace(CONFIG, num_heads=2, qk_nope_head_dim=64, v_head_dim=192, indexer=indexer)
    in_fp8, plain = layers(config, 1, dtype=torch.float64)
    kept = {"fused_qkv_a_proj", "q_b_proj", "o_proj", "indexer.wq_b"}
    assert_equal_weights(in_fp8, plain, kept)
    for got, wanted in zip(run_layer(in_fp8, MIXED), run_layer(plain, MIXED), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("scale", [torch.ones(2), torch.tensor(0.0), torch.tensor(torch.inf), torch.tensor(torch.nan)])
def test_static_scales_that_are_none(scale: Tensor) -> None:
    message = "tensor o_proj.input_scale (has shape|is .*; it must be a finite number above 0)"
    with pytest.raises(ValueError, match=message):
        read_scale({"o_proj.input_scale": scale}, OUTPUT_SCALE_NAMES)


@on_ranks(1)
def test_compressed_layers() -> None:
    """Compare the weights of DeepSeek-V4's layers, and what an output in groups gives after them."""
    sizes = {"num_attention_heads": 4, "o_groups": 2, "index_n_heads": 4, "index_head_dim": 64, "hidden_size": 128}
    hf_config = tiny(**sizes, head_dim=128, q_lora_rank=128, o_lora_rank=128)
    config, dcp, mesh = attention_of(hf_config).config, DCPConfig(block_size=16), init_mesh(1, 1)
    exchange = select_exchange(dcp, mesh.dcp_group, "cpu").exchange
    wide = (
        "gate_proj.weight",
        "weights_proj.weight",
        "position_bias",
        "compressor.kv_proj.weight",
        "indexer.kv_proj.weight",
    )
    placement = Placement(dcp, mesh, exchange, torch.float32, "cpu")
    for module, kind in zip(modules_of(hf_config), config.layer_kinds, strict=True):
        weights = stored(module.state_dict(), wide)
        both = []
        for found in (weights, dequantized(weights)):
            layer = CompressedAttention(config, kind, placement)
            layer.load_weights(found)
            both.append(layer)
        kept = {"q_b_proj", "o_a_proj", "o_b_proj", "index_q_proj"} | (set() if kind.ratio else {"down_proj"})
        assert_equal_weights(*both, kept)
        out, lse, cos_sin = torch.randn(3, 4, 128), torch.randn(3, 4), torch.randn(3, 8)
        plain = both[0].finish(out, lse, cos_sin, 5)
        assert torch.equal(plain, both[1].finish(out, lse, cos_sin, 5))
        both[0].o_a_proj.takes_quantized = True
        got = both[0].finish(out, lse, cos_sin, 5)
        assert (got - plain).norm() < TOLERANCE * plain.norm()
        assert not torch.equal(got, plain)
        assert torch.equal(both[0].attend(torch.zeros(5, 128), None, None), torch.zeros(5, 256))
