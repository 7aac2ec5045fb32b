"""vLLM's options for DeepSeek-V4 with this package's attention: the choice, the checks, and the layout of the cache.
Nothing here imports vLLM.
"""

import logging
import math
import os
from dataclasses import replace
from typing import Any

from dcpmla.attention.layers.compressed.config import CompressedConfig
from dcpmla.attention.step.chunks import max_chunk_tokens
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.deepseek_v4_config import check_compressed, compressed_config
from dcpmla.integrations.vllm.invariance import is_batch_invariant

# vLLM's --kv-cache-dtype -> this package's formats of rows and of index keys.
FORMATS = {
    "auto": ("auto", "auto"),
    "bfloat16": ("auto", "auto"),
    "fp8": ("fp8_ds_mla", "fp8"),
    "fp8_ds_mla": ("fp8_ds_mla", "fp8"),
}


SCHEDULER = "dcpmla.integrations.vllm.compressed.scheduler.make_scheduler"

logger = logging.getLogger(__name__)


def is_chosen(vllm_config: Any) -> bool:
    """Return whether the options choose this package's attention: by `--attention-backend CUSTOM`, or with
    DCPMLA_VLLM=default by no `--attention-backend` at all, where ranks share a cache.

    Without DCP vLLM's own attention takes less time (docs/plugging_in.md), so only CUSTOM replaces it.
    """
    backend = vllm_config.attention_config.backend
    if backend is None:
        is_shared = vllm_config.parallel_config.decode_context_parallel_size > 1
        return is_shared and os.environ.get("DCPMLA_VLLM") == "default"
    return bool(backend.name == "CUSTOM")


def check(vllm_config: Any) -> None:
    """Raise ValueError for options that DeepSeek-V4 does not support with this package's attention."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    refused = (
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism (-pcp)"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism (-pp)"),
        (parallel.use_ubatching, "micro-batches (--enable-dbo)"),
        (_has_other_drafts(vllm_config), "drafts (--speculative-config) by anything but one MTP module (method mtp)"),
        (vllm_config.kv_transfer_config is not None, "a connector for caches (--kv-transfer-config)"),
        (cache.kv_offloading_size is not None, "offloading of caches (--kv-offloading-size)"),
        (is_batch_invariant(), "results that do not depend on the batch (VLLM_BATCH_INVARIANT)"),
        (not vllm_config.use_v2_model_runner, "vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0)"),
    )
    for is_asked, feature in refused:
        if is_asked:
            raise ValueError(
                f"dcpmla's attention for DeepSeek-V4 does not support {feature}; leave it out, or choose another "
                "--attention-backend"
            )
    if cache.cache_dtype not in FORMATS:
        raise ValueError(
            f"kv_cache_dtype (--kv-cache-dtype) is {cache.cache_dtype!r}; dcpmla's attention for DeepSeek-V4 has "
            f"{', '.join(FORMATS)}"
        )
    config = vllm_config.model_config.hf_config
    check_compressed(config)
    geometry = compressed_config(config)
    if not geometry.ratios:
        raise ValueError(f"layer_types is {config.layer_types}; at least one layer must compress its context")
    geometry.heads_per_rank(parallel.tensor_parallel_size)


def choose_scheduler(vllm_config: Any) -> None:
    """Choose the scheduler that remembers states, or turn prefix caching off if the user chose another scheduler."""
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULER
        return
    logger.warning(
        "dcpmla: prefix caching is off (--no-enable-prefix-caching): a window of DeepSeek-V4 belongs to a request, and "
        "the scheduler of --scheduler-cls remembers none"
    )
    cache.enable_prefix_caching = False


def _has_other_drafts(vllm_config: Any) -> bool:
    """Return whether the options ask for drafts by anything but one MTP module."""
    drafts, config = vllm_config.speculative_config, vllm_config.model_config.hf_config
    return drafts is not None and (drafts.method != "mtp" or getattr(config, "num_nextn_predict_layers", 1) != 1)


def layout_of(vllm_config: Any, config: CompressedConfig) -> DCPConfig:
    """Return the layout of the cache over the ranks. One of vLLM's blocks is one of this package's.

    Raises:
        ValueError: A block does not hold whole entries.
    """
    parallel, block_size = vllm_config.parallel_config, vllm_config.cache_config.block_size
    interleave = parallel.cp_kv_cache_interleave_size
    granule = math.lcm(*config.ratios) * interleave
    if block_size % granule:
        raise ValueError(
            f"block_size (--block-size) is {block_size}; it must be a multiple of {granule}, so that it holds whole "
            f"entries of {config.ratios} tokens (the config's compress_rates), in groups of {interleave} "
            "(--cp-kv-cache-interleave-size)"
        )
    rows, keys = FORMATS[vllm_config.cache_config.cache_dtype]
    dcp = DCPConfig(
        tensor_parallel_size=parallel.tensor_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        cp_kv_cache_interleave_size=interleave,
        block_size=block_size // config.row_tokens,
        kv_cache_dtype=rows,
        index_cache_dtype=keys,
    )
    sizes = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_seqs
    return replace(dcp, context_workspace_tokens=max_chunk_tokens(*sizes, config.chunk_alignment(dcp)))
