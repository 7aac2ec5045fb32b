"""Experts on GPUs: two grouped products, tiled by how many rows an expert gets."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dcpmla.attention.output.ops import quantize_fp8_groups
from dcpmla.attention.triton.device import describe
from dcpmla.cache.formats import FP8
from dcpmla.model.kernels.blocks import assign_blocks, sum_routes
from dcpmla.model.kernels.grouped import grouped_product_kernel
from dcpmla.parallel.quantized import BLOCK, AnyWeight


class Tile(NamedTuple):
    """A tile of one product: rows of W (of each part) and columns of W at a time, warps, stages of the pipeline."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


class Tiling(NamedTuple):
    """Tiles of both products, for experts of up to so many rows on average.

    Attributes:
        rows: of a block, which has one expert.
    """

    most_rows: float
    rows: int
    gate_up: Tile
    down: Tile


# Up to so many routes are not sorted: each is a block of its own, and the second product sums a token's.
_FEW_TOKENS, _FEW_ROUTES_AN_EXPERT = 2, 0.25
_FEW = {
    torch.bfloat16: Tiling(1, 8, Tile(32, 256, 4, 3), Tile(64, 256, 4, 7)),
    FP8: Tiling(1, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 9)),
    torch.uint8: Tiling(1, 64, Tile(64, 128, 4, 4), Tile(64, 128, 4, 7)),
}
# Smallest first. Measured on H200s.
_TILINGS = {
    torch.bfloat16: (
        Tiling(8, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 3)),
        Tiling(32, 32, Tile(64, 128, 4, 4), Tile(64, 128, 4, 3)),
        Tiling(128, 64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
        Tiling(float("inf"), 128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    ),
    FP8: (
        Tiling(8, 16, Tile(64, 128, 4, 5), Tile(128, 128, 4, 4)),
        Tiling(32, 32, Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
        Tiling(128, 64, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
        Tiling(float("inf"), 128, Tile(64, 128, 4, 3), Tile(128, 128, 8, 3)),
    ),
    torch.uint8: (
        Tiling(64, 64, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4)),
        Tiling(float("inf"), 128, Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    ),
}


def compute_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: AnyWeight,
    down: AnyWeight,
    swiglu_limit: float | None,
) -> Tensor:
    """Compute `model.experts.compute_experts` of at least one token and one route."""
    ids, expert_weights = expert_ids.contiguous(), expert_weights.contiguous()
    (num_tokens, top_k), num_routes = ids.shape, ids.numel()
    gate_up_codes, gate_up_scales = _parts(gate_up)
    down_codes, down_scales = _parts(down)
    num_experts, width, hidden = len(down_codes), gate_up_codes.shape[1] // 2, down_codes.shape[1]
    kind = gate_up_codes.dtype if gate_up_codes.dtype in _FEW else torch.bfloat16
    is_few = num_tokens <= _FEW_TOKENS or num_routes <= _FEW_ROUTES_AN_EXPERT * num_experts
    if is_few:
        tiling, experts, routes = _FEW[kind], ids, None
    else:
        tiling = next(tiling for tiling in _TILINGS[kind] if num_routes <= tiling.most_rows * num_experts)
        experts, routes = assign_blocks(ids, num_experts, tiling.rows)
    blocks = tiling.rows, num_experts, experts, routes

    h = x.new_empty(num_routes, width)
    x, x_scales = _quantize(x, kind)
    codes = gate_up_codes.unflatten(1, (2, width))
    _multiply(x, x_scales, codes, gate_up_scales, h, tiling.gate_up, *blocks, top_k, expert_weights, swiglu_limit)
    rows = h.new_empty(num_tokens if is_few else num_routes, hidden)
    h, h_scales = _quantize(h, kind)
    _multiply(h, h_scales, down_codes.unsqueeze(1), down_scales, rows, tiling.down, *blocks, top_k)
    return rows if is_few else sum_routes(rows, ids, num_experts)


def _parts(weight: AnyWeight) -> tuple[Tensor, Tensor | None]:
    return (weight, None) if isinstance(weight, Tensor) else (weight.codes, weight.scales.contiguous())


def _quantize(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return quantize_fp8_groups(x, BLOCK, "row", False) if kind == FP8 else (x, None)


def _multiply(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor | None,
    out: Tensor,
    tile: Tile,
    rows: int,
    num_experts: int,
    experts: Tensor,
    routes: Tensor | None,
    top_k: int,
    expert_weights: Tensor | None = None,
    swiglu_limit: float | None = None,
) -> None:
    """Launch one product; with expert_weights it is the gated one. codes: [E, parts, width, K or K / 2]."""
    is_gated = expert_weights is not None
    num_summed = top_k if routes is None and not is_gated else 1
    width, depth = codes.shape[2], x.shape[1]
    per_code = 2 if codes.dtype == torch.uint8 else 1
    grid = (experts.numel() // num_summed * triton.cdiv(width, tile.columns),)
    grouped_product_kernel[grid](
        x,
        x_scales,
        describe(codes, [1, 1, tile.columns, tile.depth // per_code]),
        scales,
        experts,
        routes,
        expert_weights,
        out,
        num_experts,
        swiglu_limit,
        TOP_K=top_k if is_gated else 1,
        NUM_SUMMED=num_summed,
        ROWS=rows,
        DEPTH=tile.depth,
        WIDTH=width,
        K=depth,
        GATED=is_gated,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
