"""DeepSeek-V4's layer over an engine's own projections does what the layer does that loads the same weights."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla import DCPConfig, Placement
from dcpmla.attention.layers.compressed.config import LayerKind
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.comm.exchange import LocalExchange
from dcpmla.integrations.external.compressed import (
    CompressedModules,
    CompressorModules,
    ExternalCompressedAttention,
)
from tests.attention.test_compressed_layer import MIXED, Layers, hidden_states, layout, tiny
from tests.attention.test_small_kernels import cut
from tests.integrations.test_external_latent import addresses
from tests.support.compressor_steps import config_of
from tests.support.ranks import run_ranks


def modules_of(layer: CompressedAttention, pairs_dtype: torch.dtype = torch.float32) -> CompressedModules:
    """Return a layer's projections as an engine would hand them over: parts in memory of their own."""

    def down_proj(x: Tensor) -> tuple[Tensor, ...]:
        row, *pairs = layer.down_proj(x).split(layer.down_widths, -1)
        return cut(row), *(cut(part.to(pairs_dtype)) for part in pairs)

    pooled = {
        name: CompressorModules(bias=weights.bias, norm=weights.norm)
        for name in ("compressor", "index_compressor")
        if (weights := getattr(layer, name, None)) is not None
    }
    return CompressedModules(
        down_proj=down_proj,
        q_proj=lambda x: F.linear(x, layer.q_b_proj.weight),
        q_norm=layer.q_norm,
        kv_norm=layer.kv_norm,
        sinks=layer.sinks,
        **pooled,
        index_q_proj=layer.index_q_proj.product if layer.kind.has_indexer else None,
        index_k_proj=layer.index_k_proj.product if hasattr(layer, "index_k_proj") else None,
        index_k_norm=getattr(layer, "index_k_norm", None),
        o_a_proj=layer.o_a_proj.forward,
        o_b_proj=layer.o_b_proj.forward,
    )


def external(layer: CompressedAttention, modules: CompressedModules, exchange: Any) -> CompressedAttention:
    """Return a layer over modules in the groups of another."""
    placement = Placement(layer.dcp, layer.mesh, exchange, layer.dtype, "cpu")
    return ExternalCompressedAttention(layer.config, layer.kind, placement, modules, layer.ring)


def run(layers: Layers) -> list[list[Tensor]]:
    lengths = [sum(tokens) for tokens in zip(*MIXED, strict=True)]
    dtype = layers.plan.dtype
    return layers.run(MIXED, [hidden_states(i, length).to(dtype) for i, length in enumerate(lengths)])


def compare(layouts: list[DCPConfig], dtype: torch.dtype) -> None:
    """On each rank: compare all bits of the layers' outputs and caches; with pairs of a wider dtype, outputs alone."""
    lengths = [sum(tokens) for tokens in zip(*MIXED, strict=True)]
    for dcp, pairs_dtype in itertools.product(layouts, dict.fromkeys((dtype, torch.float32))):
        loaded, over_modules = (Layers(tiny(), dcp, lengths, dtype=dtype) for _ in range(2))
        exchange = over_modules.layers[1].exchange
        over_modules.layers = [external(layer, modules_of(layer, pairs_dtype), exchange) for layer in loaded.layers]
        for layer, loaded_layer in zip(over_modules.layers, loaded.layers, strict=True):
            assert addresses(layer) <= addresses(loaded_layer), "weights are copied"
        with torch.no_grad():
            for outputs, loaded_outputs in zip(run(over_modules), run(loaded), strict=True):
                for rows, wanted_rows in zip(outputs, loaded_outputs, strict=True):
                    assert rows.any()
                    errors = (rows - wanted_rows).norm(dim=-1) / wanted_rows.norm(dim=-1)
                    # In bfloat16 a few tokens select others.
                    assert errors.float().quantile(0.8) < 0.03
                    assert torch.equal(rows, wanted_rows) or pairs_dtype != dtype
        if pairs_dtype != dtype:
            continue
        for memory, wanted_memory in zip(over_modules.cache.tensors, loaded.cache.tensors, strict=True):
            assert torch.equal(memory.view(torch.uint8), wanted_memory.view(torch.uint8))


@pytest.mark.parametrize(
    ("layouts", "dtype"),
    [
        ([layout(1, 1, 1)], torch.float32),
        ([layout(2, 2, 1), layout(2, 2, 1, dcp_q_replicate=True, index_hadamard=True)], torch.float32),
        ([layout(2, 2, 1, index_cache_dtype="fp8")], torch.bfloat16),
    ],
    ids=["dcp1", "dcp2", "bf16"],
)
def test_an_engine_s_projections(layouts: list[DCPConfig], dtype: torch.dtype) -> None:
    run_ranks(layouts[0].tensor_parallel_size, compare, layouts, dtype)


def check_entry_keys() -> None:
    """Check the modules of a layer whose index keys come from entries (DeepSeek-V4.1)."""
    config = config_of(LayerKind(1, True), 16, 8, has_entry_keys=True)
    layers = Layers(tiny(), layout(1, 1, 1), [1])
    placement = Placement(layout(1, 1, 1, block_size=1), layers.mesh, LocalExchange(), torch.float32, "cpu")
    modules = modules_of(CompressedAttention(config, config.layer_kinds[0], placement))
    ExternalCompressedAttention(config, config.layer_kinds[0], placement, modules)
    for name in ("index_k_proj", "index_k_norm"):
        with pytest.raises(ValueError, match=f"{name} is None"):
            dataclasses.replace(modules, **{name: None}).check(config, config.layer_kinds[0], 12)


def check_refusals() -> None:
    layers = Layers(tiny(), layout(1, 1, 1), [40])
    window, selecting, _ = layers.layers
    modules, exchange = modules_of(selecting), selecting.exchange
    assert modules.compressor is not None
    short = dataclasses.replace(modules.compressor, bias=modules.compressor.bias[1:])
    for changes, match in (
        ({"q_norm": modules.q_norm[1:]}, r"q_norm is \(23,\); the config .* ask for \(24,\)"),
        ({"sinks": modules.sinks[:12]}, "sinks"),
        ({"compressor": short}, r"compressor is \(\(3, 32\), \(16,\)\); .* ask for \(\(4, 32\), \(16,\)\)"),
        ({"compressor": None}, "compressor is None"),
        ({"index_compressor": None}, "index_compressor is None"),
        ({"index_q_proj": None}, "index_q_proj is None; .* ask for a projection"),
        ({"index_k_norm": modules.q_norm}, r"index_k_norm is \(24,\); .* ask for None"),
    ):
        with pytest.raises(ValueError, match=match):
            external(selecting, dataclasses.replace(modules, **changes), exchange)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compressor is"):
        external(window, modules, exchange)
    layer = external(selecting, modules, exchange)
    with pytest.raises(ValueError, match="load_weights reads none"):
        layer.load_weights(layers.modules[1].state_dict())
    step, rows = layers.step([0], [1], [1]), torch.zeros(1, layers.config.hidden_size)
    for wrong in (lambda x: modules.down_proj(x)[:3], lambda x: tuple(part.t() for part in modules.down_proj(x))):
        layer = external(selecting, dataclasses.replace(modules, down_proj=wrong), exchange)
        with pytest.raises(ValueError, match="down_proj returns shapes and strides"):
            layer(rows, layers.cache[1], step)


def test_modules_of_other_shapes_are_refused() -> None:
    run_ranks(1, check_refusals)
    run_ranks(1, check_entry_keys)
