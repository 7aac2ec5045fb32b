"""Sparse layers of DeepSeek-V3.2's widths on GPUs: selections and attention compared with transformers in float64."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from dcpmla import DCPConfig, MLAAttention, Placement, StepMetadata, init_mesh
from dcpmla.attention.select import selector as selector_module
from dcpmla.attention.select.step import with_selection
from dcpmla.attention.step import metadata as metadata_module
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.families.table import attention_of
from tests.support.gpus import on_gpus
from tests.support.layer_batches import run_batch
from tests.support.models import random_model
from tests.support.ranks import run_ranks
from tests.support.steps import selection_of

TOPK, HIDDEN = 256, 512
# (tokens cached before the step, new tokens); the decodes' selections are shorter than a tile, several tiles
# long, and empty on some ranks.
BATCH = ((0, 1), (200, 1), (700, 1), (1500, 1), (0, 100), (0, 400), (600, 70))


def config_of_model() -> Any:
    config = transformers.DeepseekV32Config(
        hidden_size=HIDDEN,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=256,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=64,
        vocab_size=64,
        index_topk=TOPK,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    config._attn_implementation, config.rope_interleave = "eager", True
    return config


def draw(request: int) -> Tensor:
    cached, new = BATCH[request]
    return torch.randn(cached + new, HIDDEN, generator=torch.Generator().manual_seed(request)).bfloat16()


def run_layer(
    layer: MLAAttention, hf_config: Any, device: torch.device, num_decodes: int | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the new tokens, and the sorted positions that each selected."""
    hidden = [draw(request).to(device) for request in range(len(BATCH))]
    angles = DeepseekV3RotaryEmbedding(hf_config)(torch.empty(0), torch.arange(max(map(sum, BATCH)))[None])
    cos_sin = torch.cat([part[0, :, : part.shape[-1] // 2] for part in angles], -1).to(device)

    def select(step: StepMetadata) -> StepMetadata:
        return with_selection(step, TOPK)

    (out,), step = run_batch([layer], layer.dcp, BATCH, hidden, cos_sin, num_decodes=num_decodes, prepare=select)
    return out.cpu(), selection_of(step).positions.sort(1).values.cpu()


def expected(attention: Any, hf_config: Any, positions: Tensor) -> tuple[Tensor, float]:
    """Compute attention in float64 to the given positions [T, topk], and the share that transformers selects."""
    dense = DeepseekV3Attention(hf_config, 0).double()
    dense.load_state_dict(
        {name: weight.double() for name, weight in attention.state_dict().items() if not name.startswith("indexer.")}
    )
    outputs, num_same, num_selected, first = [], 0, 0, 0
    for request, (cached, new) in enumerate(BATCH):
        hidden, length = draw(request).double()[None], cached + new
        rope = DeepseekV3RotaryEmbedding(hf_config)(torch.empty(0, dtype=torch.float64), torch.arange(length)[None])
        chosen = torch.zeros(length, length + 1, dtype=torch.bool)  # the last column takes -1
        chosen[-new:].scatter_(1, positions[first : first + new].long() % (length + 1), True)
        chosen = chosen[:, :length]
        mask = torch.where(chosen, 0.0, -torch.inf).double()
        mask[:cached, 0] = 0.0  # rows that are not compared
        outputs.append(dense(hidden, rope, mask[None, None])[0][0, -new:])
        causal = torch.full((length, length), -torch.inf).triu(1).double()[None]
        q_c = attention.q_a_layernorm(attention.q_a_proj(hidden))
        selected = attention.indexer(hidden, q_c, rope, causal, None)[0, -new:]
        wanted = torch.zeros(new, length, dtype=torch.bool).scatter(1, selected.long(), True).tril(cached)
        assert torch.equal(chosen[-new:].sum(1), wanted.sum(1))
        num_same += int((chosen[-new:] & wanted).sum())
        num_selected += int(wanted.sum())
        first += new
    return torch.cat(outputs), num_same / num_selected


def check_formats(backends: list[str], kv_cache_dtype: str, index_cache_dtype: str, hadamard: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tp, hf_config = torch.distributed.get_world_size(), config_of_model()
    model = random_model(hf_config).bfloat16()
    attention = model.model.layers[0].self_attn
    alone = DCPConfig(
        tensor_parallel_size=tp,
        kv_cache_dtype=kv_cache_dtype,
        index_cache_dtype=index_cache_dtype,
        index_hadamard=hadamard,
        context_workspace_tokens=2048,
    )
    sharded = [
        dataclasses.replace(
            alone, decode_context_parallel_size=tp, dcp_comm_backend=backend, cp_kv_cache_interleave_size=2**number
        )
        for number, backend in enumerate(backends)
    ]
    found = []
    selector_module.WORKSPACE_BYTES = 1 << 20  # tokens are processed in several turns
    metadata_module.PART_ROWS = 100 * hf_config.num_attention_heads
    for num_decodes in (None, len(BATCH)):
        for dcp in [alone, *sharded]:
            mesh = init_mesh(tp, dcp.decode_context_parallel_size)
            exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
            placement = Placement(dcp, mesh, exchange, torch.bfloat16, device)
            layer = MLAAttention(attention_of(hf_config).config, placement)
            layer.load_weights(attention.state_dict())
            with torch.inference_mode():
                found.append(run_layer(layer, hf_config, device, num_decodes))
    first_out, first_positions = found[0]
    with torch.inference_mode():
        wanted, share = expected(attention.double(), hf_config, first_positions)
    assert share > (0.97 if index_cache_dtype == "auto" else 0.9), share
    for out, positions in found:
        assert torch.equal(positions, first_positions)  # for any ranks, exchange and route of prefill
        error = (out.double() - wanted).norm() / wanted.norm()
        assert error < (2e-2 if kv_cache_dtype == "auto" else 4e-2), error


FORMATS = pytest.mark.parametrize(
    ("kv_cache_dtype", "index_cache_dtype", "hadamard"),
    [("auto", "auto", False), ("fp8_ds_mla", "fp8", False), ("auto", "fp8", True)],
)


@on_gpus(1, 2)
@FORMATS
def test_layers(num_gpus: int, kv_cache_dtype: str, index_cache_dtype: str, hadamard: bool) -> None:
    backends = ["direct", "ag_rs", "direct"] if num_gpus > 1 else []
    run_ranks(num_gpus, check_formats, backends, kv_cache_dtype, index_cache_dtype, hadamard, device="cuda")
