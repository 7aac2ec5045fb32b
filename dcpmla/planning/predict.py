"""Time of a decode step: parameters, cache and exchange of the model, moved or multiplied at the machine's speed."""

from math import prod

import torch

from dcpmla.attention.costs import LayerReads
from dcpmla.attention.spec import LayerSpec
from dcpmla.attention.stack import Stack
from dcpmla.cache.index_keys import index_row_width, index_storage_dtype
from dcpmla.indexer_config import IndexerConfig
from dcpmla.planning.exchange import auto_backend, candidates_us, exchange_us
from dcpmla.planning.machine import Machine
from dcpmla.planning.parameter import Parameter
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize

PARTS = ("projections", "gather", "attention", "combine", "rest")
SPARSE_PARTS = ("projections", "selection", *PARTS[1:])
_ACTIVATION_BYTES = 2
_MLP_KERNELS = 1  # activation
_EXPERT_KERNELS = 4  # besides a layer's two products: the gate's choice, routes in order, the sum over routes
_STREAM_PASSES = 3  # a hyper-connection reads all streams, writes them mixed, and reads them again
_SELECTION_KERNELS = 4  # queries prepared, keys scored, this rank's candidates, the choice among all ranks'


def predict_step(
    machine: Machine, model: ModelSize, setting: Setting, batch: int, context: int, backend: str = "auto"
) -> dict[str, float]:
    """Return the microseconds of one decode step in CUDA graphs: "total" and PARTS (SPARSE_PARTS of sparse MLA), all
    layers together.

    W_UK, W_UV, o_proj and an indexer's matrices are projections. The indexer's scores and choices are the selection,
    its candidates part of the gather. Every all-reduce, MLPs, experts, embedding and head are the rest.

    Args:
        batch: Requests of the TP group, with one new token each, and drafts.
        context: Cached tokens of each request.
        backend: Name of the exchange (`exchange_us`).
    """
    attention, num_tokens = model.attention, batch * setting.query_len
    parts = dict.fromkeys(SPARSE_PARTS if attention.num_index_layers else PARTS, 0.0)
    for parameter in model.parameters:
        for part, time in parameter_us(machine, model, parameter, setting, num_tokens).items():
            parts[part] += parameter.count * time
    for part, time in decode_attention_us(machine, attention, setting, batch, context, backend).items():
        parts[part] += time
    parts["projections"] += attention.num_layers * machine.layer_us
    return {"total": sum(parts.values()), **parts}


def decode_attention_us(
    machine: Machine, attention: Stack, setting: Setting, batch: int, context: int, backend: str = "auto"
) -> dict[str, float]:
    """Return the microseconds of all layers' decode attention, by part: selections and the exchange included."""
    parts: dict[str, float] = {}
    for layer, number in attention.sorts.items():
        reads = layer.reads(context)
        times = [
            _state_us(machine, reads, setting, batch)
            if reads.state_bytes
            else _exchange_and_attention_us(machine, layer, reads, setting, batch, backend)
        ]
        if reads.num_keys:
            times.append(_selection_us(machine, layer.config.indexer, reads, setting, batch, backend))
        for part, time in (item for of_layer in times for item in of_layer.items()):
            parts[part] = parts.get(part, 0.0) + number * time
    return parts


def floor_us(machine: Machine, model: ModelSize, setting: Setting, batch: int, context: int) -> float:
    """Return a lower bound of a decode step's microseconds on a rank: each weight (of experts, only picked ones), its
    part of the cache and its index keys are read once at the memory's rate, or multiplied where that takes longer.
    """
    return predict_step(machine.without_overheads(), model, setting, batch, context)["total"]


def attention_us(
    machine: Machine,
    reads: LayerReads,
    row_bytes: int,
    num_heads: int,
    batch: int,
    dcp: int = 1,
    query_len: int = 1,
) -> float:
    """Return the microseconds of decode attention of one layer on one rank of a DCP group: an overhead, then the slower
    of reading its part of the rows and multiplying.

    A request's tokens share the rows that they read, unless each selects its own. Each rank is assumed to own the same
    share of the rows, and kernels over a quantized cache to multiply at the bfloat16 rate, because they widen rows.
    """
    num_rows = batch * -(-reads.num_rows // dcp)
    flops = 2 * query_len * num_rows * num_heads * (reads.query_dim + reads.out_dim)
    num_bytes = num_rows * row_bytes * (query_len if reads.num_keys else 1)
    return machine.attention_overhead_us + _cache_us(machine, num_bytes, flops)


def expected_experts(num_routed: int, experts_per_token: int, num_tokens: int) -> float:
    """Return the share of the experts that at least one token picks, if each token picks at random."""
    return 1 - (1 - experts_per_token / num_routed) ** num_tokens


def _exchange_and_attention_us(
    machine: Machine,
    layer: LayerSpec,
    reads: LayerReads,
    setting: Setting,
    batch: int,
    backend: str,
) -> dict[str, float]:
    """Return the times of one layer."""
    num_heads, num_tokens = layer.config.heads_per_rank(setting.tp) * setting.dcp, batch * setting.query_len
    row_bytes = layer.row_bytes(setting.kv_cache_dtype)
    layout = setting.dcp, machine.num_nodes(setting.dcp, setting.num_ranks), backend
    return {
        "gather": exchange_us(machine, "gather_heads", num_tokens, num_heads, reads.query_dim, *layout),
        "attention": attention_us(machine, reads, row_bytes, num_heads, batch, setting.dcp, setting.query_len),
        "combine": exchange_us(machine, "combine", num_tokens, num_heads, reads.out_dim, *layout),
    }


def _state_us(machine: Machine, reads: LayerReads, setting: Setting, batch: int) -> dict[str, float]:
    """Return the time of one layer of linear attention, which needs no exchange."""
    num_bytes = batch * setting.query_len * reads.state_bytes // setting.tp
    return {"attention": machine.attention_overhead_us + num_bytes / machine.hbm_gb_per_s / 1e3}


def _selection_us(
    machine: Machine, indexer: IndexerConfig, reads: LayerReads, setting: Setting, batch: int, backend: str
) -> dict[str, float]:
    """Return the times of one layer's selection: this rank's keys scored, all ranks' candidates gathered."""
    local_keys = -(-reads.num_keys // setting.dcp)
    num_keys = batch * local_keys
    storage = index_storage_dtype(setting.index_cache_dtype, torch.bfloat16)
    num_bytes = num_keys * index_row_width(storage, indexer.head_dim) * storage.itemsize
    flops = 2 * setting.query_len * num_keys * indexer.num_heads * indexer.head_dim
    num_nodes = machine.num_nodes(setting.dcp, setting.num_ranks)
    num_candidates = min(reads.num_candidates, local_keys)
    return {
        "selection": _SELECTION_KERNELS * machine.kernel_us + _cache_us(machine, num_bytes, flops),
        "gather": candidates_us(machine, batch * setting.query_len, num_candidates, setting.dcp, num_nodes, backend),
    }


def _cache_us(machine: Machine, num_bytes: int, flops: int) -> float:
    """Return the slower of reading a cache and multiplying by its rows, as attention's kernels do."""
    read_gb_per_s = machine.attention_read_share * machine.hbm_gb_per_s
    return max(num_bytes / read_gb_per_s / 1e3, flops / machine.attention_tflops / 1e6)


def parameter_us(
    machine: Machine, model: ModelSize, parameter: Parameter, setting: Setting, num_tokens: int
) -> dict[str, float]:
    """Return the time that one parameter adds to a step, by part: its kernel, and the collective that its cut needs."""
    part = "projections" if parameter.is_attention else "rest"
    if not parameter.is_matrix:  # norms are kernels, but in the sums before them; biases ride along with others
        is_kernel = parameter.name.endswith("norm.weight") and not parameter.is_block_norm
        return {part: machine.kernel_us if is_kernel else 0.0}
    if parameter.is_hyper_connection:
        num_bytes = _STREAM_PASSES * num_tokens * parameter.shape[-1] * _ACTIVATION_BYTES
        return {part: _matmul_us(machine, parameter, setting, num_tokens) + num_bytes / machine.hbm_gb_per_s / 1e3}
    if parameter.part == "embedding":
        return {"rest": machine.kernel_us}
    if "lm_head" in parameter.name:
        return {"rest": _head_us(machine, parameter, setting, num_tokens)}
    time = (
        _expert_us(machine, model, parameter, setting, num_tokens)
        if parameter.is_expert
        else _matmul_us(machine, parameter, setting, num_tokens)
    )
    if parameter.is_joined or parameter.is_shared_expert:
        time -= machine.product_us  # it is part of another product's kernel
    if "kv_b_proj" in parameter.name:
        time += machine.product_us  # two products, W_UK into the query and W_UV after the merge
    if parameter.style != "row" or parameter.is_shared_expert:  # summed with the routed experts
        return {part: time}
    all_reduce = _all_reduce_us(machine, model, parameter.shape[-2], setting, num_tokens)
    if parameter.is_attention:
        return {"projections": time, "rest": all_reduce}
    if parameter.is_expert and model.has_shortcut:
        all_reduce = machine.kernel_us  # the addition
    num_kernels = _EXPERT_KERNELS if parameter.is_expert else _MLP_KERNELS
    return {"rest": time + all_reduce + num_kernels * machine.kernel_us}


def _matmul_us(machine: Machine, parameter: Parameter, setting: Setting, num_rows: float, read: float = 1.0) -> float:
    """Return the slower of reading a share of the weights and multiplying num_rows by the weights."""
    layout = setting.tp, setting.enable_expert_parallel
    num_bytes = read * parameter.shard_bytes(*layout)
    flops = 2 * num_rows * prod(parameter.shard_shape(*layout))
    share = machine.packed_read_share if parameter.is_packed(*layout) else machine.product_read_share
    read_us = num_bytes / (share * machine.hbm_gb_per_s) / 1e3
    return machine.product_us + max(read_us, flops / machine.matmul_tflops / 1e6)


def _expert_us(machine: Machine, model: ModelSize, parameter: Parameter, setting: Setting, batch: int) -> float:
    """Return the time of one grouped product over the experts that some token picked."""
    read = expected_experts(model.num_routed, model.experts_per_token, batch)
    rows = batch * model.experts_per_token / model.num_routed  # rows of an average expert
    return _matmul_us(machine, parameter, setting, rows, read)


def _head_us(machine: Machine, parameter: Parameter, setting: Setting, batch: int) -> float:
    """Return the time of the logits of this rank's part of the vocabulary, gathered."""
    time = _matmul_us(machine, parameter, setting, batch)
    if setting.tp == 1:
        return time
    chunk_bytes = batch * parameter.shard_shape(setting.tp)[0] * _ACTIVATION_BYTES
    return time + machine.collective_us(
        "all_gather", chunk_bytes, setting.tp, machine.num_nodes(setting.tp, setting.num_ranks)
    )


def _all_reduce_us(machine: Machine, model: ModelSize, width: int, setting: Setting, batch: int) -> float:
    """Return the time of a sum over the TP group: in a whole model by `comm.reduce`, with the norm that follows where
    `direct` has it; in a stack of attention layers by NCCL.
    """
    num_bytes, num_nodes = batch * width * _ACTIVATION_BYTES, machine.num_nodes(setting.tp, setting.num_ranks)
    if not model.is_stack and auto_backend(machine, setting.tp, num_nodes) == "direct":
        assert machine.direct is not None
        # Past small batches a rank sums its part and stores the result: two trips of 1 / tp each.
        return machine.direct.operation_us("combine", 2 * num_bytes * (1 - 1 / setting.tp))
    return machine.all_reduce_us(num_bytes, setting.tp, num_nodes)
