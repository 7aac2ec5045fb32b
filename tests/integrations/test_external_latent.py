"""A layer over an engine's own projections does what the layer does that loads the same weights."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcpmla import ExternalAttention, MLAAttention, MLAConfig, MLAModules, Placement
from dcpmla.attention.layers.pooled.layer import PooledAttention
from dcpmla.parallel.formats import Quantized, dequantize
from tests.attention.test_compile import DECODES, MIXED, SMALL, VARIANTS, make_layer, run_layer
from tests.support.ranks import run_ranks

WIDE = dataclasses.replace(SMALL, num_heads=2, kv_lora_rank=128, qk_nope_head_dim=128, v_head_dim=128)


def modules_of(layer: MLAAttention) -> MLAModules:
    """Return a layer's projections as an engine would hand them over, none of them a module."""
    compressed, fused = layer.config.q_lora_rank is not None, layer.fused_qkv_a_proj
    q_dim = 0 if compressed else layer.q_heads.count * layer.config.query_width
    q_weight, down = fused.weight.tensor_split((q_dim,))
    q_bias, down_bias = (None, None) if fused.bias is None else fused.bias.tensor_split((q_dim,))
    q_parts = (layer.q_b_proj.weight, None) if compressed else (q_weight, q_bias)
    return MLAModules(
        down_proj=lambda x: F.linear(x, down, down_bias),
        q_proj=lambda x: F.linear(x, *q_parts),
        q_a_layernorm=layer.q_a_layernorm.weight if compressed else None,
        kv_a_layernorm=layer.kv_a_layernorm.weight,
        w_kv_b=layer.kv_b_proj.weight,
        o_proj=layer.o_proj,
        sinks=layer.sinks,
        k_pe_layernorm=None if layer.k_pe_layernorm is None else layer.k_pe_layernorm.weight,
    )


def external(layer: MLAAttention, modules: MLAModules) -> MLAAttention:
    """Return a layer over modules in the groups of another."""
    dtype = layer.kv_a_layernorm.weight.dtype
    placement = Placement(layer.dcp, layer.mesh, layer.exchange, dtype, "cpu")
    return ExternalAttention(layer.config, placement, modules)


def compare(config: MLAConfig, options: dict[str, bool]) -> bool:
    """On one of two ranks: compare a layer with one over its projections, over the same cache."""
    layer = make_layer(config, 2, "ag_rs", torch.float32, "cpu", **options)
    results = [run_layer(some, MIXED) for some in (layer, external(layer, modules_of(layer)))]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    return bool(results[0][0].any())


@pytest.mark.parametrize(
    ("name", "options"),
    [("q_lora", {}), ("no_q_lora_neox", {}), ("q_lora", {"dcp_q_replicate": True, "dcp_project_before_merge": True})],
)
def test_an_engine_s_projections(name: str, options: dict[str, bool]) -> None:
    assert run_ranks(2, compare, VARIANTS[name], options) == [True, True]


def count_graphs() -> int:
    """On one rank: compile a layer over modules and one that loads, and compare; return the number of graphs."""
    layer = make_layer(SMALL, 1, "auto", torch.float32, "cpu")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(external(layer, modules_of(layer)), fullgraph=True, backend="aot_eager")
    for batch in DECODES:
        for found, expected in zip(run_layer(layer, batch, compiled), run_layer(layer, batch), strict=True):
            torch.testing.assert_close(found, expected, atol=0, rtol=0)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_layer_over_modules_compiles_whole() -> None:
    """Into as many graphs as a layer that loads its weights (`tests/attention/test_compile.py`)."""
    assert run_ranks(1, count_graphs) == [2]


class ExternalPooledAttention(ExternalAttention, PooledAttention):
    """Sparse MLA over pools whose projections are an engine's."""


# A value other than the default for each field of the config that has one, or fields that go together.
FIELDS: dict[str, dict[str, Any]] = {
    "rms_norm_eps": {"rms_norm_eps": 0.5},
    "rope_interleaved": {"rope_interleaved": False},
    "use_rope": {"use_rope": False},
    "projects_pe": {"projects_pe": False},
    "attention_bias": {"attention_bias": False},
    "kv_lora_scale": {"kv_lora_scale": 1.5},
    "llama_4_scaling": {"llama_4_scaling": (0.3, 16)},
    "has_query_factors": {"has_query_factors": True},
    "indexer": {"indexer": VARIANTS["sparse"].indexer},
    "has_sinks": {"has_sinks": True},
    "window": {"window": 64},
    "norms_k_pe": {"norms_k_pe": True},
    "num_gates": {"num_gates": 1},
    "query_gates": {"query_gates": True},
    "input_parts": {"input_parts": 2},
}


def addresses(layer: nn.Module, apart: str = "-") -> set[int]:
    """Return the addresses of a layer's parameters, without those whose names begin with `apart`."""
    return {weight.data_ptr() for name, weight in layer.named_parameters() if not name.startswith(apart)}


def compare_fields() -> dict[str, str]:
    """On one rank: compare layers of each field with layers over their modules; return those that are refused."""
    refused = {}
    for name, changes in FIELDS.items():
        config = dataclasses.replace(SMALL, **changes)
        layer_class, external_class = (
            (MLAAttention, ExternalAttention) if config.projects_pe else (PooledAttention, ExternalPooledAttention)
        )
        made = make_layer(SMALL, 1, "auto", torch.float32, "cpu")
        placement = Placement(made.dcp, made.mesh, made.exchange, torch.float32, "cpu")
        layer, generator = layer_class(config, placement), torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data.uniform_(0.1, 0.6, generator=generator)
        try:
            own = external_class(config, placement, modules_of(layer))
        except ValueError as error:
            refused[name] = str(error)
            continue
        assert addresses(own, "indexer.") <= addresses(layer), "weights are copied"
        if own.indexer is not None:  # it loads its own weights
            assert layer.indexer is not None
            own.indexer.load_state_dict(layer.indexer.state_dict())
        results = [run_layer(each, MIXED) for each in (layer, own)]
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, atol=0, rtol=0)
            assert expected.any()
        assert not set(dict(layer.named_parameters())) - set(dict(own.named_parameters())) - HELD
    return refused


# Parameters whose work an engine's callables do.
HELD = {f"{part}.{kind}" for part in ("fused_qkv_a_proj", "q_b_proj", "o_proj") for kind in ("weight", "bias")}


def test_every_field_reaches_the_layer_or_is_refused() -> None:
    assert list(FIELDS) == [
        each.name for each in dataclasses.fields(MLAConfig) if each.default is not dataclasses.MISSING
    ]
    ((refused),) = run_ranks(1, compare_fields)
    assert list(refused) == ["has_query_factors", "num_gates", "input_parts"]
    assert "config.has_query_factors is True" in refused["has_query_factors"]
    assert "config.num_gates is 1" in refused["num_gates"]
    assert "config.input_parts is 2" in refused["input_parts"]


def block_fp8() -> tuple[Tensor, Tensor]:
    """On one rank: outputs with kv_b_proj in fp8 blocks, and with its values."""
    layer = make_layer(WIDE, 1, "auto", torch.float32, "cpu")
    weight = layer.kv_b_proj.weight
    scales = torch.tensor([[0.01], [0.02], [0.03], [0.04]])
    codes = Quantized((weight * 30).to(torch.float8_e4m3fn), scales)
    modules = modules_of(layer)
    outputs = [
        run_layer(external(layer, dataclasses.replace(modules, w_kv_b=w)), MIXED)[0]
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
        {"w_kv_b": Quantized(w.to(torch.float8_e4m3fn), torch.ones(1, 1))},
    ):
        with pytest.raises(ValueError, match="has shape|in fp8") as caught:
            external(layer, dataclasses.replace(modules, **wrong))
        told.append(str(caught.value))
    sinks = torch.zeros(6)
    for flags, wrong in (
        ({"has_sinks": True}, {}),
        ({"has_sinks": True}, {"sinks": sinks[:5]}),
        ({"has_sinks": True}, {"sinks": sinks.double()}),
        ({}, {"sinks": sinks}),
        ({"norms_k_pe": True}, {}),
        ({}, {"k_pe_layernorm": torch.ones(8)}),
    ):
        with pytest.raises(ValueError, match="has shape|sinks is") as caught:
            dataclasses.replace(modules, **wrong).check(dataclasses.replace(SMALL, **flags), 6, 6)  # type: ignore[arg-type]
        told.append(str(caught.value))
    own = external(layer, modules)
    own.load_weights({"attn.k_scale": torch.ones(1)})
    with pytest.raises(ValueError, match="weights have 'sinks', but the layer's modules hold its weights"):
        own.load_weights({"sinks": sinks})
    return told


def test_weights_of_other_shapes_are_refused() -> None:
    (told,) = run_ranks(1, refusals)
    assert told == [
        "w_kv_b has shape (60, 16); the config and the heads of this rank ask for (72, 16)",
        "q_a_layernorm has shape None; the config and the heads of this rank ask for (24,)",
        "kv_a_layernorm has shape (8,); the config and the heads of this rank ask for (16,)",
        "w_kv_b is in fp8; heads of (8, 4) values share blocks of 128: give its values",
        "sinks has shape None; the config and the heads of this rank ask for (6,)",
        "sinks has shape (5,); the config and the heads of this rank ask for (6,)",
        "sinks is torch.float64; attention reads torch.float32",
        "sinks has shape (6,); the config and the heads of this rank ask for None",
        "k_pe_layernorm has shape None; the config and the heads of this rank ask for (8,)",
        "k_pe_layernorm has shape (8,); the config and the heads of this rank ask for None",
    ]
