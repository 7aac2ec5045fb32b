"""vLLM's scheduler for DeepSeek-V4 with prefix caching: a request continues where its blocks and a state are known."""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dcpmla.integrations.vllm.compressed.remembered import RememberedStates, StateCopies, num_remembered


def make_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """Return the scheduler for a job's options, which vLLM settles after it has chosen the class."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_AsyncStateScheduler if is_async else _StateScheduler)(vllm_config=vllm_config, **options)


class _States(Scheduler):
    """The part of both schedulers that remembers states.

    Each step's output has an attribute `state_copies`, which the worker carries out (`hooks`).
    """

    def __init__(self, *, vllm_config: Any, **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, **options)
        manager = self.kv_cache_manager
        self._remembered = RememberedStates(num_remembered(vllm_config), manager.coordinator.block_size)
        self._found = dict[str, int]()  # id of a request -> blocks that it can reuse
        self._look_up = manager.get_computed_blocks
        manager.get_computed_blocks = self._computed_blocks
        self.need_mamba_block_aligned_split = True

    def _computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, int, int]:
        """Return the blocks that a request can reuse up to a remembered state, their tokens, and the tokens of all
        known blocks, where it parts from another request; 0 if those are no more.
        """
        blocks, num_tokens, _ = self._look_up(request, max_cache_hit_length)
        (known,) = blocks.blocks
        num_blocks = self._remembered.find(request.block_hashes, len(known))
        self._found[request.request_id] = num_blocks
        if num_blocks == len(known):
            return blocks, num_tokens, 0
        return KVCacheBlocks((known[:num_blocks],)), num_blocks * self._remembered.block_tokens, num_tokens

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return how many tokens to compute: vLLM asks for this where a model has states."""
        return self._remembered.next_stop(
            request, request.num_computed_tokens + num_new_local_computed_tokens, num_new_tokens
        )

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Add the copies of states to a step."""
        for request_id in scheduler_output.finished_req_ids:
            self._remembered.forget_request(request_id)
        copies = StateCopies({}, {})
        for added in scheduler_output.scheduled_new_reqs:
            if num_blocks := self._found.get(added.req_id, 0):
                copies.before[added.req_id] = self._remembered.restore(self.requests[added.req_id], num_blocks)
        self._found.clear()
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            if self.num_spec_tokens and start + num_tokens > request.num_prompt_tokens:
                continue  # rejected drafts may end it elsewhere
            state = self._remembered.remember(request, start, start + num_tokens)
            if state is not None:
                copies.after[request_id] = state
        scheduler_output.state_copies = copies
        super()._update_after_schedule(scheduler_output)

    def reset_prefix_cache(self, *args: Any, **options: Any) -> bool:
        """Forget the states with the blocks."""
        is_reset = super().reset_prefix_cache(*args, **options)
        if is_reset:
            self._remembered.clear()
        return is_reset


class _StateScheduler(_States):
    pass


class _AsyncStateScheduler(_States, AsyncScheduler):
    pass
