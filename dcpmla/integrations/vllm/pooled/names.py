"""Internal names of vLLM that sparse MLA over pools needs besides `integrations.vllm.sparse.names`."""

from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.models.glm5next.common.attention import Indexer
from vllm.models.glm5next.nvidia import sparse_indexer
from vllm.models.glm5next.nvidia.ops.kpool_compress import (
    kpool_compress_and_write_cache,
    kpool_decode_update_and_maybe_write_cache_batched,
    kpool_seed_tail_cache,
)

# Methods that are replaced, overridden or called, and the arguments that must be among theirs.
METHODS = {
    sparse_indexer: {
        "sparse_attn_indexer_kpool": (
            "k_cache_prefix",
            "kv_cache",
            "q_quant",
            "k",
            "weights",
            "topk_indices_buffer",
            "gate_score",
            "compress_ape",
            "tail_kv_cache",
            "tail_prefix",
        ),
    },
}

__all__ = [
    "METHODS",
    "Indexer",
    "eager_break_during_capture",
    "kpool_compress_and_write_cache",
    "kpool_decode_update_and_maybe_write_cache_batched",
    "kpool_seed_tail_cache",
    "sparse_indexer",
]
