"""A small DeepSeek-V4 with vLLM's names and widths, and its experts in plain torch: vLLM has compiled ones alone."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from tests.support.models import random_model
from tests.support.quantized_models import published_name
from tests.support.rounded_rows import rounding

_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.125}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1}
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "q_lora_rank": 32,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "partial_rotary_factor": 0.125,
    "o_groups": 4,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "num_hidden_layers": 4,
    "moe_intermediate_size": 48,
    "intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 6,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "rope_parameters": {
        "main": {**_ROPE, "rope_theta": 10000.0},
        "compress": {**_ROPE, **_YARN, "rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
    },
}
# What vLLM asks of a config besides.
MORE = {"topk_method": "noaux_tc", "norm_topk_prob": True, "num_nextn_predict_layers": 0}


def save_v4(directory: Path, **changed: Any) -> Path:
    """Save a model by DeepSeek's names, and in the folder `reference` by transformers'; return its directory."""
    model = random_model(DeepseekV4Config(**CONFIG | changed, attn_implementation="eager"))
    model.save_pretrained(directory / "reference")
    tensors = {published_name(name): tensor for name, tensor in load_file(_file(directory / "reference")).items()}
    save_file(tensors, _file(directory), metadata={"format": "pt"})
    config = json.loads((directory / "reference" / "config.json").read_text()) | MORE
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _file(directory: Path) -> Path:
    return directory / "model.safetensors"


def round_reference() -> None:
    """Make transformers' model read windows and entries as caches of 8 bits hold them."""
    # Of the rows that are rotated, queries have several heads, and index keys are narrow.
    modeling_deepseek_v4.apply_rotary_pos_emb = rounding(
        modeling_deepseek_v4.apply_rotary_pos_emb, lambda x: x.shape[1] == 1 and x.shape[-1] == CONFIG["head_dim"]
    )


class PlainExperts(nn.Module):
    """What vLLM's `FusedMoEFactory` makes for such a model, in plain torch, every expert on each rank."""

    def __init__(
        self,
        *,
        shared_experts: nn.Module,
        gate: nn.Module,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        routed_scaling_factor: float,
        e_score_correction_bias: Tensor | None,
        hash_indices_table: Tensor | None,
        swiglu_limit: float,
        **_: Any,
    ) -> None:
        super().__init__()
        self.top_k, self.factor, self.limit = top_k, routed_scaling_factor, swiglu_limit
        self._outer = shared_experts, gate, e_score_correction_bias, hash_indices_table  # registered by their owner
        self.routed_experts = nn.Module()
        for name, shape in (
            ("w13_weight", (num_experts, 2 * intermediate_size, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, intermediate_size)),
        ):
            parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
            parameter.weight_loader = self._load
            self.routed_experts.register_parameter(name, parameter)

    @staticmethod
    def _load(
        parameter: Tensor, loaded: Tensor, name: str, shard_id: str, expert_id: int, return_success: bool
    ) -> bool:
        rows = parameter[expert_id]
        if shard_id != "w2":
            rows = rows.chunk(2)[0 if shard_id == "w1" else 1]
        rows.copy_(loaded)
        return True

    def forward(self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None) -> Tensor:
        from vllm.distributed import tensor_model_parallel_all_reduce

        shared_experts, gate, bias, table = self._outer
        scores = F.softplus(F.linear(hidden_states.to(gate.weight.dtype), gate.weight)).sqrt()
        if table is not None:
            assert input_ids is not None
            chosen = table[input_ids].long()
        else:
            chosen = (scores + bias).topk(self.top_k).indices
        weights = scores.gather(1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True) * self.factor).to(hidden_states.dtype)
        out = tensor_model_parallel_all_reduce(shared_experts(hidden_states))
        experts = self.routed_experts
        for rank in range(self.top_k):
            gate_up = torch.einsum("th,tih->ti", hidden_states, experts.w13_weight[chosen[:, rank]])
            first, second = gate_up.chunk(2, -1)
            inner = F.silu(first.clamp(max=self.limit)) * second.clamp(-self.limit, self.limit)
            out = out + weights[:, rank, None] * torch.einsum("ti,thi->th", inner, experts.w2_weight[chosen[:, rank]])
        return out


def use_plain_torch() -> None:
    """Make vLLM run its model for CPUs, on GPUs as well, without compiled ops: its experts and its residual streams."""
    from vllm.model_executor.kernels import mhc
    from vllm.model_executor.layers import mhc as layers
    from vllm.models import deepseek_v4
    from vllm.models.deepseek_v4.cpu import model

    model.FusedMoEFactory, model.HAS_TILELANG_MHC = PlainExperts, False  # TileLang fuses two of the operations below
    mhc.mhc_pre_cpu, mhc.mhc_post_cpu, mhc.hc_head_fused_cpu = mix_streams, mhc.mhc_post_torch, _collapse
    deepseek_v4.DeepseekV4ForCausalLM = model.DeepseekV4ForCausalLM
    for operation in (layers.MHCPreOp, layers.MHCPostOp, layers.HCHeadOp):
        operation.forward_cuda = operation.forward_cpu


def mix_streams(residual: Tensor, *numbers: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's weights of streams after it, the matrix that mixes them, and the block's input.

    Args:
        numbers: Arguments of vLLM's `mhc_pre_torch` after the first, which is for bfloat16 alone.
    """
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_delayed_torch

    post, matrix, _, pre = mhc_pre_delayed_torch(residual, *numbers[:8])
    return post, matrix, (pre[..., None] * residual).sum(-2).to(residual.dtype)


def _collapse(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, eps: float) -> Tensor:
    """Return the sum of streams that the head reads."""
    flat = F.rms_norm(streams.flatten(1).to(fn.dtype), (streams.shape[1] * streams.shape[2],), eps=rms_eps)
    weights = (F.linear(flat, fn) * scale + base).sigmoid() + eps
    return (weights[..., None] * streams).sum(-2).to(streams.dtype)
