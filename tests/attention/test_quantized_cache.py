"""Layers over caches of 8 bits, under every DCP size: against float64 on dequantized rows; where their scales come
from.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import rms_norm

from dcpmla import DCPConfig, LatentCache, MLAAttention, MLAConfig, Placement, init_mesh
from dcpmla.attention.mla import layer as layer_module
from dcpmla.attention.mla.fp8_scales import KV_SCALE_NAMES, calculate_scale_, missing_scales, read_scale
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.formats import to_fp8, to_latents
from dcpmla.cache.latent import num_blocks
from dcpmla.cache.layers import LayerCache
from dcpmla.comm.exchange import LocalExchange
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.families.table import attention_of
from tests.support.kernels import randn
from tests.support.layouts import dcp_config
from tests.support.models import random_model, tiny_config
from tests.support.ranks import run_ranks
from tests.test_ownership import deal_slots

L, R = 128, 8  # the narrowest latent that fp8_ds_mla takes
FORMATS = (("fp8", "auto"), ("fp8", "fp8"), ("fp8_ds_mla", "auto"))  # kv_cache_dtype, decode_query_dtype
KV_SCALE, Q_SCALE = 0.03, 0.25


def config_of_layer(kv_lora_rank: int = L, qk_rope_head_dim: int = R) -> Any:
    config = tiny_config("deepseek_v3")
    config.kv_lora_rank, config.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
    return config


def without_positions(hf_config: Any) -> MLAConfig:
    return dataclasses.replace(attention_of(hf_config).config, use_rope=False)


def layout(tp: int, dcp: int, interleave: int, kv_format: tuple[str, str], **changes: Any) -> DCPConfig:
    """Chunks of context as small as can be."""
    kv_cache_dtype, decode_query_dtype = kv_format
    if kv_cache_dtype == "fp8" and "calculate_kv_scales" not in changes:
        changes = {"kv_cache_scale": KV_SCALE, **changes}
    config = dcp_config(
        tp,
        dcp,
        interleave,
        kv_cache_dtype=kv_cache_dtype,
        decode_query_dtype=decode_query_dtype,
        **{"block_size": max(4, interleave), **changes},
    )
    return dataclasses.replace(config, context_workspace_tokens=2 * config.chunk_alignment)


# A step: (request, tokens cached, new tokens), decodes first. Prompts in chunks, beside decodes; decodes of a first
# token, and of many.
Step = Sequence[tuple[int, int, int]]
STEPS: tuple[Step, ...] = (
    ((0, 0, 23), (1, 0, 5)),
    ((1, 5, 1), (2, 0, 1), (0, 23, 18)),
    ((0, 41, 1), (1, 6, 1), (2, 1, 1)),
)
TOTALS = (42, 7, 2)


def check_layer(
    weights: dict[str, Tensor], config: MLAConfig, dcp: DCPConfig, device: str = "cpu", absorbs: bool = False
) -> None:
    """Check a layer's steps, on GPUs in bfloat16: what each caches and returns.

    Args:
        absorbs: Whether pieces of prompts attend with absorbed queries, in requests of three tokens.
    """
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    dtype = next(iter(weights.values())).dtype
    exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
    layer = MLAAttention(config, Placement(dcp, mesh, exchange, dtype, device))
    layer.load_weights({**weights, "attn.q_scale": torch.tensor(Q_SCALE)})
    cache = LatentCache(LatentCache.plan(config, dcp, 1, list(TOTALS), dtype), torch.device(device))[0].latents
    cache.view(torch.uint8).fill_(0xFF)  # NaN in every format
    free = iter(range(cache.shape[0] - 1, -1, -1))
    tables = [[next(free) for _ in range(num_blocks(total, dcp))] for total in TOTALS]
    hidden = [randn(total, config.hidden_size, dtype=dtype, seed=total) for total in TOTALS]
    kv_scale, q_scale = (None if scale is None else scale.cpu() for scale in (layer.kv_scale, layer.q_scale))
    for step in STEPS:
        requests, cached, new = zip(*step, strict=True)
        ends = [start + count for start, count in zip(cached, new, strict=True)]
        routes = {"max_decode_query_len": 3, "num_decodes": len(step)} if absorbs else {}
        numbers = StepRequests(new, ends, [tables[i] for i in requests])
        metadata = StepBuilder(dcp, mesh.dcp_rank, device).build(numbers, **routes)
        rows = torch.cat([hidden[i][end - count : end] for i, end, count in zip(requests, ends, new, strict=True)])
        with torch.no_grad():
            out = layer(rows.to(device), LayerCache(cache), metadata).cpu().double()
        wanted, of_cached_rows = [], []
        for request, start, count in step:
            shards = everybodys_rows(cache, mesh.dcp_group, start + count, tables[request], dcp)
            decoded = to_latents(shards, config.kv_lora_rank, kv_scale, torch.float64)
            own = hidden[request][: start + count].double()
            wanted.append(attend(weights, config, own, decoded, count, q_scale, count > 1 and not absorbs))
            of_cached_rows.append(attend(weights, config, own, decoded, count, None, False))
        # By either route, a result is as far from that over the rounded rows as one rounding of the rows is.
        exact = torch.cat(of_cached_rows)
        assert (out - exact).norm() < 2**-4 * exact.norm()
        if dtype == torch.bfloat16:
            # Kernels may round the probabilities of fp8 queries' products to e4m3, too.
            assert (out - torch.cat(wanted)).norm() < (3e-2 if q_scale is None else 8e-2) * torch.cat(wanted).norm()
        else:
            # Queries computed in another order may round to the next code of e4m3, one in a million.
            atol, rtol = (1e-5, 1e-4) if q_scale is None else (1e-3, 1e-2)
            torch.testing.assert_close(out, torch.cat(wanted), atol=atol, rtol=rtol)


def everybodys_rows(cache: Tensor, group: Any, num_tokens: int, blocks: list[int], dcp: DCPConfig) -> Tensor:
    """Return a sequence's rows as the ranks hold them, [num_tokens, width]."""
    caches: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(caches, cache.view(torch.uint8).cpu(), group=group)
    size, interleave = dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
    places = deal_slots(num_tokens, blocks, dcp.block_size, size, interleave)
    rows = [caches[rank].flatten(0, 1)[slot] for rank, slot in places]
    return torch.stack(rows).view(cache.dtype)


def attend(
    weights: dict[str, Tensor],
    config: MLAConfig,
    hidden: Tensor,
    cached: Tensor,
    num_new: int,
    q_scale: Tensor | None,
    is_prefill: bool,
) -> Tensor:
    """Compute the layer in float64 on a sequence's hidden states: a decode over what is cached, a prefill over that and
    its own latents.
    """
    absorbed, latents = queries_and_latents(weights, config, hidden)
    absorbed = absorbed[-num_new:]
    own = latents[len(latents) - num_new :] if is_prefill else cached[len(cached) - num_new :]
    # They are this sequence's, each to a relative error of 2^-4.
    assert (cached - latents).norm() < 2**-4 * latents.norm()
    assert not torch.equal(cached, latents)
    keys = torch.cat([cached[: len(cached) - num_new], own])
    if q_scale is not None and not is_prefill:
        absorbed = to_fp8(absorbed, q_scale).double() * q_scale
    w_uv = weights["kv_b_proj.weight"].double().unflatten(0, (config.num_heads, -1))[:, config.qk_nope_head_dim :]
    values = torch.einsum("thl,hvl->thv", over_latents(absorbed, keys, config), w_uv)
    return values.flatten(1) @ weights["o_proj.weight"].double().T + weights["o_proj.bias"].double()


def queries_and_latents(weights: dict[str, Tensor], config: MLAConfig, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """[T, hidden] -> absorbed queries [T, heads, L + R] and latents [T, L + R], in float64."""
    w = {name.removesuffix(".weight"): weight.double() for name, weight in weights.items()}
    down = hidden @ w["kv_a_proj_with_mqa"].T + w["kv_a_proj_with_mqa.bias"]
    q_c = hidden @ w["q_a_proj"].T + w["q_a_proj.bias"]
    q_c = rms_norm(q_c, q_c.shape[-1:], w["q_a_layernorm"], 1e-6)
    q = (q_c @ w["q_b_proj"].T).unflatten(-1, (config.num_heads, -1))
    q_nope, q_pe = q.tensor_split([config.qk_nope_head_dim], -1)
    w_uk = w["kv_b_proj"].unflatten(0, (config.num_heads, -1))[:, : config.qk_nope_head_dim]
    absorbed = torch.cat([torch.einsum("thp,hpl->thl", q_nope, w_uk), q_pe], -1)
    kv_c, k_pe = down.tensor_split([config.kv_lora_rank], -1)
    return absorbed, torch.cat([rms_norm(kv_c, kv_c.shape[-1:], w["kv_a_layernorm"], 1e-6), k_pe], -1)


def over_latents(q: Tensor, keys: Tensor, config: MLAConfig) -> Tensor:
    """Absorbed queries [T, h, L + R] of a sequence's last tokens over its latents [S, L + R], causal -> [T, h, L]."""
    scores = torch.einsum("thd,sd->ths", q, keys) * config.softmax_scale
    is_later = torch.arange(len(keys)) > torch.arange(len(keys) - len(q), len(keys))[:, None]
    probabilities = scores.masked_fill(is_later[:, None], -math.inf).softmax(-1)
    return torch.einsum("ths,sl->thl", probabilities, keys[:, : config.kv_lora_rank])


def check_layers(size: int) -> None:
    weights = random_model(config_of_layer()).model.layers[0].self_attn.state_dict()
    config = without_positions(config_of_layer())
    interleaves = {2: (1, 2, 16), 4: (16, 1, 2)}[size]
    for kv_format, interleave in zip(FORMATS, interleaves, strict=True):
        for absorbs in (False, True):
            check_layer(weights, config, layout(size, size, interleave, kv_format), absorbs=absorbs)
    if size == 2:
        check_calculated_scales(weights, config)
        check_old_gpus(config)
        layer_module.PROJECT_FIRST_TOKENS = 2  # among the numbers of decodes in these steps
        # Queries in fp8 are gathered with q_replicate or without it.
        for kv_format, q_replicate in zip((*FORMATS, FORMATS[1]), (False, True, True, False), strict=True):
            changes = {"dcp_q_replicate": q_replicate, "dcp_project_before_merge": True, "dcp_comm_backend": "ag_rs"}
            check_layer(weights, config, layout(2, 2, 2, kv_format, **changes))
    if size == 4:
        check_layer(weights, config, layout(4, 2, 2, ("fp8_ds_mla", "auto")))
        check_layer(weights, config, layout(4, 1, 1, ("fp8", "fp8")))


def check_layers_on_gpus(size: int) -> None:
    """DeepSeek's widths of a row, with all exchanges."""
    hf_config = config_of_layer(512, 64)
    weights = random_model(hf_config).bfloat16().model.layers[0].self_attn.state_dict()
    for kv_format, backend in itertools.product(FORMATS, ("ag_rs", "direct") if size > 1 else ("auto",)):
        dcp = layout(size, size, 2, kv_format, dcp_comm_backend=backend, block_size=64)
        for absorbs in (False, True):
            check_layer(weights, without_positions(hf_config), dcp, "cuda", absorbs)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu_2)])
def test_layers_on_gpus(size: int) -> None:
    run_ranks(size, check_layers_on_gpus, size, device="cuda")


@pytest.mark.parametrize("size", [2, 4])
def test_layers(size: int) -> None:
    run_ranks(size, check_layers, size)


def check_calculated_scales(weights: dict[str, Tensor], config: MLAConfig) -> None:
    """From the first step that has a prompt's tokens, once, of all ranks' values; before anything is cached."""
    mesh, dcp = init_mesh(2, 2), layout(2, 2, 1, ("fp8", "fp8"), calculate_kv_scales=True)
    exchange = select_exchange(dcp, mesh.dcp_group, "cpu").exchange
    layer = MLAAttention(config, Placement(dcp, mesh, exchange, torch.float32, "cpu"))
    layer.load_weights(weights)
    addresses = layer.kv_scale.data_ptr(), layer.q_scale.data_ptr()
    cache = LatentCache(LatentCache.plan(config, dcp, 1, [20], torch.float32), torch.device("cpu"))[0].latents
    tables = [list(range(len(cache)))]
    hidden = 5 * torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def run(start: int, end: int) -> list[float]:
        with torch.no_grad():
            metadata = StepBuilder(dcp, mesh.dcp_rank).build(StepRequests([end - start], [end], tables))
            layer(hidden[start:end], LayerCache(cache), metadata)
        return [float(layer.kv_scale), float(layer.q_scale)]

    assert run(0, 1) == [1, 1]  # a decode
    scales = run(1, 12)
    absorbed, latents = queries_and_latents(weights, config, hidden[1:12].double())
    assert scales == pytest.approx([float(values.abs().max()) / 208 for values in (latents, absorbed)], rel=1e-5)
    assert run(12, 20) == scales
    assert (layer.kv_scale.data_ptr(), layer.q_scale.data_ptr()) == addresses
    rows = everybodys_rows(cache, mesh.dcp_group, 12, tables[0], dcp)[1:]
    decoded = to_latents(rows, L, layer.kv_scale, torch.float64)
    torch.testing.assert_close(decoded, latents, atol=2**-10 * scales[0], rtol=2**-4)
    nothing = torch.full((1,), 5.0)
    calculate_scale_(nothing, torch.zeros(3, 4), mesh.tp_group)
    assert float(nothing) == 1


def check_old_gpus(config: MLAConfig) -> None:
    """They are refused before anything is allocated."""
    with patch("torch.cuda.get_device_capability", return_value=(8, 0)):
        for name in ("fp8", "fp8_ds_mla"):
            dcp, mesh = layout(2, 2, 1, (name, "auto")), init_mesh(2, 2)
            message = rf"kv_cache_dtype .* is '{name}', which needs .* capability 8.9 or higher; choose auto"
            with pytest.raises(ValueError, match=message):
                Placement(dcp, mesh, LocalExchange(), torch.float32, "cuda")


def test_scales_of_a_checkpoint(tmp_path: Path) -> None:
    scales = {"a.attn.k_scale": torch.tensor(0.5), "b.k_proj.k_scale": torch.tensor([0.25])}
    save_file(scales, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert [read_scale(checkpoint.weights(prefix), KV_SCALE_NAMES) for prefix in ("a.", "b.", "c.")] == [0.5, 0.25, 1]
    dcp = layout(1, 1, 1, ("fp8", "fp8"), kv_cache_scale=None)
    for prefix, missing in (("a.", {"q_scale"}), ("c.", {"kv_scale", "q_scale"})):
        assert missing_scales(checkpoint.weights(prefix), dcp) == missing
        assert missing_scales(checkpoint.weights(prefix), dataclasses.replace(dcp, kv_cache_scale=0.5)) == {"q_scale"}
        assert not missing_scales(checkpoint.weights(prefix), dataclasses.replace(dcp, calculate_kv_scales=True))
    for tensor, message in (
        (torch.ones(3), r"tensor k_scale has shape \(3,\); the scale of a layer is one number"),
        (torch.zeros(1), r"tensor k_scale is 0.0; it must be a finite number above 0"),
        (torch.tensor(math.inf), r"tensor k_scale is inf; it must be a finite number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            read_scale({"k_scale": tensor}, KV_SCALE_NAMES)
