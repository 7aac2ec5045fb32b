"""Random loads of an engine over a model with states, with NaN in all free memory of its cache."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from dcpmla.attention.layers.compressed.cache import CompressedPlan
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.layers import Cache, LayerCache
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.states import StatePool, Worth
from dcpmla.cache.tier import HostTier
from dcpmla.config import DCPConfig
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.support.costs import DrawnCosts
from tests.support.late_disk import late_disk
from tests.support.late_memory import LateMemory
from tests.support.models import VOCAB_SIZE
from tests.support.recorded import RecordedDrafter

MAX_MODEL_LEN = 100
CPU = torch.device("cpu")
Drawn = tuple[list[int], list[int], torch.Tensor]  # a prompt, its new tokens and their logits


@dataclass(frozen=True)
class Load:
    """Limits of an engine, and the times of requests.

    Attributes:
        arrivals: Steps at which requests arrive, ascending.
        aborts: Steps at which a request is aborted.
        num_remembered_states: Number of states beyond max_num_seqs.
        num_spare_tokens: Room beyond the longest request's.
        has_graphs: Whether steps have rows of padding, as graphs do.
        num_host_blocks: Blocks of host memory, with a state for every four; 0 for none. Below is a disk, of which a
            transfer in ten fails.
    """

    seed: int
    arrivals: list[int]
    aborts: set[int]
    max_num_batched_tokens: int
    max_num_seqs: int
    num_remembered_states: int
    num_spare_tokens: int
    has_graphs: bool
    num_host_blocks: int = 0

    @classmethod
    def draw(cls, seed: int, num_requests: int) -> Self:
        """Draw a load in which requests arrive about as fast as the engine serves them."""
        rng = random.Random(seed)
        arrivals = sorted(rng.randrange(3 * num_requests) for _ in range(num_requests))
        aborts = {rng.randrange(4 * num_requests) for _ in range(3)}
        limits = rng.choice([3, 7, 13, 64]), rng.randint(2, 5)
        return cls(seed, arrivals, aborts, *limits, rng.randint(0, 5), rng.randint(0, 23), seed % 2 == 1, seed % 3 * 12)


def draw_requests(model: Any, dcp: DCPConfig, mesh: Any, num_requests: int, output_lens: Sequence[int]) -> list[Drawn]:
    """Draw prompts with shared beginnings, or after an earlier prompt and its answer, and serve each one alone."""
    rng = random.Random(0)
    pieces = [[rng.randrange(1, VOCAB_SIZE - 1) for _ in range(8)] for _ in range(4)]
    beginnings = [sum(rng.choices(pieces, k=4), []) for _ in range(3)]
    drawn: list[Drawn] = []
    for _ in range(num_requests):
        beginning = rng.choice(beginnings)[: rng.randint(0, 32)]
        if drawn and rng.random() < 0.3:
            prompt, tokens, _ = rng.choice(drawn)
            beginning = (prompt + tokens)[:40]
        prompt = beginning + sum(rng.choices(pieces, k=2), [])[: rng.randint(1, 14)]
        alone = Load(0, [0], set(), 1000, 1, 0, 0, False)
        engine = make_engine(model, dcp, mesh, alone, MAX_MODEL_LEN)
        request = engine.add(prompt, SamplingParams(max_new_tokens=rng.choice(output_lens)), keep_logits=True)
        list(engine.run())
        drawn.append((prompt, request.token_ids, torch.stack(request.logits)))
    return drawn


class WatchedPool(StatePool):
    """A pool with a counter of evictions."""

    num_evictions = 0

    def _evict(self, highest: Worth) -> None:
        num_free = len(self._free)
        super()._evict(highest)
        self.num_evictions += len(self._free) - num_free


class WatchedAllocator(BlockAllocator):
    """An allocator with a counter of evictions and a list of new blocks."""

    num_evictions = 0

    def reset(self) -> None:
        super().reset()
        self.states, self.latest = WatchedPool(self._num_states), list[int]()

    def allocate(self, num_blocks: int) -> list[int]:
        num_known = len(self._keys)
        blocks = super().allocate(num_blocks)
        self.num_evictions += num_known - len(self._keys)
        self.latest += blocks
        return blocks


class Poison:
    """NaN in a cache before each step of a model: in free blocks and states unless they are remembered, in new blocks,
    and in the states of requests that begin.

    NaN is copied from one more state than the allocator has.
    """

    def __init__(self, model: Any, cache: Cache, scheduler: Scheduler) -> None:
        self._cache, self._scheduler, self._hidden = cache, scheduler, type(model).hidden.__get__(model)
        for memory in cache.tensors:
            memory.fill_(torch.nan)
        model.hidden = self._run

    def _run(self, *step: Any) -> torch.Tensor:
        allocator: Any = self._scheduler.allocator
        free_blocks = [block for block in allocator._free if block not in allocator._keys]
        block_tokens = allocator.block_tokens
        loaded = {
            block
            for request in self._scheduler.running
            for block in request.block_ids[: request.num_computed_tokens // block_tokens]
        }
        new_blocks = [block for block in allocator.latest if block not in loaded]
        for memory in block_memory(self._cache):
            memory[free_blocks + new_blocks] = torch.nan
        allocator.latest.clear()
        begin = [request.state for request in self._scheduler.running if not request.num_computed_tokens]
        for state in allocator.states._free + begin:
            self._cache.copy_state(allocator.states.num_states, state)
        return self._hidden(*step)


def block_memory(cache: Cache) -> list[torch.Tensor]:
    """Return views of a cache's memory under block ids, [num_blocks, ..] each."""
    plan = cache.sizes
    if not isinstance(plan, CompressedPlan):
        return [memory for layer in cache for memory in latents_of(layer)]
    views = []
    for layer, kind in zip(cache, plan.config.layer_kinds, strict=True):
        if kind.ratio:
            views.append(
                layer.latents[plan.window_rows(kind.ratio) :].view(plan.num_blocks, -1, *layer.latents.shape[1:])
            )
        if layer.index_keys is not None:
            views.append(layer.index_keys)
    return views


def latents_of(layer: Any) -> list[torch.Tensor]:
    """Return the latents and index keys of a layer, nothing for linear attention."""
    return [memory for memory in layer[:2] if memory is not None] if isinstance(layer, LayerCache) else []


def serve(
    model: Any, dcp: DCPConfig, mesh: Any, load: Load, drawn: list[Drawn], num_drafts: int, disk: Path
) -> Counter[str]:
    """Serve a load, compare tokens and logits with a lone request's, and return counts of events."""
    longest = max(len(prompt) + len(tokens) for prompt, tokens, _ in drawn)
    engine = make_engine(model, dcp, mesh, load, longest, drafter_of(drawn, num_drafts), disk)
    requests: list[Request] = []
    num_steps = 0
    while len(requests) < len(drawn) or engine.has_requests:
        while len(requests) < len(drawn) and load.arrivals[len(requests)] <= num_steps:
            prompt, tokens, _ = drawn[len(requests)]
            params = SamplingParams(max_new_tokens=len(tokens))
            requests.append(engine.add(prompt, params, request_id=len(requests), keep_logits=True))
        engine.step()
        num_steps += 1
        if num_steps in load.aborts and requests:
            engine.abort(requests[-1 - num_steps % 3 % len(requests)])
    for request, (_, tokens, logits) in zip(requests, drawn, strict=True):
        num_new = len(request.token_ids) if request.finish_reason == "abort" else len(tokens)
        assert request.token_ids == tokens[:num_new]
        torch.testing.assert_close(request.logits, [*logits[:num_new]], atol=1e-3, rtol=0)
    allocator: Any = engine.allocator
    assert allocator.num_free == allocator.num_blocks
    num_loaded = num_read = 0
    if engine.offload is not None:
        engine.offload.count()
        num_loaded = engine.offload.loaded.blocks
        if engine.offload.disk is not None:
            num_read = engine.offload.disk.loaded.bytes
    engine.close()
    return Counter(
        preemptions=engine.stats.num_preemptions,
        hits=sum(request.num_cached_tokens > 0 for request in requests),
        evicted_blocks=allocator.num_evictions,
        evicted_states=allocator.states.num_evictions,
        aborts=sum(request.finish_reason == "abort" for request in requests),
        accepted_drafts=engine.stats.num_accepted_tokens,
        loaded_blocks=num_loaded,
        read_bytes=num_read,
        rejected_drafts=engine.stats.num_draft_tokens - engine.stats.num_accepted_tokens,
    )


def drafter_of(drawn: list[Drawn], num_drafts: int) -> Drafter | None:
    """Return a drafter with two right drafts of three."""
    recorded: dict[str | int, list[int]] = {index: tokens for index, (_, tokens, _) in enumerate(drawn)}
    return RecordedDrafter(num_drafts, recorded, 0.67, VOCAB_SIZE) if num_drafts else None


def make_engine(
    model: Any,
    dcp: DCPConfig,
    mesh: Any,
    load: Load,
    longest: int,
    drafter: Drafter | None = None,
    disk: Path | None = None,
) -> Engine:
    """Return an engine over a cache with little more room than the longest request needs."""
    num_drafts = 0 if drafter is None else drafter.num_speculative_tokens
    num_states = load.max_num_seqs + load.num_remembered_states
    sizes: CachePlan = model.attention.plan_cache(dcp, [longest], model.dtype, num_states + 1, num_drafts)
    sizes = replace(sizes, num_blocks=sizes.num_blocks + load.num_spare_tokens // sizes.block_tokens)
    cache = sizes.allocate(CPU)
    allocator = WatchedAllocator(sizes.num_blocks, sizes.block_tokens, num_states)
    steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, CPU)
    costs = DrawnCosts(load.seed, absorbs=steps.layout.traits.absorbs_pieces)
    tier = HostTier(load.num_host_blocks, load.num_host_blocks // 4)
    memory = LateMemory(cache) if load.num_host_blocks else None
    if memory is not None:
        memory.allocate(tier.blocks.num_slots, tier.states.num_slots)
        if disk is not None:
            tier.disk = late_disk(disk, 200, load.seed, 2, 0.1, mesh.tp_rank, mesh.tp_group)(memory)
    scheduler = Scheduler(allocator, load.max_num_batched_tokens, load.max_num_seqs, costs=costs, tier=tier)
    Poison(model, cache, scheduler)
    graphs: dict[str, Any] = {}
    if load.has_graphs:
        limits = load.max_num_seqs, MAX_MODEL_LEN
        graphs["graph"] = StepGraph.decodes(model.decode, torch.tensor(0), cache, steps, mesh, *limits, 1 + num_drafts)
        sizes_of = load.max_num_batched_tokens, *limits, costs.tokens_per_request
        graphs["mixed_graph"] = StepGraph.prompts(model, cache, steps, mesh, *sizes_of)
    return Engine(model, cache, dcp, mesh, scheduler, MAX_MODEL_LEN, drafter=drafter, memory=memory, **graphs)
