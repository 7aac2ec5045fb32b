"""How long a decode step takes: the model's parameters, its cache and its exchange, each moved or multiplied at the machine's speed."""

from dataclasses import dataclass
from math import prod

import torch

from dcpmla.cache.capacity import FORMATS
from dcpmla.cache.formats import row_width, storage_dtype
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.planning.exchange import exchange_us
from dcpmla.planning.machine import Machine
from dcpmla.planning.weights import ModelSize, Parameter

PARTS = ("projections", "gather", "attention", "combine", "rest")
_ACTIVATION_BYTES = 2
_MLP_KERNELS = 3  # activation, product with the gate, residual


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is cut, the three things a plan chooses among, and the GPUs of the job (None: one TP group); the rest are replicas."""

    tp: int
    dcp: int
    kv_cache_dtype: str
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        DCPConfig(tensor_parallel_size=self.tp, decode_context_parallel_size=self.dcp)
        if self.kv_cache_dtype not in FORMATS:
            raise ValueError(f"kv_cache_dtype (--kv-cache-dtype) is {self.kv_cache_dtype!r}; choose from {', '.join(FORMATS)}")
        if self.num_ranks % self.tp:
            raise ValueError(f"num_gpus (--num-gpus) is {self.num_gpus}; it must be a multiple of tensor_parallel_size (-tp) {self.tp}")

    @property
    def num_ranks(self) -> int:
        return self.num_gpus or self.tp

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.tp

    def __str__(self) -> str:
        return f"tp {self.tp}, dcp {self.dcp}, {self.kv_cache_dtype}"


def kv_row_bytes(attention: MLAConfig, kv_cache_dtype: str) -> int:
    """Bytes of one token in one layer's cache (`dcpmla.cache.formats`).

    Raises:
        ValueError: fp8_ds_mla of a latent that does not split into its groups of 128.
    """
    storage = storage_dtype(kv_cache_dtype, torch.bfloat16)
    return row_width(storage, attention.kv_lora_rank, attention.qk_rope_head_dim) * storage.itemsize


def predict_step(machine: Machine, model: ModelSize, setting: Setting, batch: int, context: int, backend: str = "auto") -> dict[str, float]:
    """Microseconds of one decode step in CUDA graphs: "total" and PARTS, all layers together.

    W_UK, W_UV and o_proj are projections; every all-reduce, MLPs, experts, embedding and head are the rest.

    Args:
        batch: requests of the TP group, one new token each.
        context: cached tokens of each request.
        backend: of the exchange (`exchange_us`).
    """
    parts = dict.fromkeys(PARTS, 0.0)
    for parameter in model.parameters:
        for part, time in _parameter_us(machine, model, parameter, setting, batch).items():
            parts[part] += parameter.count * time
    for part, time in _exchange_and_attention_us(machine, model.attention, setting, batch, context, backend).items():
        parts[part] += model.num_attention_layers * time
    parts["projections"] += model.num_attention_layers * machine.layer_us
    return {"total": sum(parts.values()), **parts}


def attention_us(machine: Machine, attention: MLAConfig, num_heads: int, kv_cache_dtype: str, batch: int, context: int) -> float:
    """Microseconds of decode attention on one rank: an overhead, then the slower of reading the cache and multiplying.

    A kernel that keeps an fp8 cache is taken to multiply at the bfloat16 rate, for it widens what it reads.
    """
    num_bytes = batch * context * kv_row_bytes(attention, kv_cache_dtype)
    flops = 2 * batch * num_heads * context * (attention.latent_dim + attention.kv_lora_rank)
    read_gb_per_s = machine.attention_read_share * machine.hbm_gb_per_s
    return machine.attention_overhead_us + max(num_bytes / read_gb_per_s / 1e3, flops / machine.attention_tflops / 1e6)


def expected_experts(num_routed: int, experts_per_token: int, num_tokens: int) -> float:
    """Share of the experts that at least one of the tokens picks, when each picks its own at random."""
    return 1 - (1 - experts_per_token / num_routed) ** num_tokens


def _exchange_and_attention_us(
    machine: Machine, attention: MLAConfig, setting: Setting, batch: int, context: int, backend: str
) -> dict[str, float]:
    """Of one layer."""
    num_heads = attention.heads_per_rank(setting.tp) * setting.dcp
    local_context = -(-context // setting.dcp)
    num_nodes = machine.num_nodes(setting.dcp, setting.num_ranks)
    return {
        "gather": exchange_us(machine, "gather_heads", batch, num_heads, attention.latent_dim, setting.dcp, num_nodes, backend),
        "attention": attention_us(machine, attention, num_heads, setting.kv_cache_dtype, batch, local_context),
        "combine": exchange_us(machine, "combine", batch, num_heads, attention.kv_lora_rank, setting.dcp, num_nodes, backend),
    }


def _parameter_us(machine: Machine, model: ModelSize, parameter: Parameter, setting: Setting, batch: int) -> dict[str, float]:
    """What one parameter costs a step, by part: its kernel, and the collective that its cut asks for."""
    part = "projections" if parameter.is_attention else "rest"
    if len(parameter.shape) == 1:  # norms are kernels; biases and corrections ride along with others
        return {part: machine.kernel_us if "norm" in parameter.name else 0.0}
    if "embed_tokens" in parameter.name:
        head = _head_us(machine, parameter, setting, batch) if model.ties_embeddings else 0.0
        return {"rest": machine.kernel_us + _all_reduce_us(machine, parameter.shape[1], setting, batch) + head}
    if "lm_head" in parameter.name:
        return {"rest": _head_us(machine, parameter, setting, batch)}
    time = (
        _expert_us(machine, model, parameter, setting.tp, batch)
        if parameter.is_expert
        else _matmul_us(machine, parameter, setting.tp, batch)
    )
    if "kv_b_proj" in parameter.name:
        time += machine.kernel_us  # two products, W_UK into the query and W_UV after the merge
    if parameter.style != "row":
        return {part: time}
    all_reduce = _all_reduce_us(machine, parameter.shape[-2], setting, batch)
    if parameter.is_attention:
        return {"projections": time, "rest": all_reduce}
    return {"rest": time + all_reduce + _MLP_KERNELS * machine.kernel_us}


def _matmul_us(machine: Machine, parameter: Parameter, tp: int, num_rows: float, read: float = 1.0) -> float:
    """The slower of reading the weights (a share of them) and multiplying num_rows by them."""
    num_bytes = read * parameter.shard_bytes(tp)
    flops = 2 * num_rows * prod(parameter.shard_shape(tp))
    return machine.kernel_us + max(num_bytes / machine.hbm_gb_per_s / 1e3, flops / machine.matmul_tflops / 1e6)


def _expert_us(machine: Machine, model: ModelSize, parameter: Parameter, tp: int, batch: int) -> float:
    """One grouped product over the experts that some token picked."""
    read = expected_experts(model.num_routed, model.experts_per_token, batch)
    rows = batch * model.experts_per_token / model.num_routed  # of an average expert
    return _matmul_us(machine, parameter, tp, rows, read)


def _head_us(machine: Machine, parameter: Parameter, setting: Setting, batch: int) -> float:
    """Logits of this rank's part of the vocabulary, gathered."""
    time = _matmul_us(machine, parameter, setting.tp, batch)
    if setting.tp == 1:
        return time
    chunk_bytes = batch * parameter.shard_shape(setting.tp)[0] * _ACTIVATION_BYTES
    return time + machine.collective_us("all_gather", chunk_bytes, setting.tp, machine.num_nodes(setting.tp, setting.num_ranks))


def _all_reduce_us(machine: Machine, width: int, setting: Setting, batch: int) -> float:
    return machine.all_reduce_us(batch * width * _ACTIVATION_BYTES, setting.tp, machine.num_nodes(setting.tp, setting.num_ranks))
