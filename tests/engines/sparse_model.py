"""A small DeepSeek-V3.2, and transformers' model of it with an indexer in e4m3, as engines compute it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32

from tests.engines.conftest import ROPE

TOPK = 32


def save_sparse_model(directory: Path, num_heads: int = 8, head_dim: int = 32, num_layers: int = 2) -> Path:
    """Save a model of dense layers whose tokens select at most TOPK; return its directory."""
    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        q_lora_rank=96,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=TOPK,
        n_routed_experts=8,
        moe_intermediate_size=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters=ROPE,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )
    model = DeepseekV32ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.float().save_pretrained(directory)
    return directory


def round_indexers() -> None:
    """Make transformers' indexers score queries and keys in e4m3 from now on."""
    deepseek_v32.DeepseekV32Indexer.forward = _select


def _select(
    self: Any, hidden_states: Tensor, q_resid: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Return the positions that each token selects, of a prompt without a cache."""
    rope = self.qk_rope_head_dim
    q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
    k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
    rotated = deepseek_v32.apply_rotary_pos_emb(q[..., :rope], k[..., :rope], *angles, unsqueeze_dim=2)
    q, k = (_rounded(torch.cat([x, y[..., rope:]], -1)) for x, y in zip(rotated, (q, k), strict=True))
    products = torch.einsum("bshd,btd->bsht", q, k.squeeze(2)).relu()
    scores = torch.einsum("bsht,bsh->bst", products, self.weights_proj(hidden_states).double())
    scores = scores.masked_fill(~mask if mask.dtype == torch.bool else mask < 0, -torch.inf)
    return scores.topk(min(self.index_topk, scores.shape[-1]), -1).indices.int()


def _rounded(x: Tensor) -> Tensor:
    """Return rows [.., D] as e4m3 with scales of powers of two has them, float64."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).double() * scale
