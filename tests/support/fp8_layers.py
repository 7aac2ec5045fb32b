"""Layers with weights in block fp8, and the same layers with the dequantized weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dcpmla import MLAAttention, MLAConfig, Placement, init_mesh
from dcpmla.comm.select import select_exchange
from dcpmla.parallel.formats import Quantized, dequantize
from tests.parallel.test_fp8_linear import blocks
from tests.support.dense_layer import shapes as shapes_of
from tests.support.layouts import dcp_config

CONFIG = MLAConfig(
    hidden_size=256,
    num_heads=4,
    q_lora_rank=256,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    softmax_scale=192**-0.5,
    attention_bias=True,
)
# Rounding rows to e4m3 changes numbers by 2^-4 at most, and a norm by 2.5 %.
TOLERANCE = 4e-2


class Stored:
    """A matrix of a checkpoint in block fp8."""

    def __init__(self, weight: Quantized) -> None:
        self.weight, self.shape = weight, weight.codes.shape

    def __getitem__(self, index: Any) -> Tensor:
        return dequantize(self.weight, torch.float32)[index]

    def stored(self, rows: slice, cols: slice) -> Quantized | Tensor:
        bounds = [part.indices(size) for part, size in zip((rows, cols), self.shape, strict=True)]
        ends = zip(bounds, self.shape, strict=True)
        if any(start % 128 or (stop % 128 and stop < size) for (start, stop, _), size in ends):
            return self[rows, cols]
        cuts = tuple(slice(start // 128, -(-stop // 128)) for start, stop, _ in bounds)
        return Quantized(self.weight.codes[rows, cols], self.weight.scales[cuts])


def stored(weights: Mapping[str, Tensor], wide: tuple[str, ...] = ()) -> dict[str, Any]:
    """Replace matrices by random ones in block fp8, whose values have about the size of the former."""
    found: dict[str, Any] = dict(weights)
    for seed, (name, weight) in enumerate(weights.items()):
        if weight.ndim == 2 and not name.endswith(wide):
            made = blocks(*weight.shape, seed)
            found[name] = Stored(Quantized(made.codes, made.scales / 2 / weight.shape[1] ** 0.5))
    return found


def dequantized(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: weight[:, :] if isinstance(weight, Stored) else weight for name, weight in weights.items()}


def checkpoint(config: MLAConfig) -> dict[str, Any]:
    """Make a whole layer's weights in block fp8, but for the indexer's weights_proj."""
    assert config.q_lora_rank is not None
    widths = {"q_a_proj": config.q_lora_rank, "kv_a_proj_with_mqa": config.latent_dim, "o_proj": config.hidden_size}
    shapes = {**shapes_of(config), **{f"{name}.bias": (width,) for name, width in widths.items()}}
    if config.indexer is not None:
        width, index_heads = config.indexer.head_dim, config.indexer.num_heads
        shapes |= {
            "indexer.wq_b.weight": (index_heads * width, config.q_lora_rank),
            "indexer.wk.weight": (width, config.hidden_size),
            "indexer.weights_proj.weight": (index_heads, config.hidden_size),
            "indexer.k_norm.weight": (width,),
            "indexer.k_norm.bias": (width,),
        }
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return stored(weights, wide=("weights_proj.weight",))


def layers(
    config: MLAConfig, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[MLAAttention, MLAAttention]:
    """Return a layer in fp8, and one of the dequantized weights."""
    dcp = dcp_config(
        size,
        size,
        dcp_comm_backend="ag_rs" if dtype == torch.float64 else "auto",
        block_size=64 if device == "cuda" else 4,
        **options,
    )
    mesh, weights = init_mesh(size, size), checkpoint(config)
    exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
    placement = Placement(dcp, mesh, exchange, dtype, device)
    both = [MLAAttention(config, placement).eval() for _ in range(2)]
    both[0].load_weights(weights)
    both[1].load_weights(dequantized(weights))
    return both[0], both[1]
