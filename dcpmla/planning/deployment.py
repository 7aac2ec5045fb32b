"""Time of a decode step: parameters, cache and exchange of the model, moved or multiplied at the machine's speed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from dcpmla.attention.costs import LayerReads
from dcpmla.attention.spec import LayerSpec
from dcpmla.cache.index_keys import index_row_width, index_storage_dtype
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.states import num_states
from dcpmla.indexer_config import IndexerConfig
from dcpmla.planning.capacity import block_of
from dcpmla.planning.exchange import ExchangeCosts, auto_backend
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


@dataclass(frozen=True)
class Deployment:
    """A model in a setting on a machine: the times of its decode steps in CUDA graphs.

    Attributes:
        machine: Speeds of the GPUs.
        model: Sizes of the model.
        setting: Cut and cache of the model.
        backend: Name of the exchange (`ExchangeCosts`).
    """

    machine: Machine
    model: ModelSize
    setting: Setting
    backend: str = "auto"

    @cached_property
    def exchange(self) -> ExchangeCosts:
        """Return the exchange of a DCP group."""
        return ExchangeCosts(self.machine, self.setting.dcp, self._num_nodes(self.setting.dcp), self.backend)

    def block(self, num_requests: int = 1) -> CachePlan:
        """Return the sizes of the cache with one block, in blocks of the runtime's default size, and with the states of
        requests that run at once.
        """
        sizes = num_states(num_requests), self.setting.num_speculative_tokens
        return block_of(self.model.attention, self.setting.dcp_config, *sizes)

    def step_us(self, batch: int, context: int) -> dict[str, float]:
        """Return the microseconds of one decode step: "total" and PARTS (SPARSE_PARTS of sparse MLA), all layers
        together.

        W_UK, W_UV, o_proj and an indexer's matrices are projections. The indexer's scores and choices are the
        selection, its candidates part of the gather. Every all-reduce, MLPs, experts, embedding and head are the rest.

        Args:
            batch: Requests of the TP group, with one new token each, and drafts.
            context: Cached tokens of each request.
        """
        num_tokens = batch * self.setting.query_len
        parts = dict.fromkeys(SPARSE_PARTS if self.model.attention.num_index_layers else PARTS, 0.0)
        for parameter in self.model.parameters:
            _add(parts, self.parameter_us(parameter, num_tokens), parameter.count)
        _add(parts, self.attention_us(batch, context))
        parts["projections"] += self._layers_us
        return {"total": sum(parts.values()), **parts}

    def floor_us(self, batch: int, context: int) -> float:
        """Return a lower bound of a decode step's microseconds on a rank: each weight (of experts, only picked ones),
        its part of the cache and its index keys are read once at the memory's rate, or multiplied where that takes
        longer.
        """
        return replace(self, machine=self.machine.without_overheads()).step_us(batch, context)["total"]

    def attention_us(self, batch: int, context: int) -> dict[str, float]:
        """Return the microseconds of all layers' decode attention, by part: selections and the exchange included."""
        parts: dict[str, float] = {}
        for layer, number in self.model.attention.sorts.items():
            _add(parts, self._layer_us(layer, layer.reads(context), batch), number)
        return parts

    def products_us(self, num_tokens: int, apart: Mapping[str, int]) -> float:
        """Return the microseconds of a step's products, all-reduces and small kernels.

        Args:
            num_tokens: Tokens that each product has as rows.
            apart: Tokens of other products, by a part of the parameter's name; 0 leaves a product out.
        """
        total = self._layers_us
        for parameter in self.model.parameters:
            num_rows = next((number for name, number in apart.items() if name in parameter.name), num_tokens)
            if num_rows:
                total += parameter.count * sum(self.parameter_us(parameter, num_rows).values())
        return total

    def _layer_us(self, layer: LayerSpec, reads: LayerReads, batch: int) -> dict[str, float]:
        """Return the times of one layer's decode attention."""
        machine, setting, num_tokens = self.machine, self.setting, batch * self.setting.query_len
        if reads.state_bytes:  # linear attention, which needs no exchange
            num_bytes = num_tokens * reads.state_bytes // setting.tp
            parts = {"attention": machine.attention_overhead_us + num_bytes / machine.hbm_gb_per_s / 1e3}
        else:
            num_heads = layer.config.heads_per_rank(setting.tp) * setting.dcp
            row_bytes = layer.row_bytes(setting.kv_cache_dtype, setting.tp // setting.dcp)
            sizes = row_bytes, num_heads, batch, setting.dcp, setting.query_len
            parts = {
                "gather": self.exchange.time_us("gather_heads", num_tokens, num_heads, reads.query_dim),
                "attention": attention_us(machine, reads, *sizes),
                "combine": self.exchange.time_us("combine", num_tokens, num_heads, reads.out_dim),
            }
        if reads.num_keys:
            _add(parts, self._selection_us(layer.config.indexer, reads, batch))
        return parts

    def _selection_us(self, indexer: IndexerConfig, reads: LayerReads, batch: int) -> dict[str, float]:
        """Return the times of one layer's selection: this rank's keys scored, all ranks' candidates gathered."""
        machine, query_len = self.machine, self.setting.query_len
        local_keys = -(-reads.num_keys // self.setting.dcp)
        num_keys = batch * local_keys
        storage = index_storage_dtype(self.setting.index_cache_dtype, torch.bfloat16)
        num_bytes = num_keys * index_row_width(storage, indexer.head_dim) * storage.itemsize
        flops = 2 * query_len * num_keys * indexer.num_heads * indexer.head_dim
        num_candidates = min(reads.num_candidates, local_keys)
        return {
            "selection": _SELECTION_KERNELS * machine.kernel_us + machine.cache_us(num_bytes, flops),
            "gather": self.exchange.candidates_us(batch * query_len, num_candidates),
        }

    def parameter_us(self, parameter: Parameter, num_tokens: int) -> dict[str, float]:
        """Return the time that one parameter adds to a step, by part: its kernel, and the collective that its cut
        needs.
        """
        machine, group = self.machine, parameter.part
        part = "projections" if group == "attention" else "rest"
        if not parameter.is_matrix:  # norms are kernels, but in the sums before them; biases ride along with others
            is_kernel = parameter.name.endswith("norm.weight") and not parameter.is_block_norm
            return {part: machine.kernel_us if is_kernel else 0.0}
        if group == "embedding":
            return {"rest": machine.kernel_us}
        time = self._matmul_us(parameter, num_tokens)
        if parameter.is_hyper_connection:
            num_bytes = _STREAM_PASSES * num_tokens * parameter.shape[-1] * _ACTIVATION_BYTES
            return {part: time + num_bytes / machine.hbm_gb_per_s / 1e3}
        if group == "head":
            return {"rest": time + self._gather_logits_us(parameter, num_tokens)}
        if parameter.is_joined or parameter.is_shared_expert:
            time -= machine.product_us  # it is part of another product's kernel
        if "kv_b_proj" in parameter.name:
            time += machine.product_us  # two products, W_UK into the query and W_UV after the merge
        if parameter.style != "row" or parameter.is_shared_expert:  # summed with the routed experts
            return {part: time}
        all_reduce = self._all_reduce_us(parameter.shape[-2], num_tokens)
        if group == "attention":
            return {"projections": time, "rest": all_reduce}
        if parameter.is_expert and self.model.has_shortcut:
            all_reduce = machine.kernel_us  # the addition
        num_kernels = _EXPERT_KERNELS if parameter.is_expert else _MLP_KERNELS
        return {"rest": time + all_reduce + num_kernels * machine.kernel_us}

    def _matmul_us(self, parameter: Parameter, num_rows: float) -> float:
        """Return the slower of reading the weights and multiplying num_rows by them. Of experts, one grouped product
        takes the weights that some token picked.
        """
        machine, model, layout = self.machine, self.model, (self.setting.tp, self.setting.enable_expert_parallel)
        num_bytes: float = parameter.shard_bytes(*layout)
        if parameter.is_expert:
            num_bytes *= expected_experts(model.num_routed, model.experts_per_token, num_rows)
            num_rows *= model.experts_per_token / model.num_routed  # rows of an average expert
        flops = 2 * num_rows * prod(parameter.shard_shape(*layout))
        share = machine.packed_read_share if parameter.is_packed(*layout) else machine.product_read_share
        read_us = num_bytes / (share * machine.hbm_gb_per_s) / 1e3
        return machine.product_us + max(read_us, flops / machine.matmul_tflops / 1e6)

    def _gather_logits_us(self, head: Parameter, num_tokens: int) -> float:
        """Return the time to gather the logits of all ranks' parts of the vocabulary."""
        tp = self.setting.tp
        chunk_bytes = num_tokens * head.shard_shape(tp)[0] * _ACTIVATION_BYTES
        return self.machine.collective_us("all_gather", chunk_bytes, tp, self._num_nodes(tp)) if tp > 1 else 0.0

    def _all_reduce_us(self, width: int, num_tokens: int) -> float:
        """Return the time of a sum over the TP group: in a whole model by `comm.reduce`, with the norm that follows
        where `direct` has it; in a stack of attention layers by NCCL.
        """
        machine, tp, num_bytes = self.machine, self.setting.tp, num_tokens * width * _ACTIVATION_BYTES
        if not self.model.is_stack and auto_backend(machine, tp, self._num_nodes(tp)) == "direct":
            assert machine.direct is not None
            # Past small batches a rank sums its part and stores the result: two trips of 1 / tp each.
            return machine.direct.operation_us("combine", 2 * num_bytes * (1 - 1 / tp))
        return machine.all_reduce_us(num_bytes, tp, self._num_nodes(tp))

    @property
    def _layers_us(self) -> float:
        """Microseconds of the small kernels of all attention layers."""
        return self.model.attention.num_layers * self.machine.layer_us

    def _num_nodes(self, group_size: int) -> int:
        """Return the nodes that a group of the job's ranks spans."""
        return self.machine.num_nodes(group_size, self.setting.num_ranks)


def attention_us(
    machine: Machine, reads: LayerReads, row_bytes: int, num_heads: int, batch: int, dcp: int = 1, query_len: int = 1
) -> float:
    """Return the microseconds of decode attention of one layer on one rank of a DCP group: an overhead, then the slower
    of reading its part of the rows and multiplying.

    A request's tokens share the rows that they read, unless each selects its own. Each rank is assumed to own the same
    share of the rows, and kernels over a quantized cache to multiply at the bfloat16 rate, because they widen rows.
    """
    num_rows = batch * -(-reads.num_rows // dcp)
    flops = 2 * query_len * num_rows * num_heads * (reads.query_dim + reads.out_dim)
    num_bytes = num_rows * row_bytes * (query_len if reads.num_keys else 1)
    return machine.attention_overhead_us + machine.cache_us(num_bytes, flops)


def expected_experts(num_routed: int, experts_per_token: int, num_tokens: float) -> float:
    """Return the share of the experts that at least one token picks, if each token picks at random."""
    return 1 - (1 - experts_per_token / num_routed) ** num_tokens


def _add(parts: dict[str, float], times: dict[str, float], count: int = 1) -> None:
    """Add the times of `count` equal parameters or layers to the parts of a step."""
    for part, time in times.items():
        parts[part] = parts.get(part, 0.0) + count * time
