"""A layer over an engine's own projections does what the layer does that loads the same weights."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla import MLAAttention, MLAConfig, Placement
from dcpmla.attention.modules import MLAModules
from dcpmla.parallel.quantized import BlockFp8, dequantize
from tests.attention.test_compile import MIXED, SMALL, VARIANTS, make_layer, run_layer
from tests.support.ranks import run_ranks

WIDE = dataclasses.replace(SMALL, num_heads=2, kv_lora_rank=128, qk_nope_head_dim=128, v_head_dim=128)


def modules_of(layer: MLAAttention) -> MLAModules:
    """Return a layer's projections as an engine would hand them over, none of them a module."""
    compressed = layer.config.q_lora_rank is not None
    down = layer.fused_qkv_a_proj if compressed else layer.kv_a_proj
    return MLAModules(
        down_proj=lambda x: F.linear(x, down.weight, down.bias),
        q_proj=lambda x: F.linear(x, layer.query_proj.weight),
        q_a_layernorm=layer.q_a_layernorm.weight if compressed else None,
        kv_a_layernorm=layer.kv_a_layernorm.weight,
        w_kv_b=layer.kv_b_proj.weight,
        o_proj=layer.o_proj,
    )


def given(layer: MLAAttention, modules: MLAModules) -> MLAAttention:
    """Return a layer over modules in the groups of another."""
    dtype = layer.kv_a_layernorm.weight.dtype
    placement = Placement(layer.dcp, layer.mesh, layer.exchange, dtype, "cpu")
    return MLAAttention(layer.config, placement, modules=modules)


def compare(config: MLAConfig, options: dict[str, bool]) -> bool:
    """On one of two ranks: compare a layer with one over its projections, over the same cache."""
    layer = make_layer(config, 2, "ag_rs", torch.float32, "cpu", **options)
    results = [run_layer(some, MIXED) for some in (layer, given(layer, modules_of(layer)))]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    return bool(results[0][0].any())


@pytest.mark.parametrize(
    ("name", "options"),
    [("q_lora", {}), ("no_q_lora_neox", {}), ("q_lora", {"dcp_q_replicate": True, "dcp_project_before_merge": True})],
)
def test_an_engine_s_projections(name: str, options: dict[str, bool]) -> None:
    assert run_ranks(2, compare, VARIANTS[name], options) == [True, True]


def block_fp8() -> tuple[Tensor, Tensor]:
    """On one rank: outputs with kv_b_proj in fp8 blocks, and with its values."""
    layer = make_layer(WIDE, 1, "auto", torch.float32, "cpu")
    weight = layer.kv_b_proj.weight
    scales = torch.tensor([[0.01], [0.02], [0.03], [0.04]])
    codes = BlockFp8((weight * 30).to(torch.float8_e4m3fn), scales)
    modules = modules_of(layer)
    outputs = [
        run_layer(given(layer, dataclasses.replace(modules, w_kv_b=w)), MIXED)[0]
        for w in (codes, dequantize(codes, torch.float32))
    ]
    return outputs[0], outputs[1]


def test_weights_in_fp8() -> None:
    ((found, expected),) = run_ranks(1, block_fp8)
    torch.testing.assert_close(found, expected)


def refusals() -> list[str]:
    """On one rank: what wrong weights are told."""
    layer = make_layer(SMALL, 1, "auto", torch.float32, "cpu")
    modules, told = modules_of(layer), []
    w = modules.w_kv_b
    assert isinstance(w, Tensor)
    for wrong in (
        {"w_kv_b": w[:-12]},
        {"q_a_layernorm": None},
        {"kv_a_layernorm": torch.ones(8)},
        {"w_kv_b": BlockFp8(w.to(torch.float8_e4m3fn), torch.ones(1, 1))},
    ):
        with pytest.raises(ValueError, match="has shape|BlockFp8") as caught:
            given(layer, dataclasses.replace(modules, **wrong))
        told.append(str(caught.value))
    return told


def test_weights_of_other_shapes_are_refused() -> None:
    (told,) = run_ranks(1, refusals)
    assert told == [
        "w_kv_b has shape (60, 16); the config and the heads of this rank ask for (72, 16)",
        "q_a_layernorm has shape None; the config and the heads of this rank ask for (24,)",
        "kv_a_layernorm has shape (8,); the config and the heads of this rank ask for (16,)",
        "w_kv_b is BlockFp8; heads of (8, 4) values share blocks of 128: give its values",
    ]
