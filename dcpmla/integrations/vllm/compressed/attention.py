"""A layer of DeepSeek-V4's attention in vLLM: vLLM's parameters, this package's attention."""

from typing import Any

from torch import Tensor, nn

from dcpmla.integrations.external.compressed import CompressedModules, CompressorModules
from dcpmla.integrations.vllm.compressed.backend import DCPMLACompressedBackend
from dcpmla.integrations.vllm.compressed.names import (
    BreakableCUDAGraphCapture,
    ColumnParallelLinear,
    DeepseekCompressor,
    DeepseekV4Attention,
    ReplicatedLinear,
    eager_break_during_capture,
    get_forward_context,
)
from dcpmla.integrations.vllm.compressed.weights import joined
from dcpmla.parallel.fp8 import multiply_groups


class IndexerWeights(nn.Module):
    """The parameters of vLLM's indexer, by vLLM's names, without its cache and kernels."""

    def __init__(
        self,
        vllm_config: Any,
        *,
        config: Any,
        hidden_size: int,
        q_lora_rank: int,
        quant_config: Any,
        compress_ratio: int,
        prefix: str,
        **_: Any,
    ) -> None:
        super().__init__()
        num_heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = ReplicatedLinear(
            q_lora_rank, num_heads * width, bias=False, quant_config=quant_config, prefix=f"{prefix}.wq_b"
        )
        self.weights_proj = ReplicatedLinear(
            hidden_size, num_heads, bias=False, quant_config=None, prefix=f"{prefix}.weights_proj"
        )
        self.compressor = DeepseekCompressor(
            vllm_config=vllm_config,
            compress_ratio=compress_ratio,
            hidden_size=hidden_size,
            head_dim=width,
            prefix=f"{prefix}.compressor",
        )


class DCPMLADeepseekV4Attention(DeepseekV4Attention):
    """The layer that vLLM's model makes in place of its own.

    Attributes:
        stack, number: All layers of the model, and this one's number among them.
    """

    backend_cls = DCPMLACompressedBackend
    use_fp8_ds_mla_layout = False  # else vLLM changes the job's cache format to its own
    forward_mqa = _o_proj = None  # parts of the `forward` that is replaced
    stack: Any
    number: int

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Return the number of heads itself: they are not padded."""
        return num_heads

    def _get_indexer_cls(self, vllm_config: Any) -> type[nn.Module]:
        return IndexerWeights

    def __init__(
        self, vllm_config: Any, prefix: str, topk_indices_buffer: Tensor | None = None, aux_stream_list: Any = None
    ) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        before = set(layers)
        super().__init__(vllm_config, prefix, topk_indices_buffer, aux_stream_list)
        # The caches of vLLM's own attention: its windows, its compressors' states, its index keys.
        for name in set(layers) - before - {prefix}:
            del layers[name]
        del self.swa_cache_layer
        for compressor in self._compressors():
            del compressor.state_cache
        group_width = self.n_heads * self.head_dim // self.n_groups
        # `model.DCPMLADeepseekV4ForCausalLM.load_weights` brings its values, which are multiplied group by group.
        self.wo_a = ColumnParallelLinear(
            group_width,
            self.n_groups * self.o_lora_rank,
            bias=False,
            quant_config=None,
            return_bias=False,
            prefix=f"{prefix}.wo_a",
        )

    def _compressors(self) -> list[Any]:
        modules = [self.compressor, None if self.indexer is None else self.indexer.compressor]
        return [module for module in modules if module is not None]

    def forward(self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None) -> Tensor:
        """Run a step: [T, hidden] -> [T, hidden]."""
        if not BreakableCUDAGraphCapture.is_active():
            return self.wo_b(self._attend(hidden_states))
        low = hidden_states.new_empty(len(hidden_states), self.n_local_groups * self.o_lora_rank)
        self._attend_outside_pieces(hidden_states, low)
        return self.wo_b(low)

    def _attend(self, hidden_states: Tensor) -> Tensor:
        """Return attention's output before its last projection [T, groups x o_lora_rank]."""
        metadata, stack = get_forward_context().attn_metadata, self.stack
        is_profile = not isinstance(metadata, dict)
        cache, step = (None, None) if is_profile else (stack.cache[self.number], metadata[stack.leader.prefix].step)
        low: Tensor = stack.attention[self.number].attend(hidden_states, cache, step)
        return low

    def _attend_into(self, hidden_states: Tensor, low: Tensor) -> None:
        low.copy_(self._attend(hidden_states))

    # This runs between the graphs of a step's pieces, which read the result where it was at the capture.
    _attend_outside_pieces = eager_break_during_capture(_attend_into)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return the pages of the whole model in one layer, and None in all others."""
        return self.stack.pages(vllm_config) if self is self.stack.leader else None

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Cut the caches of all layers from the memory of the pages."""
        self.kv_cache = kv_cache
        self.stack.bind(kv_cache)

    def modules(self) -> CompressedModules:
        """Return the projections and weights of this layer as this package's layer takes them."""
        indexer = self.indexer
        linears = [self.fused_wqa_wkv, *(compressor.fused_wkv_wgate for compressor in self._compressors())]
        of_indexer: dict[str, Any] = {}
        if indexer is not None:
            linears.append(indexer.weights_proj)
            of_indexer = {
                "index_compressor": _pooling(indexer.compressor),
                "index_q_proj": lambda q_c: indexer.wq_b(q_c)[0],
            }
        return CompressedModules(
            down_proj=joined(linears),
            q_proj=self.wq_b,
            q_norm=self.q_norm.weight.data.float(),
            kv_norm=self.kv_norm.weight.data.float(),
            sinks=self.attn_sink.data[: self.n_local_heads],
            compressor=None if self.compressor is None else _pooling(self.compressor),
            o_a_proj=lambda heads: multiply_groups(heads, self.wo_a.weight.unflatten(0, (self.n_local_groups, -1))),
            o_b_proj=self.wo_b,
            **of_indexer,
        )


def _pooling(compressor: Any) -> CompressorModules:
    return CompressorModules(bias=compressor.ape.data, norm=compressor.norm.weight.data.float())
