"""Decode steps whose selections have a share of hot rows that is asked for (docs/hot_tokens.md), whatever an indexer
would select.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcpmla.attention.select.candidates import pack_candidates
from dcpmla.attention.select.indexer import Indexer
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.attention.select.topk import choose_tokens
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.bench.results import Row
from dcpmla.bench.step_times import block_tables, step_times
from dcpmla.bench.timing import largest
from dcpmla.cache.hot import fetch_hot_rows
from dcpmla.cache.layers import Cache, LayerCache
from dcpmla.config import DCPConfig
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.parallel.mesh import DCPMesh

GENERATOR = "sliding"
_MAX_SELECTIONS = 512  # no measurement has as many steps


class SlidingSelections:
    """Selections of one decode step after the other: a share of each is selected in every step, the rest in none of the
    steps before.

    The positions of a request are shuffled. The first ones are selected in every step, and the following ones slide
    through the rest of the context, so a rank owns a W-th of both on average. They begin again only at the end of the
    context, or after 512 steps. All layers select the same. The newest token is left out: each step writes its row,
    which is never hot then.

    Args:
        layout: Cache of the requests, one token of each.
        context: Tokens of each request.
        topk: Tokens that each token selects, fewer than context.
        hit_rate: Share of the tokens that are selected in every step.
    Attributes:
        slots: Slots of each selection on this rank [num_selections, requests, topk] int32.
        num_slots: Number of slots of each request in each selection [num_selections, requests] int32.
    """

    def __init__(self, layout: SlotLayout, context: int, topk: int, hit_rate: float) -> None:
        num_tokens, device = len(layout.request), layout.request.device
        num_new = round(topk * (1 - hit_rate))
        generator = torch.Generator().manual_seed(0)  # so that all ranks draw the same
        order = torch.stack([torch.randperm(context - 1, generator=generator) for _ in range(num_tokens)])
        kept, rest = order.to(device).tensor_split((topk - num_new,), 1)
        num_selections = min(_MAX_SELECTIONS, rest.shape[1] // num_new) if num_new else 1
        new: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.slots = torch.empty(num_selections, num_tokens, topk, **new)
        self.num_slots = torch.empty(num_selections, num_tokens, **new)
        # Attention reads one, and indexers write the other, which nothing reads.
        self._read, self._written = (SelectedTokens.empty(num_tokens, topk, device) for _ in range(2))
        for number in range(num_selections):
            positions = torch.cat([kept, rest[:, number * num_new : (number + 1) * num_new]], 1)
            candidates = pack_candidates(torch.zeros(1, device=device), positions)
            selection = self._written._replace(slots=self.slots[number], num_slots=self.num_slots[number])
            choose_tokens(candidates, layout, selection)  # of as many candidates as are chosen
        self._number = torch.zeros(1, dtype=torch.int64, device=device)

    @contextmanager
    def replacing(self, decoder: nn.Module) -> Iterator[None]:
        """Let the attention of a decoder read the next selection in each step of a block. Its indexers run as without.

        Steps may be captured in CUDA graphs, since the number of the selection is on the device.
        """

        def before_step(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            token_ids, step, cache = args
            index = self._number.add_(1) % len(self.slots)
            torch.index_select(self.slots, 0, index, out=self._read.slots[None])
            torch.index_select(self.num_slots, 0, index, out=self._read.num_slots[None])
            return token_ids, _selecting(step, self._read), cache

        def before_indexer(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            *inputs, step = args
            return *inputs, _selecting(step, self._written)

        indexers = [module for module in decoder.modules() if isinstance(module, Indexer)]
        hooks = [decoder.register_forward_pre_hook(before_step)]
        hooks += [indexer.register_forward_pre_hook(before_indexer) for indexer in indexers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def settle(self, layers: Iterable[LayerCache], num_used: int) -> None:
        """Fill each layer's hot set, as many steps would: with rows of other requests, if the cache has any, and with
        the rows of the first selection.

        Args:
            layers: Caches of layers whose latents are in host memory.
            num_used: Number of a cache's slots, the first ones, that belong to the requests.
        """
        topk = self.slots.shape[2]
        for layer in layers:
            hot = layer.hot
            assert hot is not None
            for memory in (hot.row_of, hot.slot_of, hot.last_used):
                memory.zero_()
            num_others = min(len(hot.row_of) - num_used, len(hot.slot_of)) // topk
            others = num_used + torch.arange(num_others * topk, dtype=torch.int32, device=self.slots.device)
            others = others.view(num_others, topk)
            pairs = (others, torch.full_like(others[:, 0], topk)), (self.slots[0], self.num_slots[0])
            for slots, num_slots in pairs:
                for part, numbers in zip(slots.split(hot.max_tokens), num_slots.split(hot.max_tokens), strict=True):
                    fetch_hot_rows(hot, layer.latents, part, numbers)


def _selecting(step: StepMetadata, selection: SelectedTokens) -> StepMetadata:
    """Return the step with other memory for its selection."""
    sparse = step.get(SparseMetadata)
    assert sparse is not None
    return step.sharing(replace(sparse, selection=selection))


@torch.inference_mode()
def sliding_step_times(
    model: ShardedModel, cache: Cache, dcp: DCPConfig, mesh: DCPMesh, batch: int, context: int, hit_rate: float
) -> Row:
    """Time decode steps with selections of a rate of hits (`step_times`). Collective over the job.

    Args:
        cache: Cache with room for the requests, with latents in host memory or without.
        dcp: Layout of that cache.
        hit_rate: Share of the selected rows that was selected in the step before.
    Returns:
        Fields of a row; with latents in host memory also `counted_hit_rate`, of all ranks together by the counts of
        the timed steps, `fetched_bytes`, of all layers in a step on the rank with most, and `num_hot_rows`.
    """
    tables = torch.tensor(block_tables(cache.sizes, batch, context), dtype=torch.int32, device=model.device)
    request = torch.arange(batch, dtype=torch.int32, device=model.device)
    layout = SlotLayout(tables, request, dcp.block_size, dcp.owner(mesh.dcp_rank))
    topk = model.attention.layers[0].num_selected
    assert topk is not None
    selections = SlidingSelections(layout, context, topk, hit_rate)
    hot, counts = cache[0].hot, cache.hot_counts
    if counts is not None:
        selections.settle(cache, tables.numel() * dcp.block_size)
        before = counts.clone()
    with selections.replacing(model.hidden_states):
        times = step_times(model, cache, dcp, mesh, batch, context)
    if hot is None or counts is None:
        return times
    _, num_hits, num_misses, _ = (counts - before).unbind(1)
    totals = torch.stack([num_hits.sum(), num_misses.sum()])
    dist.all_reduce(totals)
    num_fetched = float((num_misses / (num_hits + num_misses)).sum() * selections.num_slots.sum(1).double().mean())
    fetched_bytes = largest(num_fetched * hot.pool.shape[-1] * hot.pool.itemsize, model.device)
    counted = {"counted_hit_rate": round(float(totals[0] / totals.sum()), 4), "fetched_bytes": round(fetched_bytes)}
    return counted | {"num_hot_rows": len(hot.slot_of)} | times
