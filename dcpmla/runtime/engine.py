"""The engine: a batch of requests -> chunked prefill -> decode steps over the whole batch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.metadata import StepMetadata
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.latent import LatentCache, num_blocks
from dcpmla.config import DCPConfig
from dcpmla.ownership import local_seq_lens
from dcpmla.parallel.collectives import named
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import sample
from dcpmla.runtime.scheduler import schedule


class Model(Protocol):
    """What the engine drives; `dcpmla.integrations.transformers.ShardedModel` is one."""

    device: torch.device
    eos_token_ids: frozenset[int]

    def step(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache, logits_at: Tensor) -> Tensor: ...


@dataclass
class Stats:
    """Tokens and seconds of a run; prefill is every step with a prompt's tokens in it."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Engine:
    """Drives one batch at a time; every rank of the TP group runs the same engine on the same requests.

    Args:
        cache: with room for all requests of a batch at once.
        max_num_batched_tokens: most tokens of one prefill step.
    Raises:
        ValueError: max_num_batched_tokens below 1.
    """

    def __init__(self, model: Model, cache: LatentCache, dcp: DCPConfig, mesh: DCPMesh, max_num_batched_tokens: int) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens (--max-num-batched-tokens) is {max_num_batched_tokens}; it must be at least 1")
        self.model, self.cache, self.dcp, self.mesh = model, cache, dcp, mesh
        self.max_num_batched_tokens = max_num_batched_tokens
        self.allocator = BlockAllocator(cache.sizes.num_blocks)
        self.stats = Stats()

    def generate(
        self, requests: Sequence[Request], keep_logits: bool = False, on_prefill: Callable[[int], None] = lambda num_tokens: None
    ) -> None:
        """Run requests to their end, in place. Collective over the TP group.

        Args:
            keep_logits: store the logits of each new token in its request.
            on_prefill: called after each prefill step with its number of tokens.
        Raises:
            ValueError: the batch does not fit into the cache.
        """
        try:
            for request in requests:
                request.block_ids = self.allocator.allocate(num_blocks(request.max_seq_len, self.dcp))
            while step := schedule(requests, self.max_num_batched_tokens):
                self._timed_step(step, keep_logits, on_prefill)
        finally:
            for request in requests:
                self.allocator.free(request.block_ids)
                request.block_ids = []

    def _timed_step(self, step: Sequence[tuple[Request, int]], keep_logits: bool, on_prefill: Callable[[int], None]) -> None:
        started, is_prefill = time.perf_counter(), not step[-1][0].token_ids
        self._step(step, keep_logits)
        num_tokens, seconds = sum(num for _, num in step), time.perf_counter() - started
        if is_prefill:
            self.stats.num_prefill_tokens += num_tokens
            self.stats.prefill_seconds += seconds
            on_prefill(num_tokens)
        else:
            self.stats.num_decode_tokens += num_tokens
            self.stats.decode_seconds += seconds

    def kv_tokens_per_rank(self, requests: Sequence[Request]) -> list[int]:
        """Tokens that each TP rank cached for requests."""
        size, interleave = self.dcp.decode_context_parallel_size, self.dcp.cp_kv_cache_interleave_size
        lens = torch.tensor([request.num_computed_tokens for request in requests])
        per_dcp_rank = local_seq_lens(lens, size, interleave=interleave).sum(0).tolist()
        return [per_dcp_rank[tp_rank % size] for tp_rank in range(self.mesh.tp_size)]

    def _step(self, step: Sequence[tuple[Request, int]], keep_logits: bool) -> None:
        """Compute a step's tokens; requests that have all theirs computed get a new one."""
        token_ids = [token for request, num_tokens in step for token in request.pending(num_tokens)]
        metadata = StepMetadata.build(
            query_lens=[num_tokens for _, num_tokens in step],
            seq_lens=[request.num_computed_tokens + num_tokens for request, num_tokens in step],
            block_tables=[request.block_ids for request, _ in step],
            dcp=self.dcp,
            dcp_rank=self.mesh.dcp_rank,
            device=self.model.device,
        )
        last_rows = torch.tensor([num_tokens for _, num_tokens in step]).cumsum(0) - 1
        ready = [index for index, (request, num_tokens) in enumerate(step) if request.num_pending_tokens == num_tokens]
        device = self.model.device
        logits = self.model.step(torch.tensor(token_ids, device=device), metadata, self.cache, last_rows[ready].to(device))
        for request, num_tokens in step:
            request.num_computed_tokens += num_tokens
        self._append([step[index][0] for index in ready], logits, keep_logits)

    def _append(self, requests: Sequence[Request], logits: Tensor, keep_logits: bool) -> None:
        """Sample a token for each request; the first rank's choice is everyone's."""
        if not requests:
            return
        tokens = sample(logits, [request.temperature for request in requests], [request.generator for request in requests])
        if self.mesh.tp_size > 1:
            with named("broadcast of new tokens", self.mesh.tp_group):
                dist.broadcast(tokens, group=self.mesh.tp_group, group_src=0)
        for request, row, token in zip(requests, logits, tokens.tolist(), strict=True):
            if keep_logits:
                request.logits.append(row.cpu())
            request.append(token, self.model.eos_token_ids)
