"""Internal names of vLLM that sparse MLA needs besides `integrations.vllm.names`."""

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v32 import attention as deepseek_v32_attention
from vllm.models.deepseek_v32.attention import DeepseekV32Indexer
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder

# Methods that are replaced, overridden or called, and the arguments that must be among theirs.
METHODS = {
    SharedTopkIndicesBuffer: {"init_topk_indices_buffer": ("indexer", "topk_indices_buffer")},
    DeepseekV32IndexerCache: {"get_attn_backend": ()},
    AttentionMetadataBuilder: {
        "__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        "build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
    },
    deepseek_v32_attention: {
        "sparse_attn_indexer": ("k_cache_prefix", "kv_cache", "q_quant", "weights", "topk_indices_buffer"),
    },
}

__all__ = [
    "METHODS",
    "AttentionBackend",
    "AttentionMetadataBuilder",
    "DeepseekV32Indexer",
    "DeepseekV32IndexerCache",
    "SharedTopkIndicesBuffer",
    "deepseek_v32_attention",
    "get_forward_context",
]
