"""Kimi-K3 in float64 over the tensors of a checkpoint.

transformers has no such model. The formulas are those of Kimi-K3's report and of vLLM's model, in other words; nothing
of the package is used.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class KimiK3:
    """A model of a checkpoint's tensors; a call takes token ids [1, T] and returns logits [1, T, vocab], float32."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, {name: tensor.double() for name, tensor in tensors.items()}

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        config, weight = self.config, self.tensors
        sums, current = [], weight["model.embed_tokens.weight"][ids[0]]
        for number in range(config["num_hidden_layers"]):
            name = f"model.layers.{number}"
            x = self._norm(self._mix(f"{name}.self_attention", sums, current), f"{name}.input_layernorm")
            begins = number % config["attn_res_block_size"] == 0
            if begins:
                sums.append(current)
            is_linear = number + 1 in config["linear_attn_config"]["kda_layers"]
            attended = (self._delta if is_linear else self._mla)(f"{name}.self_attn", x)
            current = attended if begins else current + attended
            x = self._norm(self._mix(f"{name}.mlp", sums, current), f"{name}.post_attention_layernorm")
            is_dense = number < config["first_k_dense_replace"]
            current = current + (self._mlp(f"{name}.mlp", x) if is_dense else self._moe(f"{name}.block_sparse_moe", x))
        x = self._norm(self._mix("model.output_attn", sums, current), "model.norm")
        return SimpleNamespace(logits=(x @ weight["lm_head.weight"].T)[None].float())

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], eps or self.config["rms_norm_eps"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _mix(self, name: str, sums: list[Tensor], current: Tensor) -> Tensor:
        values = torch.stack([*sums, current], 1)
        logits = self._linear(self._norm(values, f"{name}_res_norm"), f"{name}_res_proj")
        return (logits.softmax(1) * values).sum(1)

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear_beta = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return beta * (gate / beta).tanh() * gate.sigmoid() * linear_beta * (up / linear_beta).tanh()

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        h = self._situ(self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj"))
        return self._linear(h, f"{name}.down_proj")

    def _moe(self, name: str, x: Tensor) -> Tensor:
        scores = self._linear(x, f"{name}.gate").sigmoid()
        chosen = (
            (scores + self.tensors[f"{name}.gate.e_score_correction_bias"])
            .topk(self.config["num_experts_per_token"])
            .indices
        )
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        latents = self._linear(x, f"{name}.routed_expert_down_proj")
        out = torch.zeros_like(latents)
        for token, (experts, factors) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, factor in zip(experts, factors, strict=True):
                prefix, row = f"{name}.experts.{expert}", latents[token]
                h = self._situ(self._linear(row, f"{prefix}.w1"), self._linear(row, f"{prefix}.w3"))
                out[token] += factor * self._linear(h, f"{prefix}.w2")
        routed = self._linear(self._norm(out, f"{name}.routed_expert_norm"), f"{name}.routed_expert_up_proj")
        return routed + self._mlp(f"{name}.shared_experts", x)

    def _mla(self, name: str, x: Tensor) -> Tensor:
        config, heads, length = self.config, self.config["num_attention_heads"], len(x)
        nope, latent = config["qk_nope_head_dim"], config["kv_lora_rank"]
        q_c = self._norm(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
        q = self._linear(q_c, f"{name}.q_b_proj").unflatten(-1, (heads, -1))
        kv_c, k_pe = self._linear(x, f"{name}.kv_a_proj_with_mqa").split([latent, config["qk_rope_head_dim"]], -1)
        kv_c = self._norm(kv_c, f"{name}.kv_a_layernorm", 1e-6)
        kv = self._linear(kv_c, f"{name}.kv_b_proj").unflatten(-1, (heads, -1))
        keys = torch.cat([kv[..., :nope], k_pe[:, None].expand(-1, heads, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * keys.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        out = torch.einsum("hqk,khv->qhv", scores.softmax(-1), kv[..., nope:]).flatten(1)
        return self._linear(out * self._linear(x, f"{name}.g_proj").sigmoid(), f"{name}.o_proj")

    def _delta(self, name: str, x: Tensor) -> Tensor:
        linear, weight = self.config["linear_attn_config"], self.tensors
        heads, dim, size = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]

        def convolved(part: str) -> Tensor:
            rows = F.pad(self._linear(x, f"{name}.{part}_proj").T, (size - 1, 0))
            out = F.conv1d(rows[None], weight[f"{name}.{part}_conv1d.weight"], groups=heads * dim)[0].T
            return F.silu(out).unflatten(-1, (heads, dim))

        q, k, v = convolved("q"), convolved("k"), convolved("v")
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        logits = self._linear(self._linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj") + weight[f"{name}.dt_bias"]
        rate = weight[f"{name}.A_log"].flatten().exp()[:, None]
        decay = (linear["gate_lower_bound"] * (rate * logits.unflatten(-1, (heads, dim))).sigmoid()).exp()
        beta = self._linear(x, f"{name}.b_proj").sigmoid()[..., None]
        memory, rows = x.new_zeros(heads, dim, dim), []
        for token in range(len(x)):
            memory = decay[token, :, :, None] * memory
            error = beta[token] * (v[token] - torch.einsum("hk,hkv->hv", k[token], memory))
            memory = memory + k[token, :, :, None] * error[:, None]
            rows.append(torch.einsum("hk,hkv->hv", q[token] * dim**-0.5, memory))
        gate = self._linear(x, f"{name}.g_proj").sigmoid().unflatten(-1, (heads, dim))
        return self._linear((self._norm(torch.stack(rows), f"{name}.o_norm") * gate).flatten(1), f"{name}.o_proj")
