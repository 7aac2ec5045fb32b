"""Hooks around methods of vLLM's workers: the memory of windows and sums in vLLM's plan, their copies, and drafts."""

from dataclasses import replace
from functools import cache, wraps
from typing import Any

from dcpmla.integrations.vllm.compressed.names import DraftModelSpeculator, GPUModelRunner, Worker


@cache
def install() -> None:
    """Make this process's worker leave room for what the cache of such a model has besides pages, allocate it with
    them, copy the states that its scheduler remembers, and build metadata of drafts. Later calls do nothing.
    """
    determine, initialize = Worker.determine_available_memory, GPUModelRunner.initialize_kv_cache
    add, set_attention = GPUModelRunner.add_requests, DraftModelSpeculator.set_attn

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

    @wraps(add)
    def add_requests(runner: Any, scheduler_output: Any) -> None:
        add(runner, scheduler_output)
        copies, stack = getattr(scheduler_output, "state_copies", None), _stack_of(runner)
        if stack is not None and copies is not None:
            stack.copy_states(copies, runner.req_states.req_id_to_index)

    @wraps(set_attention)
    def set_attn(speculator: Any, *args: Any, **options: Any) -> None:
        # Layers of drafts declare no pages, so vLLM would build no metadata for the drafts after the first one.
        context = speculator.vllm_config.compilation_config.static_forward_context
        names = speculator.draft_attn_layer_names
        stack = next((context[name].stack for name in names if hasattr(context[name], "stack")), None)
        if stack is None:
            set_attention(speculator, *args, **options)
            return
        speculator.draft_attn_layer_names = names | {stack.leader.prefix}
        set_attention(speculator, *args, **options)
        speculator.draft_attn_layer_names = names
        for group in (group for groups in speculator.attn_groups for group in groups):
            for builder in group.metadata_builders:
                builder.layers = stack.draft_layers

    Worker.determine_available_memory, GPUModelRunner.initialize_kv_cache = (
        determine_available_memory,
        initialize_kv_cache,
    )
    GPUModelRunner.add_requests, DraftModelSpeculator.set_attn = add_requests, set_attn


def _stack_of(runner: Any) -> Any:
    """Return the attention layers of a runner's model; None of another model."""
    return getattr(runner.get_model(), "attention_stack", None)
