"""Contexts that vLLM takes as cached though nothing has computed them (`vllm_engine.py`).

vLLM's own connector for benchmarks does the same, but it is an option of the engine, which this package's attention for
DeepSeek-V4 refuses, and it fills blocks of the layer that declares the pages, not this package's tensors in them.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

# Bytes in this range are positive numbers below 2 as e4m3, bfloat16 and float32: caches of bytes hold all three.
# Scores of zeros would tie in a selection.
CACHED_BYTES = 0x30, 0x40


class Contexts(KVConnectorBase_V1, SupportsHMA):
    """A connector of vLLM's scheduler that loads nothing: it takes all but the last tokens of a prompt as cached.

    Attributes:
        num_new: Tokens of a prompt that are to be computed.
    """

    def __init__(self, engine: Any) -> None:
        # The base's constructor asks for options that no engine has.
        (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
        self.num_new, self._caches = 1, [cache for cache in runner.kv_caches if cache.numel()]
        engine.engine_core.engine_core.scheduler.connector = self
        if runner.kv_block_zeroer is not None:
            # vLLM zeroes new blocks if caches have several dtypes.
            runner.kv_block_zeroer.zero_block_ids = lambda blocks: None

    @torch.inference_mode()  # vLLM allocates caches in this mode
    def fill(self) -> None:
        """Fill all caches with random numbers. No request may run."""
        if all(cache.is_floating_point() for cache in self._caches):
            for cache in self._caches:
                cache.normal_()
            return
        # Layers share memory, whatever their dtypes.
        for memory in {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in self._caches}.values():
            whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
            for part in whole.split(1 << 30):
                part.random_(*CACHED_BYTES)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens of a prompt are cached besides the engine's own, and that no step waits for them."""
        return max(0, request.num_tokens - num_computed_tokens - self.num_new), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing: blocks hold numbers already."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return nothing that a worker would load; workers have no connector."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Return that a request's blocks are free at once."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Raise, as do the other parts of a worker's connector."""
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv
