"""What vLLM's Kimi-K3 lacks on a CPU: the compiled operators of its attention, and kernels of its linear attention
that Triton's interpreter does not run, in torch. And a small checkpoint of its text model.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.kimi_k3 import KimiK3
from tests.support.kimi_k3_files import TEXT, k3_tensors

_FIELDS = {
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,  # vLLM has experts on CPUs in compiled form alone
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
_LAYERS = {"num_heads": 8, "head_dim": 32, "kda_layers": [1, 3], "full_attn_layers": [2, 4]}


def save_text_model(directory: Path) -> Path:
    """Save a Kimi-K3 without experts and images: gated MLA without positions, linear attention, sums of layers."""
    config = TEXT | _FIELDS | {"linear_attn_config": TEXT["linear_attn_config"] | _LAYERS}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(k3_tensors(config, std=0.1), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Oracle(KimiK3):
    """The model of a directory in float64, with vLLM's epsilon in norms of latents: the config's, not 1e-6."""

    def __init__(self, directory: str) -> None:
        config = json.loads((Path(directory) / "config.json").read_text())
        super().__init__(config, load_file(Path(directory) / "model.safetensors"))

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return super()._norm(x, name)


@cache
def replace_kernels() -> torch.library.Library:
    """Define operators, and put functions of torch in place of kernels, in all modules that name them."""
    from vllm import _custom_ops
    from vllm.models.kimi_k3.nvidia import kda, mla, model
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda as triton_kda

    kda.gather_initial_states = initial_states
    kda.causal_conv1d_update = convolve_one
    triton_kda.chunk_kda_with_fused_gate = _prefill_gated_delta
    triton_kda.fused_recurrent_kda_packed_decode = _decode_delta
    model.attn_res = _mix
    mla.fused_q_kv_rmsnorm = lambda q, kv, w_q, w_kv, eps: (norm(q, w_q, eps), norm(kv, w_kv, eps))
    _custom_ops.cp_gather_cache = _gather_cache
    library = torch.library.Library("_C", "FRAGMENT")
    latents = "Tensor kv_c, Tensor k_pe"
    place = "Tensor slots, int block_size, Tensor? positions, Tensor? cos_sin"
    ops = {
        f"key_concat_kv_cache_insert(Tensor q, Tensor k_nope, Tensor k_pe, Tensor kv_c, Tensor(a!) k, "
        f"Tensor(b!) kv_cache, {place}) -> ()": _concat_key_and_write,
        "kv_concat(Tensor k_nope, Tensor k_pe, Tensor(a!) k) -> ()": _concat_key,
        f"decode_q_concat_kv_cache_insert(Tensor ql_nope, Tensor q_pe, {latents}, Tensor(a!) q, Tensor(b!) kv_cache, "
        f"{place}) -> ()": _concat_query_and_write,
    }
    for schema, run in ops.items():
        library.define(f"fused_kimi_k3_mla_{schema}")
        library.impl(f"fused_kimi_k3_mla_{schema.split('(')[0]}", run, "CompositeExplicitAutograd")
    return library  # The operators are freed with this object.


def _concat_key(k_nope: Tensor, k_pe: Tensor, k: Tensor) -> None:
    k.copy_(torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], -1))


def _concat_key_and_write(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, k: Tensor, kv_cache: Tensor, slots: Tensor, *_: Any
) -> None:
    _concat_key(k_nope, k_pe, k)
    _write(kv_cache, kv_c, k_pe, slots)


def _concat_query_and_write(
    ql_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, q: Tensor, kv_cache: Tensor, slots: Tensor, *_: Any
) -> None:
    q.copy_(torch.cat([ql_nope, q_pe], -1))
    _write(kv_cache, kv_c, k_pe, slots)


def _write(kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
    owned, size = slots >= 0, kv_cache.shape[1]
    kv_cache[slots[owned] // size, slots[owned] % size] = torch.cat([kv_c, k_pe], -1)[: len(slots)][owned]


def _gather_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, batch_size: int, seq_starts: Tensor
) -> None:
    size, ends = src_cache.shape[1], cu_seq_lens.tolist()
    for row, (start, end) in enumerate(zip(ends[:batch_size], ends[1:], strict=False)):
        index = torch.arange(end - start) + int(seq_starts[row])
        blocks = block_table[row, (index // size).clamp(max=block_table.shape[1] - 1)]  # rows of padding are not used
        dst[start:end] = src_cache[blocks.long(), index % size]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _mix(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    weight: Tensor,
    score: Tensor,
    out_weight: Tensor | None,
    *,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
) -> Tensor:
    if delta is not None:
        prefix += delta
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    values = torch.cat([blocks[:, :num_blocks], prefix[:, None]], 1)
    mixed = ((norm(values, weight, eps) @ score).softmax(1)[..., None] * values).sum(1)
    return mixed if out_weight is None else norm(mixed, out_weight, output_norm_eps)


def initial_states(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    return state[indices.long()] * has_initial_state[:, None, None, None]


def convolve_one(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: None,
    *,
    conv_state_indices: Tensor,
    out: Tensor | None = None,
    **_: Any,
) -> Tensor:
    index = conv_state_indices.long()
    rows = torch.cat([conv_state[index], x[..., None]], -1)
    conv_state[index] = rows[..., 1:]
    result = F.silu((rows * weight).sum(-1))
    return result if out is None else out.copy_(result)


def delta(qkv: list[Tensor], gate: Tensor, beta: Tensor, state: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the outputs [T, h, d] of tokens after a state [h, d, d], which becomes the one after them.

    Args:
        beta: [T, h], after the sigmoid.
    """
    q, k, v = qkv
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    bias = options["bias"].view(gate.shape[1:])
    rate = options["A_log"].flatten().exp()[:, None]
    decay = (options["lower_bound"] * (rate * (gate + bias)).sigmoid()).exp()
    rows = []
    for token in range(len(q)):
        state *= decay[token, :, :, None]
        error = beta[token][:, None] * (v[token] - torch.einsum("hk,hkv->hv", k[token], state))
        state += k[token, :, :, None] * error[:, None]
        rows.append(torch.einsum("hk,hkv->hv", q[token] * q.shape[-1] ** -0.5, state))
    return torch.stack(rows)


def prefill_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor,
    *,
    lower_bound: float,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [1, T, h, d] of pieces of several requests, and the states after them."""
    options = {"bias": g_bias, "A_log": A_log, "lower_bound": lower_bound}
    state, out, ends = initial_state.clone(), torch.zeros_like(v), cu_seqlens.tolist()
    for row, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if end > start:
            tokens = slice(start, end)
            qkv = [part[0, tokens] for part in (q, k, v)]
            out[0, tokens] = delta(qkv, raw_g[0, tokens], beta[0, tokens], state[row], options)
    return out, state


def _prefill_gated_delta(*, raw_beta: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    return prefill_delta(beta=raw_beta.sigmoid(), **named)


def _decode_delta(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor,
    state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    options = {"bias": dt_bias, "A_log": A_log, "lower_bound": lower_bound}
    rows = []
    for row, slot in enumerate(state_indices.tolist()):
        now = slice(row, row + 1)
        qkv = list(mixed_qkv[now].unflatten(-1, (3, A_log.numel(), -1)).unbind(1))
        rows.append(delta(qkv, raw_g[0, now], raw_beta[0, now].sigmoid(), initial_state[slot], options))
    return torch.cat(rows)[None], initial_state
