"""The memory of windows and sums in vLLM's plan of its memory: hooks around two methods of its worker."""

from dataclasses import replace
from functools import cache, wraps
from typing import Any

from dcpmla.integrations.vllm.compressed.names import Worker


@cache
def plan_memory() -> None:
    """Make this process's worker leave room for what the cache of such a model has besides pages, and allocate it with
    them. Later calls do nothing.
    """
    determine, initialize = Worker.determine_available_memory, Worker.initialize_from_config

    @wraps(determine)
    def determine_available_memory(worker: Any) -> int:
        stack = stack_of(worker)
        fixed = 0 if stack is None else stack.fixed_bytes
        return int(determine(worker)) - fixed

    @wraps(initialize)
    def initialize_from_config(worker: Any, kv_cache_config: Any) -> None:
        stack = stack_of(worker)
        if stack is not None:
            size = stack.memory_bytes(kv_cache_config.num_blocks)
            tensors = [replace(tensor, size=size) for tensor in kv_cache_config.kv_cache_tensors]
            kv_cache_config = replace(kv_cache_config, kv_cache_tensors=tensors)
        initialize(worker, kv_cache_config)

    Worker.determine_available_memory = determine_available_memory
    Worker.initialize_from_config = initialize_from_config


def stack_of(worker: Any) -> Any:
    """Return the attention layers of a worker's model; None of another model."""
    return getattr(worker.model_runner.get_model(), "attention_stack", None)
