"""transformers' DeepSeek-V3 as engines compute it over a cache in 8 bits."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3


class RoundedCache(DynamicCache):
    """Latents in e4m3, scale 1; the new tokens of a piece of a prompt, unless they are few, see each other's exact
    ones.

    Args:
        max_absorbed: Most tokens of a piece that reads its own latents from the cache.
    """

    def __init__(self, max_absorbed: int) -> None:
        super().__init__()
        self.max_absorbed = max_absorbed

    def update(self, kv_c: Tensor, k_pe: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        kept = super().update(rounded(kv_c), rounded(k_pe), layer_idx)
        num_new = kv_c.shape[2]
        if num_new <= self.max_absorbed:
            return kept
        kv_c, k_pe = (torch.cat([old[:, :, :-num_new], new], 2) for old, new in zip(kept, (kv_c, k_pe), strict=True))
        return kv_c, k_pe


def rounded(values: Tensor) -> Tensor:
    """Return the nearest values of e4m3."""
    return values.to(torch.float8_e4m3fn).to(values.dtype)


@torch.no_grad()
def logprobs_over_rounded_latents(
    model: Any, prompt: list[int], new: list[int], chunk: int, rounds_queries: bool = False, max_absorbed: int = 1
) -> Tensor:
    """Return the logprobs [1 + new, vocab] after a prompt, which comes in pieces, and after each of its new tokens.

    Args:
        model: with attn_implementation "eager".
        max_absorbed: Most tokens of a piece that sees its own latents rounded.
        rounds_queries: those of single tokens are in e4m3, too, after they are absorbed into W_UK.
    """
    cache, attend = RoundedCache(max_absorbed), deepseek_v3.eager_attention_forward

    def attend_absorbed(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
        if q.shape[2] > 1:
            return attend(layer, q, k, v, mask, scaling, **more)
        q_nope, q_pe = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        w_kv_b = layer.kv_b_proj.weight.view(layer.num_heads, -1, layer.kv_lora_rank)
        w_uk, w_uv = w_kv_b.split([layer.qk_nope_head_dim, layer.v_head_dim], 1)
        kept = cache.layers[layer.layer_idx]
        scores = rounded(q_nope @ w_uk) @ kept.keys.mT + rounded(q_pe) @ kept.values.mT
        out = (scores * scaling).softmax(-1) @ kept.keys @ w_uv.mT
        return out.transpose(1, 2), None

    pieces = [prompt[start : start + chunk] for start in range(0, len(prompt), chunk)] + [[token] for token in new]
    if rounds_queries:
        deepseek_v3.eager_attention_forward = attend_absorbed
    try:
        logits = [model(torch.tensor([piece]), cache=cache).logits[0, -1] for piece in pieces]
    finally:
        deepseek_v3.eager_attention_forward = attend
    return torch.stack(logits[-1 - len(new) :]).log_softmax(-1)
