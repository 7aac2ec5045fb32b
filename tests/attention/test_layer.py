"""The layer alone, against transformers' DeepSeek-V3 attention: batches that mix everything, padding, no positions, a
dummy run.
"""

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from dcpmla import DCPConfig, DCPMesh, MLAAttention, MLAConfig, Placement, init_mesh
from dcpmla.attention.mla import layer as layer_module
from dcpmla.attention.step import metadata as metadata_module
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.families.table import attention_of
from tests.attention.test_compile import DEEPSEEK, Batch, make_layer, run_layer
from tests.support.layer_batches import run_batch
from tests.support.layouts import dcp_config
from tests.support.models import random_model, tiny_config
from tests.support.ranks import run_ranks

# (tokens cached before the step, new tokens): decodes at 1, 2 and 41 tokens, prefills fresh, with context, of one token
# after another.
BATCH: Batch = ((0, 1), (1, 1), (40, 1), (0, 9), (30, 6), (3, 17), (21, 1))
# As few decodes as project W_UV before the merge, where that is asked for; many at lengths that leave ranks without
# tokens.
PROJECT_FIRST_TOKENS = 8  # in place of the layer's
DECODES: Batch = (*((3 * n % 11, 1) for n in range(PROJECT_FIRST_TOKENS)), (5, 6))
SPECULATED: Batch = ((0, 3), (1, 3), (5, 3), (40, 3))  # at lengths that leave some ranks without some tokens' keys
PIECES: Batch = ((0, 7), (30, 6), (3, 17), (21, 1), (41, 9))  # of prompts, with absorbed queries
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
    """Return transformers' (cos, sin) [1, T, R]; angles of zero mean a model without positions."""
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.empty(0), torch.arange(num_tokens)[None])
    return (cos, sin) if with_positions else (torch.ones_like(cos), torch.zeros_like(sin))


def expected(attention: DeepseekV3Attention, config: Any, batch: Batch, with_positions: bool) -> Tensor:
    """Return the outputs of the new tokens of all requests, laid end to end."""
    outputs = []
    for (_, new), hidden in zip(batch, hidden_states(config, batch), strict=True):
        causal = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        outputs.append(attention(hidden[None], rope(config, len(hidden), with_positions), causal)[0][0, -new:])
    return torch.cat(outputs)


def check_layer(
    hf_config: Any,
    dcp: DCPConfig,
    mesh: DCPMesh,
    batch: Batch,
    with_positions: bool = True,
    padding: int = 0,
    max_decode_query_len: int = 1,
    num_decodes: int | None = None,
) -> Mock:
    """Compare with transformers' attention; returns the layer's exchange, which knows its calls."""
    config = dataclasses.replace(attention_of(hf_config).config, use_rope=with_positions)
    exchange = Mock(wraps=select_exchange(dcp, mesh.dcp_group, "cpu").exchange)
    layer = MLAAttention(config, Placement(dcp, mesh, exchange, torch.float32, "cpu"))
    attention = oracle(hf_config)
    layer.load_weights(attention.state_dict())
    angles = rope(hf_config, max(map(sum, batch)), True)
    cos_sin = torch.cat([part[0, :, : part.shape[-1] // 2] for part in angles], -1) if with_positions else None
    lens = padding, max_decode_query_len, num_decodes
    with torch.no_grad():
        (out,), _ = run_batch([layer], dcp, batch, hidden_states(hf_config, batch), cos_sin, *lens)
        wanted = expected(attention, hf_config, batch, with_positions)
    assert out.shape == (len(wanted) + padding, config.hidden_size)
    torch.testing.assert_close(out[: len(wanted)], wanted, atol=1e-5, rtol=1e-4)
    assert out.isfinite().all()  # padding took nothing from the rows after num_tokens
    return exchange


def check_variants(hf_config: Any, dcp: DCPConfig) -> None:
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    layer_module.PROJECT_FIRST_TOKENS = PROJECT_FIRST_TOKENS
    for q_replicate, project_before_merge, batch, projects_first in VARIANTS:
        variant = dataclasses.replace(dcp, dcp_q_replicate=q_replicate, dcp_project_before_merge=project_before_merge)
        exchange = check_layer(hf_config, variant, mesh, batch)
        assert exchange.gather_heads.called != q_replicate
        width = hf_config.v_head_dim if projects_first else hf_config.kv_lora_rank
        assert exchange.combine.call_args.args[0].shape[-1] == width


def check_query_lens(hf_config: Any, dcp: DCPConfig, mesh: DCPMesh) -> None:
    """Compare decodes of several query tokens: as many each, then different numbers, with padding and a prefill."""
    for batch, padding in ((SPECULATED, 0), ((*SPECULATED, (6, 1), (4, 2), (13, 9)), 3)):
        check_layer(hf_config, dcp, mesh, batch, padding=padding, max_decode_query_len=3)


def check_absorbed_pieces(hf_config: Any, dcp: DCPConfig, mesh: DCPMesh) -> None:
    """Compare pieces of prompts that attend with absorbed queries, cut into requests and parts of all sizes."""
    batch = *SPECULATED, *PIECES
    for width, max_rows, num_decodes in ((1, 1 << 16, None), (2, 20, 0), (4, 20, 1), (3, 1, 0)):
        metadata_module.PART_ROWS = max_rows
        count = len(batch) - (num_decodes or 0)
        exchange = check_layer(hf_config, dcp, mesh, batch, padding=2, max_decode_query_len=width, num_decodes=count)
        assert exchange.start_context.called == bool(num_decodes)
        assert (exchange.combine.call_count > 2) == (max_rows < 1 << 16)


def check_batches(hf_config: Any, dcp: DCPConfig) -> None:
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    check_layer(hf_config, dcp, mesh, BATCH, with_positions=False, padding=5)
    check_query_lens(hf_config, dcp, mesh)
    check_absorbed_pieces(hf_config, dcp, mesh)  # cuts later steps, too


def layout(tp: int, dcp: int, interleave: int = 1, backend: str = "auto") -> DCPConfig:
    config = dcp_config(tp, dcp, interleave, dcp_comm_backend=backend, block_size=4, context_workspace_tokens=1 << 16)
    return dataclasses.replace(config, context_workspace_tokens=4 * config.chunk_alignment)


@pytest.mark.parametrize(
    ("family", "dcp"),
    [
        ("deepseek_v3", layout(1, 1)),
        ("deepseek_v3_neox", layout(2, 2)),
        ("deepseek_v3", layout(3, 3, 2, "ag_rs")),
        ("deepseek_v3", layout(4, 2, 2, "ag_rs")),
        ("deepseek_v3_neox", layout(4, 4, 4, "a2a")),
    ],
    ids=str,
)
def test_mixed_batch(family: str, dcp: DCPConfig) -> None:
    run_ranks(dcp.tensor_parallel_size, check_variants, tiny_config(family), dcp)


@pytest.mark.parametrize("dcp", [layout(1, 1), layout(2, 2, 2, "a2a"), layout(3, 3, 1, "ag_rs")], ids=str)
def test_several_query_tokens_and_no_positions(dcp: DCPConfig) -> None:
    run_ranks(dcp.tensor_parallel_size, check_batches, tiny_config("deepseek_v3"), dcp)


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
    run_ranks(1, check_on_a_gpu, ON_A_GPU[variant], dtype, device="cuda")
