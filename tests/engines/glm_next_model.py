"""A small GLM-5-Next with an MTP module, and torch in place of vLLM's kernels for GPUs: of linear attention and of
streams.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next import modeling_glm5_next as glm5_next

from dcpmla.attention.select.projections import hadamard_matrix
from tests.engines.sparse_model import Selections, rounded_keys
from tests.engines.vllm_drafts import draw_own
from tests.engines.vllm_kimi import convolve_one, delta, initial_states, norm, prefill_delta
from tests.engines.vllm_v4_model import mix_streams
from tests.support.models import random_model
from tests.support.plain_mtp import PlainMtp

TOPK, POOL_SIZE = 32, 4
MODULE = "model.layers.4"  # after the model's four layers
_TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def glm_next() -> Any:
    """Return transformers' model of four dense layers, two of linear attention and two whose tokens select TOPK tokens
    in pools.
    """
    model = _with_module()
    model.model.language_model.layers = model.model.language_model.layers[:4]
    return model


def _with_module() -> Any:
    """Return the model with the layer of an MTP module, of the last kind."""
    config = Glm5NextTextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=5,
        layer_types=["linear_attention", "indexed_attention"] * 2 + ["indexed_attention"],
        mlp_layer_types=["dense"] * 5,  # vLLM has experts on CPUs in compiled form alone
        indexer_types=["full"] * 5,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=96,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=TOPK,
        index_kpool=POOL_SIZE,
        linear_num_heads=8,
        linear_head_dim=32,
        hc_mult=4,
        n_routed_experts=8,
        moe_intermediate_size=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        pad_token_id=None,
        eos_token_id=1,
        initializer_range=0.1,
    )
    return random_model(config)


def save_glm_next(directory: Path) -> Path:
    """Save the text model and an MTP module, with fields that vLLM reads; return its directory."""
    _with_module().save_pretrained(directory)
    file = directory / "model.safetensors"
    kept = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(file).items()
        if "visual" not in name and "layers.4.hc_" not in name  # a module has one stream
    }
    own = draw_own(torch.Generator().manual_seed(1)) | {"embed_tokens": kept["model.embed_tokens.weight"].clone()}
    kept |= {f"{MODULE}.{name}.weight": tensor for name, tensor in own.items()}
    save_file(kept, file, metadata={"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())["text_config"]
    fields |= {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        del fields[name][4:]
    fields |= {"architectures": ["Glm5NextForCausalLM"], "mhc": True, "mla_use_nope": True}
    fields |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "indexer_rope_interleave": False}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


class GlmModule(PlainMtp):
    """The MTP module in plain torch, whose tokens attend to all before them, as tokens of short prompts do."""

    masks_first = True

    def __init__(self, directory: str) -> None:
        self.base, self.with_layer = glm_next(), _with_module()
        self.config = self.base.config.text_config
        self.use_layer()
        saved, block = load_file(Path(directory) / "model.safetensors"), self.names.block
        self.own = {name.replace(MODULE, block): tensor for name, tensor in saved.items()}


class PoolSelections(Selections):
    """An engine's selections of pools, and transformers' model over the same selections."""

    def watch(self, note: Callable[[Any, Tensor], None]) -> None:
        """Call `note` after each selection, with the tokens of the step and the positions that they have selected."""
        from dcpmla.integrations.vllm.pooled import selection as pooled

        select = pooled.select_pools

        def selected(index: Any, q: Tensor, weights: Tensor, keys: Tensor, selection: Any) -> None:
            select(index, q, weights, keys, selection)
            if index.sparse.max_seq_len > TOPK + POOL_SIZE - 1:
                note(index.sparse, selection.positions[: len(index.sparse.request)])

        pooled.select_pools = selected

    def replace_indexer(self) -> None:
        """Make transformers' model attend to an engine's selections, and compare them with its own."""
        glm5_next.Glm5NextTextIndexer.forward = partialmethod(_select_again, self)


def count_pools(calls: Counter[str]) -> None:
    """Count the pools of steps with prefills whose first tokens are of an earlier step."""
    from dcpmla.integrations.vllm.pooled import selection as pooled

    write = pooled.write_pools

    def written(pairs: Any, bias: Tensor, keys: Tensor, pools: Any, *tail: Tensor) -> None:
        if pools.query_len is None:
            calls["pools begun before"] += int(((pools.num_before < POOL_SIZE - 1) & (pools.slots >= 0)).sum())
        write(pairs, bias, keys, pools, *tail)

    pooled.write_pools = written


def lose_tails() -> None:
    """Forget the tokens of pools in progress before each step."""
    from dcpmla.integrations.vllm.pooled import selection as pooled

    write = pooled.write_pools

    def written(pairs: Any, bias: Tensor, keys: Tensor, pools: Any, tail: Tensor, places: Tensor) -> None:
        tail[(places[places >= 0] // tail.shape[2]).unique()] = 0
        write(pairs, bias, keys, pools, tail, places)

    pooled.write_pools = written


def _select_again(indexer: Any, selections: PoolSelections, hidden_states: Tensor, q_resid: Tensor, **_: Any) -> Tensor:
    """Return the positions that each token of a prompt selected in an engine; compare their pools with its scores."""
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))[0]
    k, gate = indexer.k_norm(indexer.wk(hidden_states))[0], hidden_states[0] @ indexer.index_kpool_compress_gate.T
    num_pools, layer = len(k) // POOL_SIZE, indexer.layer_idx // 2
    k, gate = (_as_bf16(x[: num_pools * POOL_SIZE]).unflatten(0, (num_pools, POOL_SIZE)) for x in (k, gate))
    pools = _as_bf16((k * (gate + indexer.index_kpool_compress_ape).softmax(1)).sum(1))
    q, pools = (rounded_keys(_as_bf16(x @ hadamard_matrix(128, x.dtype, x.device))) for x in (_as_bf16(q), pools))
    weights = indexer.weights_proj(hidden_states)[0].double()
    scores = torch.einsum("shd,pd->shp", q, pools).relu().mul(weights[..., None]).sum(1)
    rows = []
    for position in range(len(scores)):
        chosen, visible = selections.of(layer, position), (position + 1) // POOL_SIZE
        tail = set(range(visible * POOL_SIZE, position + 1))
        selected = sorted({token // POOL_SIZE for token in chosen if token not in tail})
        whole = {token for pool in selected for token in range(pool * POOL_SIZE, (pool + 1) * POOL_SIZE)}
        selections.num_wrong += whole | tail != set(chosen)
        if visible:
            selections.compare(scores[position, :visible], selected, TOPK // POOL_SIZE)
        rows.append(chosen + [-1] * (TOPK + POOL_SIZE - 1 - len(chosen)))
    return torch.tensor([rows], dtype=torch.int32)


def _as_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def replace_kernels() -> None:
    """Put functions of torch in place of kernels, in all modules that name them."""
    from vllm.config import SpeculativeConfig
    from vllm.model_executor.layers import mhc, mla
    from vllm.model_executor.models.registry import ModelRegistry

    # Only images need torchvision, whose place is taken while the model is imported.
    sys.modules.update((name, MagicMock()) for name in _TORCHVISION)
    from vllm.models.glm5next.common import attention, kda, model, mtp

    for name in _TORCHVISION:
        del sys.modules[name]
    ModelRegistry.register_model("Glm5NextForCausalLM", model.Glm5NextForCausalLM)
    ModelRegistry.register_model("Glm5NextMTPModel", mtp.Glm5NextMTP)
    read = SpeculativeConfig.hf_config_override

    def read_text(config: Any, **named: Any) -> Any:
        """Read a text model's config as vLLM reads the config of a model with images."""
        if config.model_type == "glm5_next_text":
            config.model_type = "glm5_next_mtp"
            return config.update({"n_predict": 1, "architectures": ["Glm5NextMTPModel"]}) or config
        return read(config, **named)

    SpeculativeConfig.hf_config_override = staticmethod(read_text)

    kda.gather_initial_states = initial_states
    _write_states.register_warmup = lambda **_: None
    kda.scatter_states = _write_states
    kda.causal_conv1d_update = _convolve
    kda.chunk_kda_with_fused_gate = prefill_delta
    kda.fused_recurrent_kda = _decode_delta
    mla.fused_q_kv_rmsnorm = lambda q, kv, w_q, w_kv, eps: (norm(q, w_q, eps), norm(kv, w_kv, eps))
    mhc.MHCPreOp.forward = _enter_stream
    mhc.MHCPostOp.forward = _leave_stream
    mhc.MHCFusedPostPreOp.forward = _leave_and_enter
    quantize, make = attention.fwht128_quant_fp8, attention.Indexer.__init__
    attention.fwht128_quant_fp8 = lambda q: quantize(q.to(torch.bfloat16))

    def made(indexer: Any, *args: Any, **named: Any) -> None:
        make(indexer, *args, **named)
        indexer.index_kpool_compress_gate.data = indexer.index_kpool_compress_gate.float()

    attention.Indexer.__init__ = made


def _write_states(state: Tensor, rows: Tensor, indices: Tensor) -> None:
    state[indices.long()] = rows


def _enter_stream(
    op: Any,
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor,
    norm_eps: float,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    epsilons = rms_eps, hc_pre_eps, hc_sinkhorn_eps
    post, matrix, x = mix_streams(residual, fn, hc_scale, hc_base, *epsilons, hc_post_mult_value, sinkhorn_repeat)
    return post[..., 0], matrix, norm(x, norm_weight, norm_eps)


def _leave_stream(op: Any, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post[..., None] * x[:, None] + comb.mT @ residual


def _leave_and_enter(
    op: Any, *, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    residual = _leave_stream(op, x, residual, post_layer_mix, comb_res_mix)
    return residual, *_enter_stream(op, residual, **options)


def _convolve(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: None,
    *,
    conv_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if num_accepted_tokens is None:
        return convolve_one(x, conv_state, weight, bias, conv_state_indices=conv_state_indices)
    assert query_start_loc is not None
    out, width, ends = torch.zeros_like(x), weight.shape[1], query_start_loc.tolist()
    for row, (slot, first) in enumerate(zip(conv_state_indices.tolist(), num_accepted_tokens.tolist(), strict=False)):
        new = x[ends[row] : ends[row + 1]].T
        tokens = torch.cat([conv_state[slot, :, first - 1 : first + width - 2], new], 1)
        out[ends[row] : ends[row + 1]] = F.silu((tokens.unfold(1, width, 1) * weight[:, None]).sum(-1)).T
        conv_state[slot, :, : tokens.shape[1] - 1] = tokens[:, 1:]
    return out


def _decode_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    a_log: Tensor,
    g_bias: Tensor,
    lower_bound: float,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    options = {"bias": g_bias, "A_log": a_log, "lower_bound": lower_bound}
    rows, ends = torch.zeros_like(v) if out is None else out, cu_seqlens.tolist()
    slots = ssm_state_indices.view(len(ssm_state_indices), -1).tolist()  # a column for each token, if some are drafts
    for row, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[row]) - 1
        state = initial_state[slots[row][first]].clone()
        for token in range(start, end):
            now = slice(token, token + 1)
            qkv = [part[0, now] for part in (q, k, v)]
            rows[0, now] = delta(qkv, g[0, now], beta[0, now].sigmoid(), state, options)
            initial_state[slots[row][token - start]] = state
    return rows, initial_state
