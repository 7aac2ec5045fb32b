"""The layer alone, against transformers' DeepSeek-V3 attention: batches that mix everything, padding, no positions, a
dummy run.
"""

import dataclasses
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from dcpmla import DCPConfig, DCPMesh, LatentCache, MLAAttention, MLAConfig, StepMetadata, init_mesh
from dcpmla.attention import layer as layer_module
from dcpmla.cache.latent import num_blocks
from dcpmla.comm.select import select_exchange
from tests.attention.test_compile import DEEPSEEK, Batch, make_layer, run_layer
from tests.support.models import random_model, tiny_config
from tests.support.ranks import run_ranks

# (tokens cached before the step, new tokens): decodes at 1, 2 and 41 tokens, prefills fresh, with context, of one token
# behind another.
BATCH: Batch = ((0, 1), (1, 1), (40, 1), (0, 9), (30, 6), (3, 17), (21, 1))
# As few decodes as project W_UV before the merge, where that is asked for; many at lengths that leave ranks without
# tokens.
PROJECT_FIRST_TOKENS = 8  # in place of the layer's
DECODES: Batch = (*((3 * n % 11, 1) for n in range(PROJECT_FIRST_TOKENS)), (5, 6))
# q_replicate, project_before_merge, a batch and whether its decodes are enough for that.
VARIANTS = (
    (False, False, BATCH, False),
    (True, False, BATCH, False),
    (False, True, DECODES, True),
    (True, True, DECODES, True),
    (False, True, DECODES[1:], False),
)


def oracle(config: Any) -> DeepseekV3Attention:
    return random_model(config).model.layers[0].self_attn


def hidden_states(config: Any, batch: Batch) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(cached + new, config.hidden_size, generator=generator) for cached, new in batch]


def rope(config: Any, num_tokens: int, with_positions: bool) -> tuple[Tensor, Tensor]:
    """transformers' (cos, sin) [1, T, R]; angles of zero stand for a model without positions."""
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.empty(0), torch.arange(num_tokens)[None])
    return (cos, sin) if with_positions else (torch.ones_like(cos), torch.zeros_like(sin))


def expected(config: Any, batch: Batch, with_positions: bool) -> Tensor:
    """Outputs of the new tokens of all requests, laid end to end."""
    attention, outputs = oracle(config), []
    for (_, new), hidden in zip(batch, hidden_states(config, batch), strict=True):
        causal = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        outputs.append(attention(hidden[None], rope(config, len(hidden), with_positions), causal)[0][0, -new:])
    return torch.cat(outputs)


def run_steps(
    layer: MLAAttention, hf_config: Any, dcp: DCPConfig, batch: Batch, with_positions: bool, padding: int
) -> Tensor:
    """Fill the cache with what each request has cached, as one prefill; then the batch as one step."""
    total = [cached + new for cached, new in batch]
    cache = LatentCache(LatentCache.plan(layer.config, dcp, 1, total, torch.float32), torch.device("cpu"))[0].fill_(
        torch.nan
    )
    blocks = iter(range(cache.shape[0] - 1, -1, -1))
    tables = [[next(blocks) for _ in range(num_blocks(length, dcp))] for length in total]
    hidden = hidden_states(hf_config, batch)
    cos, sin = (part[0, :, : part.shape[-1] // 2] for part in rope(hf_config, max(total), True))
    cos_sin = torch.cat([cos, sin], -1)

    def step(query_lens: list[int], seq_lens: list[int], requests: list[int], padding: int) -> Tensor:
        metadata = StepMetadata.build(query_lens, seq_lens, [tables[i] for i in requests], dcp, layer.mesh.dcp_rank)
        rows = torch.cat(
            [hidden[i][seq - query : seq] for i, query, seq in zip(requests, query_lens, seq_lens, strict=True)]
        )
        rows = torch.cat([rows, torch.full((padding, rows.shape[1]), torch.nan)])
        return layer(rows, cache, metadata, cos_sin[metadata.positions] if with_positions else None)

    filled = [i for i, (cached, _) in enumerate(batch) if cached]
    step([batch[i][0] for i in filled], [batch[i][0] for i in filled], filled, padding=0)
    return step([new for _, new in batch], total, list(range(len(batch))), padding)


def check_layer(
    hf_config: Any, dcp: DCPConfig, mesh: DCPMesh, batch: Batch, with_positions: bool, padding: int
) -> Mock:
    """Returns the layer's exchange, which knows its calls."""
    config = MLAConfig.from_hf(hf_config)
    exchange = Mock(wraps=select_exchange(dcp, mesh.dcp_group, "cpu").exchange)
    layer = MLAAttention(config, dcp, mesh, exchange, torch.float32, "cpu")
    layer.load_weights(oracle(hf_config).state_dict())
    with torch.no_grad():
        out = run_steps(layer, hf_config, dcp, batch, with_positions, padding)
        wanted = expected(hf_config, batch, with_positions)
    assert out.shape == (len(wanted) + padding, config.hidden_size)
    torch.testing.assert_close(out[: len(wanted)], wanted, atol=1e-5, rtol=1e-4)
    assert out.isfinite().all()  # padding took nothing from the rows behind num_tokens
    return exchange


def check_variants(hf_config: Any, dcp: DCPConfig) -> None:
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    layer_module.PROJECT_FIRST_TOKENS = PROJECT_FIRST_TOKENS
    for q_replicate, project_before_merge, batch, projects_first in VARIANTS:
        variant = dataclasses.replace(dcp, dcp_q_replicate=q_replicate, dcp_project_before_merge=project_before_merge)
        exchange = check_layer(hf_config, variant, mesh, batch, True, 0)
        assert exchange.gather_heads.called != q_replicate
        width = hf_config.v_head_dim if projects_first else hf_config.kv_lora_rank
        assert exchange.combine.call_args.args[0].shape[-1] == width


def check_padding(hf_config: Any, dcp: DCPConfig) -> None:
    check_layer(hf_config, dcp, init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size), BATCH, False, 5)


def layout(tp: int, dcp: int, interleave: int = 1, backend: str = "auto") -> DCPConfig:
    config = DCPConfig(
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        dcp_comm_backend=backend,
        block_size=4,
        context_workspace_tokens=1 << 16,
    )
    return dataclasses.replace(config, context_workspace_tokens=4 * config.chunk_alignment)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v3_neox"])
@pytest.mark.parametrize(
    "dcp",
    [layout(1, 1), layout(2, 2), layout(4, 2, 2, "ag_rs"), layout(4, 4, 4, "a2a"), layout(3, 3, 2, "ag_rs")],
    ids=str,
)
def test_mixed_batch(family: str, dcp: DCPConfig) -> None:
    run_ranks(dcp.tensor_parallel_size, check_variants, tiny_config(family), dcp)


def test_padding_and_no_positions() -> None:
    run_ranks(2, check_padding, tiny_config("deepseek_v3"), layout(2, 2))


def largest_claim(layer: MLAAttention, num_tokens: int) -> int:
    """Bytes of the largest tensor of a dummy run, an indexer's workspace."""
    with patch.object(layer_module.torch, "empty", wraps=torch.empty) as empty:
        layer(torch.zeros(num_tokens, 48), None, None)
    return max(int(call.args[0]) for call in empty.call_args_list)


def check_dummy_run(hf_config: Any) -> None:
    dcp, mesh = layout(2, 2), init_mesh(2, 2)
    exchange = Mock(wraps=select_exchange(dcp, mesh.dcp_group, "cpu").exchange)
    layer = MLAAttention(MLAConfig.from_hf(hf_config), dcp, mesh, exchange, torch.float32, "cpu")
    assert torch.equal(layer(torch.full((7, 48), 3.0), None, None), torch.zeros(7, 48))
    exchange.reserve_context.assert_called_once_with(
        dcp.context_workspace_tokens, 24, torch.float32, torch.device("cpu")
    )
    layer = MLAAttention(
        MLAConfig.from_hf(hf_config),
        dataclasses.replace(dcp, kv_cache_dtype="fp8"),
        mesh,
        exchange,
        torch.float32,
        "cpu",
    )
    assert torch.equal(layer(torch.full((7, 48), 3.0), None, None), torch.zeros(7, 48))
    exchange.reserve_context.assert_called_with(
        dcp.context_workspace_tokens, 24, torch.float8_e4m3fn, torch.device("cpu")
    )
    sparse = MLAConfig.from_hf(tiny_config("deepseek_v32"))
    layer = MLAAttention(sparse, dcp, mesh, exchange, torch.float32, "cpu")
    assert layer.indexer is not None
    few, many = (largest_claim(layer, num_tokens) for num_tokens in (1, 1001))
    assert many - few == 2 * 1000 * 32 * 16 * 4  # queries of 32 heads, 16 wide, before and behind what finishes them


def test_dummy_run_is_zero_and_claims_memory() -> None:
    run_ranks(2, check_dummy_run, tiny_config("deepseek_v3"))


def check_mistakes(hf_config: Any) -> None:
    dcp, mesh = layout(1, 1), init_mesh(1, 1)
    config = MLAConfig.from_hf(hf_config)
    layer = MLAAttention(config, dcp, mesh, select_exchange(dcp, mesh.dcp_group, "cpu").exchange, torch.float32, "cpu")
    metadata = StepMetadata.build([3], [3], [[0]], dcp, 0)
    hidden, cache, cos_sin = torch.zeros(3, 48), torch.zeros(2, 4, 24), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"hidden_states has shape \(2, 48\); expected \[at least 3, 48\]"):
        layer(hidden[:2], cache, metadata, cos_sin)
    with pytest.raises(ValueError, match=r"kv_cache has shape \(2, 4, 23\); expected \[num_blocks, 4, 24\]"):
        layer(hidden, cache[..., :23], metadata, cos_sin)
    with pytest.raises(
        ValueError, match=r"kv_cache has dtype torch.float16; expected torch.float32 for .*\(--kv-cache-dtype\) 'auto'"
    ):
        layer(hidden, cache.half(), metadata, cos_sin)
    with pytest.raises(
        ValueError, match=r"kv_cache has strides \(96, 1, 4\); the values of a row must lie side by side"
    ):
        layer(hidden, cache.transpose(1, 2).contiguous().transpose(1, 2), metadata, cos_sin)
    with pytest.raises(ValueError, match=r"cos_sin has shape \(2, 8\); expected \[3, 8\]"):
        layer(hidden, cache, metadata, cos_sin[:2])
    with pytest.raises(ValueError, match="kv_cache is None; a step with metadata needs"):
        layer(hidden, None, metadata, cos_sin)
    with pytest.raises(
        ValueError,
        match=r"query_factor is \(torch.float32, \(3,\)\); expected None, for config.llama_4_scaling is None",
    ):
        layer(hidden, cache, metadata, cos_sin, torch.ones(3))
    layer.config = dataclasses.replace(config, llama_4_scaling=(0.3, 16))
    for factor, found in (
        (None, "None"),
        (torch.ones(2), r"\(torch.float32, \(2,\)\)"),
        (torch.ones(3, dtype=torch.float16), r"\(torch.float16, \(3,\)\)"),
    ):
        with pytest.raises(
            ValueError, match=rf"query_factor is {found}; expected \(torch.float32, \(3,\)\), for .* is \(0.3, 16\)"
        ):
            layer(hidden, cache, metadata, cos_sin, factor)
    weights = oracle(hf_config).state_dict()
    with pytest.raises(ValueError, match="checkpoint: tensor q_b_proj.weight is missing"):
        layer.load_weights({name: weight for name, weight in weights.items() if name != "q_b_proj.weight"})
    with pytest.raises(
        ValueError, match=r"tensor o_proj.weight has shape \(47, 96\); the model's config asks for \(48, 96\)"
    ):
        layer.load_weights({**weights, "o_proj.weight": weights["o_proj.weight"][:47]})
    with pytest.raises(
        ValueError, match="dcp is for tensor_parallel_size 2 and decode_context_parallel_size 2; the mesh has 1 and 1"
    ):
        MLAAttention(config, layout(2, 2), mesh, layer.exchange, torch.float32, "cpu")
    with pytest.raises(
        ValueError, match=r"\(--kv-cache-dtype\) is 'bf16', but the model computes in torch.float32; choose auto"
    ):
        MLAAttention(
            config, dataclasses.replace(dcp, kv_cache_dtype="bf16"), mesh, layer.exchange, torch.float32, "cpu"
        )
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size \(-tp\) is 5; it must divide the model's 24 attention heads: choose 1, 2, 3, ",
    ):
        config.heads_per_rank(5)


def test_mistakes_are_named() -> None:
    run_ranks(1, check_mistakes, tiny_config("deepseek_v3"))


# Widths and variants of the models that are supported, as one rank of several has them.
ON_A_GPU = {
    "DeepSeek-V3": DEEPSEEK,
    "V2-lite": dataclasses.replace(DEEPSEEK, num_heads=2, q_lora_rank=None),
    "GLM": dataclasses.replace(DEEPSEEK, num_heads=5, qk_nope_head_dim=192, v_head_dim=256, rope_interleaved=False),
    "LongCat": dataclasses.replace(DEEPSEEK, num_heads=8, kv_lora_scale=3.5, attention_bias=True),
    "Mistral 4": dataclasses.replace(DEEPSEEK, num_heads=1, kv_lora_rank=256, llama_4_scaling=(0.3, 16)),
}


def check_on_a_gpu(config: MLAConfig, dtype: torch.dtype) -> None:
    layer, exact = make_layer(config, 1, "auto", dtype, "cuda"), make_layer(config, 1, "auto", torch.float64, "cpu")
    exact.load_state_dict(layer.state_dict())
    exact.dcp = layer.dcp
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    for batch in (BATCH, ((69, 1),), ((0, 300), (200, 131))):
        for got, wanted in zip(run_layer(layer, batch), run_layer(exact, batch), strict=True):
            assert got.dtype == dtype
            assert (got.cpu() - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("variant", ON_A_GPU)
def test_on_a_gpu(variant: str, dtype: torch.dtype) -> None:
    """The kernels of a GPU together, against the plain torch of a CPU in float64."""
    run_ranks(1, check_on_a_gpu, ON_A_GPU[variant], dtype, device="cuda", timeout=300)
