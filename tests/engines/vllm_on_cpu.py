"""vLLM on a CPU from its Python files alone, with decode context parallelism: what its compiled parts and its CPU
platform lack for these tests. Entry points of vLLM find it (`tests.engines.trees`).
"""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime import interpreter

from dcpmla.ownership import Owner
from tests.support.interpreter import patch_once


def platform() -> str:
    """Return the path of vLLM's CPU platform, after the compiled ops that a dense model needs are defined in torch,
    unless they are in this tree.
    """
    if find_spec("vllm._C") is None:
        _define_ops()
    return "vllm.platforms.cpu.CpuPlatform"


@cache
def _define_ops() -> torch.library.Library:
    library = torch.library.Library("_C", "FRAGMENT")
    ops = {
        "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
        "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
        "silu_and_mul(Tensor(a!) result, Tensor input) -> ()": _silu_and_mul,
    }
    for schema, run in ops.items():
        library.define(schema)
        library.impl(schema.split("(")[0], run, "CompositeExplicitAutograd")
    return library  # ops live as long as it does


def _silu_and_mul(result: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    result.copy_(F.silu(gate) * up)


def patch() -> None:
    """Let vLLM's CPU platform shard a cache, keep it in 8 bits and in blocks of any size, cut prompts into chunks and
    reuse prefixes, for backends that can; and leave no shared memory in /dev/shm, under a name that the next job would
    find.
    """
    patch_once()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # GPUs check sums for debugging alone
    # Triton's interpreter refuses masks made from bools in memory, which it has as bytes.
    memory = interpreter._interpreter
    load, store = memory.load, memory.store
    memory.load = lambda pointers, mask, *more: load(pointers, mask.astype(bool), *more)
    memory.store = lambda pointers, values, mask: store(pointers, values, mask.astype(bool))
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._compute_slot_mapping_kernel_impl = slot_mapping
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    choose, original = CpuPlatform.get_attn_backend_cls.__func__, CpuPlatform.check_and_update_config.__func__

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *more: Any, **named: Any
    ) -> str:
        asked = attn_selector_config._replace(kv_cache_dtype="auto", use_sparse=False)
        return choose(cls, selected_backend, asked, *more, **named)

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        block_size = cache.block_size if cache.user_specified_block_size else None
        original(cls, vllm_config)
        cache.block_size = block_size or cache.block_size
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept

    from vllm.model_executor.models.registry import ModelRegistry

    # The model of GPUs, whose kernels of Triton run here, too.
    gpus = "vllm.models.deepseek_v32.nvidia"
    ModelRegistry.register_model("DeepseekV32ForCausalLM", f"{gpus}.model:DeepseekV32ForCausalLM")
    ModelRegistry.register_model("DeepseekV32MTPModel", f"{gpus}.mtp:DeepseekV32MTP")
    torch.cuda.is_current_stream_capturing = lambda: False
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    slot_mapping: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """Compute what vLLM's kernel of this name does on GPUs."""
    request = torch.repeat_interleave(query_start_loc.diff().long())
    owner = Owner(TOTAL_CP_RANK, TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE)
    slots = owner.slot_mapping(positions[: len(request)].long(), block_table[request], KV_CACHE_BLOCK_SIZE)
    slot_mapping[: len(request)] = slots
    slot_mapping[len(request) : max_num_tokens] = PAD_ID
