"""The memory of windows and sums in vLLM's plan of its memory: hooks around two methods of its worker's."""

from dataclasses import replace
from functools import cache, wraps
from typing import Any

from dcpmla.integrations.vllm.compressed.names import GPUModelRunner, Worker


@cache
def plan_memory() -> None:
    """Make this process's worker leave room for what the cache of such a model has besides pages, and allocate it with
    them. Later calls do nothing.
    """
    determine, initialize = Worker.determine_available_memory, GPUModelRunner.initialize_kv_cache

    @wraps(determine)
    def determine_available_memory(worker: Any) -> int:
        stack = _stack_of(worker.model_runner)
        available = int(determine(worker))
        return available if stack is None else available - stack.fixed_bytes

    @wraps(initialize)
    def initialize_kv_cache(runner: Any, kv_cache_config: Any, *args: Any, **options: Any) -> None:
        stack = _stack_of(runner)
        if stack is not None:
            size = stack.plan(kv_cache_config.num_blocks).bytes_carved
            tensors = [replace(tensor, size=size) for tensor in kv_cache_config.kv_cache_tensors]
            kv_cache_config = replace(kv_cache_config, kv_cache_tensors=tensors)
        initialize(runner, kv_cache_config, *args, **options)

    Worker.determine_available_memory, GPUModelRunner.initialize_kv_cache = (
        determine_available_memory,
        initialize_kv_cache,
    )


def _stack_of(runner: Any) -> Any:
    """Return the attention layers of a runner's model; None of another model."""
    return getattr(runner.get_model(), "attention_stack", None)
