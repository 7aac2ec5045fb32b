"""Internal names of vLLM for the plug-in. A new version of vLLM may move them, so tests/engines looks for each name in
every tested version.
"""

from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group, get_pp_group, get_tp_group
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    split_kv_b_proj,
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.ops.dcp import MLADCPManager
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

# Methods that are replaced or overridden, and the arguments that must be among theirs.
METHODS = {
    AsyncModelRunnerOutput: {"get_output": ()},
    AttentionMetadataBuilder: {"update_draft_decode_metadata": ("metadata",)},
    MLACommonMetadataBuilder: {
        "__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device", "supports_dcp_with_varlen"),
        "build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "_build_decode": (
            "block_table_tensor",
            "seq_lens_device",
            "query_start_loc_cpu",
            "query_start_loc_device",
            "num_decode_tokens",
            "dcp_tot_seq_lens_device",
        ),
    },
    MLACommonImpl: {
        "forward_mqa": ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
        "forward_mha": (
            "q",
            "kv_c_normed",
            "k_pe",
            "kv_c_and_k_pe_cache",
            "attn_metadata",
            "k_scale",
            "output",
            "output_scale",
        ),
        "do_kv_cache_update": ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale"),
        "process_weights_after_loading": ("act_dtype",),
    },
    MLADCPManager: {
        "_init_combine": ("num_heads", "head_dim", "dtype", "is_lse_base_on_e", "use_pcp"),
        "_init_query_gather": ("num_heads", "head_dim", "dtype"),
    },
    # CPU workers inherit both.
    Worker: {"execute_model": ("scheduler_output",), "sample_tokens": ("grammar_output",)},
}

# vLLM's own symmetric memory for what this exchange does: allocated, some of it with multicast, though unused.
UNUSED_MEMORY = ("VLLM_USE_DIRECT_DCP_Q_GATHER", "VLLM_USE_DIRECT_DCP_A2A", "VLLM_USE_DIRECT_DCP_KV_GATHER")
