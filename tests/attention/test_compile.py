"""`torch.compile(layer, fullgraph=True)`: the compiled layer does what the layer does, on one rank and over both
exchanges.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from dcpmla import MLAAttention, MLAConfig, Placement, init_mesh
from dcpmla.attention.mla.latent_spec import query_factor
from dcpmla.attention.select.step import with_selection
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.formats import is_quantized, to_cache_rows
from dcpmla.cache.hot_set import HotSet, HotSizes
from dcpmla.cache.latent import num_blocks
from dcpmla.cache.layers import LayerCache
from dcpmla.comm.select import select_exchange
from dcpmla.indexer_config import IndexerConfig
from tests.support.layouts import dcp_config
from tests.support.ranks import run_ranks

Batch = Sequence[tuple[int, int]]  # (tokens cached before the step, new tokens) of each request
DECODES: tuple[Batch, ...] = (((0, 1), (40, 1), (7, 1)), ((5, 1), (21, 1), (0, 1), (30, 1)), ((9, 1), (1, 1)))
PREFILL: Batch = ((0, 5), (19, 6))
SPECULATED: tuple[Batch, ...] = (((0, 3), (40, 3)), ((5, 2), (21, 3), (0, 1)), ((2, 3), (9, 1), (7, 3), (12, 5)))
MIXED: Batch = ((33, 1), (3, 1), (11, 3))

SMALL = MLAConfig(
    hidden_size=48,
    num_heads=6,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=4,
    softmax_scale=0.25,
    attention_bias=True,
)
VARIANTS = {
    "q_lora": SMALL,
    "no_q_lora_neox": dataclasses.replace(SMALL, q_lora_rank=None, rope_interleaved=False, kv_lora_scale=1.5),
    "llama_4": dataclasses.replace(SMALL, llama_4_scaling=(0.3, 16)),
    "sparse": dataclasses.replace(
        SMALL, indexer=IndexerConfig(num_heads=8, head_dim=16, topk=8, rope_interleaved=False)
    ),
}
DEEPSEEK = MLAConfig(
    hidden_size=512,
    num_heads=32,
    q_lora_rank=192,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    softmax_scale=192**-0.5,
)


def make_layer(
    config: MLAConfig, size: int, backend: str, dtype: torch.dtype, device: str, **formats: Any
) -> MLAAttention:
    """Make a layer of random weights, cut as its ranks are."""
    dcp = dcp_config(size, size, dcp_comm_backend=backend, block_size=64 if device == "cuda" else 4, **formats)
    mesh = init_mesh(size, size)
    exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
    layer = MLAAttention(config, Placement(dcp, mesh, exchange, dtype, device)).eval()
    generator = torch.Generator(device).manual_seed(mesh.dcp_rank)
    for name, parameter in layer.named_parameters():
        replicated = torch.Generator(device).manual_seed(7) if "kv_a" in name or "q_a" in name else generator
        parameter.data.normal_(mean=float("norm" in name), std=parameter.shape[-1] ** -0.5, generator=replicated)
    return layer


def run_layer(
    layer: MLAAttention, batch: Batch, forward: Any = None, max_decode_query_len: int = 1
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, hidden] and the cache of a layer, or of `forward`, for a batch with two rows of padding."""
    config, dcp = layer.config, layer.dcp
    weight = layer.kv_a_layernorm.weight
    totals = [cached + new for cached, new in batch]
    blocks = iter(range(1000))
    tables = [[next(blocks) for _ in range(num_blocks(total, dcp))] for total in totals]
    steps = StepBuilder(dcp, layer.mesh.dcp_rank, weight.device)
    step = steps.build(StepRequests([new for _, new in batch], totals, tables), max_decode_query_len)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, dtype)

    latents = random(next(blocks), dcp.block_size, config.latent_dim)
    if is_quantized(layer.cache_dtype):
        parts = latents.split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        latents = to_cache_rows(*parts, layer.cache_dtype, layer.kv_scale)
    cos_sin = random(step.num_tokens, config.qk_rope_head_dim, dtype=torch.float32) if config.use_rope else None
    step = step.with_cos_sin(cos_sin, query_factor(step.tokens.positions, config.llama_4_scaling, weight.dtype))
    hidden_states = random(step.num_tokens + 2, config.hidden_size)
    index_keys = None
    if config.indexer is not None:
        index_keys = random(len(latents), dcp.block_size, config.indexer.head_dim)
    if config.topk is not None:
        step = with_selection(step, config.topk)
    cache = LayerCache(latents, index_keys)
    if dcp.kv_hot_tokens is not None:
        assert config.topk is not None
        sizes = HotSizes(1, dcp.kv_hot_tokens, config.topk, latents.shape[-1], latents.dtype)
        described = sizes.tensors(latents.shape[0] * latents.shape[1])
        sets = HotSet.of(sizes, [torch.zeros(shape, dtype=kind, device=weight.device) for shape, kind in described])
        cache = cache._replace(hot=sets[0])
    with torch.inference_mode():
        out = (layer if forward is None else forward)(hidden_states, cache, step)
    return out[: step.num_tokens], latents


class Compilation(NamedTuple):
    """A compiler with what it compiles, and the tolerance of its numbers."""

    dtype: torch.dtype
    device: str
    compiler: str
    tolerance: float


ON_CPU = Compilation(torch.float32, "cpu", "aot_eager", 0.0)
ON_GPU = Compilation(torch.bfloat16, "cuda", "inductor", 3e-2)


def check_compiled(
    config: MLAConfig,
    size: int,
    backend: str,
    batches: Sequence[Batch],
    way: Compilation,
    max_decode_query_len: int = 1,
    formats: dict[str, Any] | None = None,
    rank: int | None = None,
) -> int:
    """Compare each batch on one rank, or on all; return the number of graphs that were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = make_layer(config, size, backend, way.dtype, way.device, **(formats or {}))
    is_compiled = rank in (None, layer.mesh.dcp_rank)
    compiled = torch.compile(layer, fullgraph=True, backend=way.compiler) if is_compiled else layer
    for batch in batches:
        pair = (run_layer(layer, batch, forward, max_decode_query_len) for forward in (compiled, layer))
        for got, wanted in zip(*pair, strict=True):
            torch.testing.assert_close(got.double(), wanted.double(), atol=way.tolerance, rtol=way.tolerance)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Case(NamedTuple):
    """A layer that is compiled for batches.

    Attributes:
        num_graphs: The number of graphs that are compiled: the first batch's sizes are taken for constants, from the
            second on they are not.
        rank: The rank that compiles alone, whose exchanges then meet the others'; None for all.
    """

    config: MLAConfig
    batches: Sequence[Batch]
    num_graphs: int
    backend: str = "auto"
    max_decode_query_len: int = 1
    formats: dict[str, Any] | None = None
    rank: int | None = None


WIDE = dataclasses.replace(SMALL, kv_lora_rank=128)  # a tile of fp8_ds_mla
ALONE = {
    "no_q_lora_neox": Case(VARIANTS["no_q_lora_neox"], DECODES, 2),
    "llama_4": Case(VARIANTS["llama_4"], DECODES, 2),  # with q_lora, too
    "fp8": Case(WIDE, (DECODES[0], MIXED), 2, formats={"kv_cache_dtype": "fp8", "decode_query_dtype": "fp8"}),
    "fp8_ds_mla": Case(WIDE, (DECODES[0], MIXED), 2, formats={"kv_cache_dtype": "fp8_ds_mla"}),
    "prefill": Case(SMALL, (PREFILL,), 1),
    "hot": Case(VARIANTS["sparse"], DECODES, 2, formats={"kv_hot_tokens": 9}),
}
# As many query tokens in each request, then different numbers, then with a prefill.
OVER_RANKS = {
    "a2a": Case(SMALL, (*DECODES, MIXED), 3, "a2a", rank=0),
    "ag_rs, sparse": Case(VARIANTS["sparse"], (*DECODES, MIXED), 3, "ag_rs", rank=1),
    "several query tokens": Case(SMALL, SPECULATED, 3, "ag_rs", 3, rank=1),
}


def check_cases(cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        lens = case.max_decode_query_len, case.formats, case.rank
        found = check_compiled(case.config, dist.get_world_size(), case.backend, case.batches, ON_CPU, *lens)
        assert found == (case.num_graphs if case.rank in (None, dist.get_rank()) else 0), name


@pytest.mark.parametrize(("size", "cases"), [(1, ALONE), (2, OVER_RANKS)], ids=["alone", "over ranks"])
def test_compiled_layers(size: int, cases: dict[str, Case]) -> None:
    run_ranks(size, check_cases, cases, timeout=500)


@pytest.mark.gpu
@pytest.mark.parametrize("batches", [DECODES, (PREFILL,), (MIXED,)], ids=["decode", "prefill", "mixed"])
def test_on_a_gpu(batches: Sequence[Batch]) -> None:
    run_ranks(1, check_compiled, DEEPSEEK, 1, "auto", batches, ON_GPU, device="cuda", timeout=300)


@pytest.mark.gpu_2
@pytest.mark.parametrize("backend", ["ag_rs", "a2a", "direct"])
def test_exchange_between_gpus(backend: str) -> None:
    run_ranks(2, check_compiled, DEEPSEEK, 2, backend, (*DECODES, MIXED), ON_GPU, device="cuda", timeout=300)
