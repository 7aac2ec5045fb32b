"""The expert kernels of others (peers) that `bench experts` compares with ours, over block fp8: DeepGEMM, humming and
vLLM's.

Peers give the two grouped products. What surrounds them is alike and as ours: a sort of the routes, rows quantized
once, one kernel from the first product to the second's input, a sum in float32.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from benchmarks.peers.kernels import gate_rows, gather_rows, sort_routes, sum_rows
from benchmarks.peers.libraries import load_deep_gemm, load_humming, load_vllm
from dcpmla.bench.results import leave_out
from dcpmla.comm.terms import add_terms
from dcpmla.model.experts import ExpertWeights
from dcpmla.parallel.formats import BLOCK, Quantized
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.kernels import quantize
from dcpmla.parallel.quantized import QuantizedRows, empty_groups

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # takes x, expert_ids, expert_weights, as `compute_experts`
MakeExperts = Callable[[ExpertWeights], Experts]

_FEW_ROWS, _MANY_ROWS = 64, 128  # rows of DeepGEMM's tiles on Hopper
_LOCKS = 1 << 14  # locks for humming's sums over tiles that share a result; it needs a few for each multiprocessor
_FP8, _BLOCKS = "fp8_w8a8", [BLOCK, BLOCK]  # vLLM's name of the format
_SPARSE = 4  # vLLM does not sort routes where there are this many experts for each
_MOST_SHARED = 2  # limit of shared experts: vLLM tunes tiles for the routed experts, ours adds the shared ones


class DeepGemm:
    """DeepGEMM's products over contiguous rows, with the layout and the settings of vLLM on Hopper.

    vLLM's tiles have 128 rows; with few rows an expert, here they have 64, as in DeepGEMM's masked products.

    Args:
        library: Package `deep_gemm`.
    """

    def __init__(self, library: Any, weights: ExpertWeights) -> None:
        self._library, self._weights = library, _block_fp8(weights)
        library.set_pdl(True)

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        gate_up, down = self._weights
        (num_experts, hidden, width), top_k = down.codes.shape, expert_ids.shape[1]
        tile = _FEW_ROWS if expert_ids.numel() <= _FEW_ROWS // 2 * num_experts else _MANY_ROWS
        routes, _, ends = sort_routes(expert_ids, num_experts, tile)
        quantized, rows = gather_rows(quantize_rows(x), routes, top_k)
        self._library.set_mk_alignment_for_contiguous_layout(tile)
        gated = x.new_empty(len(routes), 2 * width)
        self._multiply(quantized, gate_up, gated, ends)
        h = gate_rows(gated, routes, expert_weights, QuantizedRows(*empty_groups(gated[:, :width])))
        out = x.new_empty(len(routes), hidden)
        self._multiply(h, down, out, ends)
        return sum_rows(out, rows, top_k)

    def _multiply(self, x: QuantizedRows, weight: Quantized, out: Tensor, ends: Tensor) -> None:
        self._library.m_grouped_fp8_gemm_nt_contiguous(x, weight, out, ends[:-1], use_psum_layout=True)


class Humming:
    """humming's indexed products, which gather rows themselves, with the tiles that it picks for their number.

    Args:
        library: Package `humming`, its modules loaded.
    """

    def __init__(self, library: Any, weights: ExpertWeights) -> None:
        gate_up, down = _block_fp8(weights)
        self._library, self._num_experts = library, len(down.codes)
        self._products = [self._prepare(gate_up), self._prepare(down)]
        self._tiles: dict[int, list[dict[str, Any]]] = {}
        self._locks = torch.zeros(_LOCKS, dtype=torch.int32, device=down.codes.device)

    def _prepare(self, weight: Quantized) -> tuple[Any, dict[str, Tensor]]:
        """Return the configuration of a product, and its weight in humming's order."""
        num_experts, num_rows, num_cols = weight.codes.shape
        groups = {"weight_scale_group_size": BLOCK, "weight_scale_group_size_n": BLOCK}
        return self._library.transform.prepare_and_transform_humming_tensors(
            {"weight": weight.codes.view(torch.int32), "weight_scale": weight.scales},
            num_rows,
            num_cols,
            self._library.schema.HummingWeightSchema(b_dtype="float8e4m3", **groups),
            self._library.schema.HummingInputSchema(a_dtype="float8e4m3", input_scale_group_size=BLOCK),
            num_experts=num_experts,
            torch_dtype=torch.bfloat16,
            device=weight.codes.device,
        )

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        (num_tokens, top_k), hidden, num_routes = expert_ids.shape, x.shape[1], expert_ids.numel()
        tiles = self._tiles_of(num_routes)
        order = sort_routes(expert_ids, self._num_experts, tiles[0]["block_shape"][0])
        quantized = _empty_rows(num_tokens, hidden, x.device)
        quantize.quantize_into(x, *quantized)
        gated = self._multiply(0, quantized, tiles[0], order, num_routes, top_k)
        h = gate_rows(gated, None, expert_weights, _empty_rows(num_routes, gated.shape[1] // 2, x.device))
        if tiles[1]["block_shape"][0] != tiles[0]["block_shape"][0]:
            order = sort_routes(expert_ids, self._num_experts, tiles[1]["block_shape"][0])
        return add_terms(self._multiply(1, h, tiles[1], order, num_routes, 1), expert_ids, self._num_experts)

    def _tiles_of(self, num_routes: int) -> list[dict[str, Any]]:
        """Return the tiles of both products: one configuration each, where all sizes' would be compiled else."""
        if num_routes not in self._tiles:
            pick = self._library.tune.get_heuristics_config
            device = self._locks.device
            self._tiles[num_routes] = [
                pick(config, shape_m=num_routes, gemm_type="indexed", device=device) for config, _ in self._products
            ]
        return self._tiles[num_routes]

    def _multiply(
        self,
        product: int,
        x: QuantizedRows,
        tile: dict[str, Any],
        order: tuple[Tensor, Tensor, Tensor],
        num_routes: int,
        top_k: int,
    ) -> Tensor:
        """Return a product's rows in the order of routes; x has a row for every top_k routes."""
        (config, tensors), (routes, experts, ends) = self._products[product], order
        out = torch.empty(num_routes, config.shape_n, dtype=torch.bfloat16, device=routes.device)
        return self._library.forward.humming_forward(
            config,
            inputs=x.values,
            input_scale=x.scales,
            outputs=out,
            sorted_ids=routes,
            expert_ids=experts,
            num_tokens_padded=ends[-1:],
            locks=self._locks,
            top_k=top_k,
            valid_shape_m=num_routes,
            compute_config={"gemm_type": "indexed"},
            tuning_config=tile,
            **tensors,
        )


class Vllm:
    """vLLM's Triton kernel, its default on Hopper without expert parallelism, with its tiles.

    Args:
        library: File `fused_moe.py`.
    """

    def __init__(self, library: Any, weights: ExpertWeights) -> None:
        self._library, self._weights = library, _block_fp8(weights)
        num_experts, _, width = self._weights[1].codes.shape
        tuned = (library.get_moe_configs(num_experts - i, width, _FP8, *_BLOCKS) for i in range(_MOST_SHARED + 1))
        self._tiles: dict[int, dict[str, int]] = next(filter(None, tuned), {})

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        gate_up, down = self._weights
        (num_tokens, hidden), (num_experts, _, width) = x.shape, down.codes.shape
        num_routes, top_k = expert_ids.numel(), expert_ids.shape[1]
        tile = self._tile(num_tokens, top_k)
        order: tuple[Tensor | None, Tensor, Tensor]
        if num_routes * _SPARSE <= num_experts:
            num_rows = torch.full((1,), num_routes * tile["BLOCK_SIZE_M"], dtype=torch.int32, device=x.device)
            order = None, expert_ids.view(-1), num_rows
        else:
            routes, experts, ends = sort_routes(expert_ids, num_experts, tile["BLOCK_SIZE_M"])
            order = routes, experts, ends[-1:]
        quantized = _empty_rows(num_tokens, hidden, x.device)
        quantize.quantize_into(x, *quantized)
        gated = x.new_empty(1, num_routes, 2 * width)
        self._multiply(quantized, gate_up, gated, order, top_k, tile)
        h = gate_rows(gated[0], None, expert_weights, _empty_rows(num_routes, width, x.device))
        out = x.new_empty(1, num_routes, hidden)
        self._multiply(h, down, out, order, 1, tile)
        return add_terms(out[0], expert_ids, num_experts)

    def _tile(self, num_tokens: int, top_k: int) -> dict[str, int]:
        """Return the tile tuned for the nearest number of tokens, or vLLM's for experts that it was not tuned for."""
        if self._tiles:
            return self._tiles[min(self._tiles, key=lambda size: abs(size - num_tokens))]
        num_experts, hidden, width = self._weights[1].codes.shape
        return self._library.get_default_config(num_tokens, num_experts, width, hidden, top_k, _FP8, _BLOCKS)

    def _multiply(
        self,
        x: QuantizedRows,
        weight: Quantized,
        out: Tensor,
        order: tuple[Tensor | None, Tensor, Tensor],
        top_k: int,
        tile: dict[str, int],
    ) -> None:
        """Write a product's rows in the order of routes."""
        switches = dict.fromkeys(("use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False)
        self._library.invoke_fused_moe_triton_kernel(
            x.values,
            weight.codes,
            out,
            x.scales,
            weight.scales,
            None,
            *order,
            mul_routed_weight=False,
            top_k=top_k,
            config=tile,
            compute_type=tl.float32 if out.dtype == torch.float32 else tl.bfloat16,
            use_fp8_w8a8=True,
            block_shape=_BLOCKS,
            **switches,
        )


def _block_fp8(weights: ExpertWeights) -> tuple[Quantized, Quantized]:
    gate_up, down = weights
    assert isinstance(gate_up, Quantized)
    assert isinstance(down, Quantized)
    return gate_up, down


def _empty_rows(num_rows: int, width: int, device: torch.device) -> QuantizedRows:
    """Return memory for rows with row-major scales."""
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    return QuantizedRows(codes, torch.empty(num_rows, width // BLOCK, device=device))


PEERS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, ExpertWeights], Experts]]] = {
    "deep_gemm": (load_deep_gemm, DeepGemm),
    "humming": (load_humming, Humming),
    "vllm": (load_vllm, Vllm),
}


def load_peers(directory: Path) -> dict[str, MakeExperts]:
    """Return the peers that can be had here; print a line on each that cannot."""
    peers: dict[str, MakeExperts] = {}
    for name, (load, make) in PEERS.items():
        with leave_out(name):
            peers[name] = partial(make, load(directory))
    return peers
