"""vLLM's internal names that DeepSeek-V4's attention uses; a new version may move them. tests/engines looks for each in
every tested version that has this model.
"""

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture, eager_break_during_capture
from vllm.distributed.parallel_state import get_dcp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu_worker import Worker

# Methods that are replaced or overridden, and the arguments that must be among theirs.
METHODS = {
    DeepseekV4Attention: {
        "__init__": ("vllm_config", "prefix", "topk_indices_buffer", "aux_stream_list"),
        "_get_indexer_cls": ("vllm_config",),
        "forward": ("positions", "hidden_states", "llama_4_scaling"),
        "get_kv_cache_spec": ("vllm_config",),
        "bind_kv_cache": ("kv_cache",),
        "get_padded_num_q_heads": ("num_heads",),
        "forward_mqa": (),
        "_o_proj": (),
    },
    DeepseekCompressor: {"__init__": ("vllm_config", "compress_ratio", "hidden_size", "head_dim", "prefix")},
    AttentionMetadataBuilder: {
        "build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "build_for_cudagraph_capture": ("common_attn_metadata",),
        "update_draft_decode_metadata": ("metadata",),
    },
    GPUModelRunner: {
        "initialize_kv_cache": ("kv_cache_config",),
        "get_model": (),
        "add_requests": ("scheduler_output",),
    },
    Scheduler: {
        "_mamba_block_aligned_split": ("request", "num_new_tokens", "num_new_local_computed_tokens"),
        "_update_after_schedule": ("scheduler_output",),
        "reset_prefix_cache": (),
    },
    KVCacheManager: {"get_computed_blocks": ("request", "max_cache_hit_length")},
    DraftModelSpeculator: {"set_attn": ("model_state", "kv_cache_config", "block_tables")},
    Worker: {"determine_available_memory": ()},  # workers of CPUs have one of their own, whose memory is the user's
}

# Members of vLLM's model modules that choose the attention class: a function on NVIDIA's GPUs, the class on CPUs.
CHOOSER, CPU_CLASS = "_select_dsv4_attn_cls", "DeepseekV4CPUAttention"
