"""The check of options and models at start."""

from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import attention_backends, get_spec

from dcpmla.integrations.sglang.names import NAME


def check(runner: Any, parallel: Any) -> None:
    """Raise ValueError, in one line, for what the backend does not run."""
    pool, spec = runner.token_to_kv_pool, get_spec()
    runs_prefill_graphs = runner.device == "cuda" and not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED)
    for wrong, fault, allowed in (
        (set(attention_backends()) != {NAME}, "prefill or decode has another one", "give one backend for both"),
        (not hasattr(pool, "kv_lora_rank"), "the model has no MLA", "it runs MLA models"),
        (getattr(pool, "use_dsa", False), "the model's attention is sparse", "it runs dense MLA models"),
        (runner.kv_index_translator.is_translating, "--enable-unified-memory is on", "leave it off"),
        (parallel.dcp_replicate_q_proj, "--dcp-replicate-q-proj is on", "leave it off"),
        (pool.dtype == torch.float8_e5m2, "--kv-cache-dtype is fp8_e5m2", "it takes auto, bf16 and fp8_e4m3"),
        (runs_prefill_graphs, "prefills run in CUDA graphs", "give --disable-prefill-cuda-graph"),
        (
            spec.speculative_algorithm not in (None, "EAGLE"),
            f"--speculative-algorithm is {spec.speculative_algorithm}",
            "it takes EAGLE and NEXTN",
        ),
        (
            spec.speculative_eagle_topk not in (None, 1),
            f"--speculative-eagle-topk is {spec.speculative_eagle_topk}",
            "drafts are a chain: give 1",
        ),
        (
            spec.speculative_draft_attention_backend not in (None, NAME),
            f"--speculative-draft-attention-backend is {spec.speculative_draft_attention_backend}",
            f"leave it out, or give {NAME}",
        ),
        (spec.enable_multi_layer_eagle, "--enable-multi-layer-eagle is on", "it drafts with one module"),
        (spec.speculative_adaptive, "--speculative-adaptive is on", "leave it off"),
    ):
        if wrong:
            raise ValueError(f"--attention-backend {NAME}: {fault}; {allowed}")
