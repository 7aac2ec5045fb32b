"""Experts on GPUs: two grouped products, whose kernels and tiles depend on the rows per expert."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dcpmla.attention.triton.device import describe, shared_memory
from dcpmla.cache.formats import FP8
from dcpmla.model.calls import RoutedRows
from dcpmla.model.glu import SWIGLU, Glu
from dcpmla.model.hopper import product
from dcpmla.model.hopper.pipeline import BLOCK_ROWS
from dcpmla.model.kernels.blocks import assign_blocks
from dcpmla.model.kernels.grouped import grouped_product_kernel
from dcpmla.model.kernels.packed import packed_product_kernel
from dcpmla.parallel.formats import AnyWeight, Quantized
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.kernels.packed import by_halves
from dcpmla.parallel.quantized import QuantizedRows, fields, pack


class Tile(NamedTuple):
    """A tile of one product.

    Attributes:
        rows, columns, depth: Routes, rows of W (of each part) and columns of W at a time; depth is of 16 bits or fewer.
        num_warps, num_stages: Warps per program, and stages of its pipeline.
        is_stacked: Whether both parts are one product; always so in 4 bits.
        scales_sums: Whether scales multiply the sums of groups, not the values; for integers in 4 bits.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    is_stacked: bool = False
    scales_sums: bool = False


class Tiling(NamedTuple):
    """Tiles of both products, for experts that get up to `max_rows` rows on average."""

    max_rows: float
    gate_up: Tile
    down: Tile


_MANY_ROWS = 64  # average rows per expert above which Hopper GPUs use their own kernel
# Rows from which on every tile is multiplied by one kind of instruction; on Hopper, some versions of Triton multiply 8
# rows by another one.
_ORDERED_ROWS = 16
_GROUPED = "grouped"  # integers in groups of 64 or more columns
_ZEROED = "zeroed"  # integers in such groups that have zero points
_RESERVED_BYTES = 4096  # shared memory for everything except the tiles
_FEW: dict[torch.dtype | str, Tiling] = {
    torch.bfloat16: Tiling(1, Tile(8, 32, 256, 4, 3, True), Tile(8, 64, 256, 4, 7)),
    FP8: Tiling(1, Tile(16, 32, 128, 4, 7, True), Tile(16, 64, 128, 4, 9)),
    torch.uint8: Tiling(1, Tile(8, 16, 512, 2, 4), Tile(8, 32, 256, 2, 7)),
    # Warps share a step's groups, which gives each SM more warps to wait for memory than a tile has rows for.
    _GROUPED: Tiling(1, Tile(8, 16, 1024, 4, 3, scales_sums=True), Tile(8, 32, 512, 4, 7, scales_sums=True)),
}
_FEW[_ZEROED] = _FEW[_GROUPED]
# Smallest first. Measured on H200s.
_TILINGS: dict[torch.dtype | str, tuple[Tiling, ...]] = {
    torch.bfloat16: (
        Tiling(8, Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 3)),
        Tiling(128, Tile(64, 64, 128, 4, 4), Tile(64, 128, 64, 4, 3)),
        Tiling(float("inf"), Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3)),
    ),
    FP8: (
        Tiling(8, Tile(16, 64, 128, 4, 5), Tile(16, 128, 128, 4, 3)),
        Tiling(128, Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3)),
        Tiling(float("inf"), Tile(128, 128, 128, 8, 3), Tile(64, 128, 128, 4, 3)),
    ),
    torch.uint8: (
        Tiling(6, Tile(8, 32, 512, 4, 3), Tile(8, 128, 128, 4, 4)),
        Tiling(24, Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 4)),
        Tiling(176, Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3)),
        Tiling(float("inf"), Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 4, 4)),
    ),
}
_MORE = _TILINGS[torch.uint8][1:]
_TILINGS[_GROUPED] = Tiling(6, Tile(8, 32, 512, 4, 3, scales_sums=True), Tile(8, 128, 128, 4, 4)), *_MORE
_TILINGS[_ZEROED] = Tiling(6, Tile(8, 64, 256, 4, 3), Tile(8, 128, 128, 4, 4)), *_MORE


def compute_experts(call: RoutedRows) -> Tensor:
    """Compute `model.experts.compute_experts` of at least one token and one route, from its operator's arguments."""
    x, quantized, glu, num_experts, is_deterministic = *call[:2], call.glu, call.num_experts, call.is_deterministic
    ids, expert_weights = call.expert_ids.contiguous(), call.expert_weights.contiguous()
    top_k, num_routes = ids.shape[1], ids.numel()
    gate_up, down = (pack(codes, *map(_contiguous, others)) for codes, *others in (call[4:8], call[8:12]))
    num_own, width = len(call.down), call.gate_up.shape[1] // 2
    kind, is_packed = _tiles_of(gate_up, down), call.gate_up.dtype == torch.uint8
    fuses = not is_deterministic  # a compiler may fuse in one kernel's code and not in another's
    if num_routes > _MANY_ROWS * num_experts and product.takes(x, gate_up, down):
        blocks = assign_blocks(ids, num_own, BLOCK_ROWS)
        rows: Tensor | QuantizedRows = x
        if kind == FP8:
            rows = quantize_rows(x) if quantized is None else quantized
        elif is_packed:
            rows = product.interleave(x)
        h = product.multiply(rows, gate_up, blocks, x.dtype, fuses, expert_weights, glu)
        out = product.multiply(h, down, blocks, x.dtype, fuses)
        assert isinstance(out, Tensor)
        return out
    if call.is_few:
        tiling, experts, routes = _FEW[kind], ids, None
    else:
        tiling = next(tiling for tiling in _TILINGS[kind] if num_routes <= tiling.max_rows * num_experts)
        experts, routes, _ = assign_blocks(ids, num_own, max(tiling.gate_up.rows, tiling.down.rows))
    _, gate_up_tile, down_tile = _widen(tiling) if is_deterministic else tiling

    h = x.new_empty(num_routes, width)
    source = by_halves(x) if is_packed else x if quantized is None else quantized
    _multiply(source, gate_up, h, gate_up_tile, experts, routes, top_k, fuses, expert_weights, glu)
    rows = call.new_result()
    _multiply(h, down, rows, down_tile, experts, routes, top_k, fuses)
    return rows


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _tiles_of(gate_up: AnyWeight, down: AnyWeight) -> torch.dtype | str:
    """Return the key of the weights' tiles."""
    if isinstance(gate_up, Tensor) or isinstance(down, Tensor):
        return torch.bfloat16
    formats = gate_up.format, down.format
    if all(each.codes == "int4" and each.columns >= 64 for each in formats):
        return _ZEROED if formats[0].has_zeros else _GROUPED
    return gate_up.codes.dtype


def _widen(tiling: Tiling) -> Tiling:
    """Return a tiling in which a row has the same bits as in all others."""
    tiles = (tile._replace(rows=max(tile.rows, _ORDERED_ROWS)) for tile in (tiling.gate_up, tiling.down))
    return Tiling(tiling.max_rows, *tiles)


def _multiply(
    x: Tensor | QuantizedRows,
    weight: AnyWeight,
    out: Tensor,
    tile: Tile,
    experts: Tensor,
    routes: Tensor | None,
    top_k: int,
    fuses: bool,
    expert_weights: Tensor | None = None,
    glu: Glu = SWIGLU,
) -> None:
    """Launch one product; with expert_weights it is the gated one, of a weight of two parts."""
    is_gated = expert_weights is not None
    codes, scales, zeros, factors = fields(weight)
    codes = codes.unflatten(1, (1 + is_gated, -1))
    num_summed = experts.numel() // len(out) if routes is None else 1
    num_tiles = len(out) if routes is None else routes.numel() // tile.rows
    if isinstance(x, Tensor):
        x, x_scales = quantize_rows(x) if codes.dtype == FP8 else (x, None)
    else:
        x, x_scales = x
    width, k = codes.shape[2], x.shape[1]
    depth, parts = tile.depth * 2 // max(2, x.itemsize), codes.shape[1]
    tile_bytes = parts * tile.columns * depth * codes.itemsize
    if isinstance(weight, Quantized) and weight.format.is_packed:
        tile_bytes = weight.format.num_bytes((parts * tile.columns, depth))
    max_stages = (shared_memory(x.device) - _RESERVED_BYTES) // (tile.rows * depth * x.itemsize + tile_bytes)
    grid, routing = (
        (num_tiles * triton.cdiv(width, tile.columns),),
        (experts, routes, expert_weights, out, glu.gate_bound, glu.up_bound),
    )
    options: dict[str, Any] = {
        "TOP_K": top_k if is_gated else 1,
        "NUM_SUMMED": num_summed,
        "IS_SMOOTH": glu.is_smooth,
        "ROWS": tile.rows,
        "BLOCK_ROWS": tile.rows if routes is None else routes.shape[1],
        "DEPTH": depth,
        "WIDTH": width,
        "K": k,
        # A sum takes two loop stages for one of memory because ids of experts are loaded before their weights.
        "STAGES": max(1, min(tile.num_stages, max_stages * 2 if num_summed > 1 else max_stages)),
        "num_warps": tile.num_warps,
        "enable_fp_fusion": fuses,
    }
    if isinstance(weight, Quantized) and weight.format.is_packed:
        options |= {"GROUP": weight.format.columns, "SCALES_SUMS": tile.scales_sums}
        tiles = describe(codes, [1, parts, tile.columns, depth // 2])
        packed_product_kernel[grid](x, tiles, scales, zeros, factors, *routing, **options)
    else:
        weights = describe(codes, [1, 1 + tile.is_stacked, tile.columns, depth])
        strides = (0, 0) if x_scales is None else x_scales.stride()
        grouped_product_kernel[grid](x, x_scales, *strides, weights, scales, *routing, GATED=is_gated, **options)
