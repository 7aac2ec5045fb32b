"""A batch of requests through layers of one rank: what each has cached as one step, then the batch as another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dcpmla import DCPConfig, LatentCache, StepMetadata
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.latent import num_blocks

Batch = Sequence[tuple[int, int]]  # (tokens cached before the step, new tokens) of each request


def run_batch(
    layers: Sequence[Any],
    dcp: DCPConfig,
    batch: Batch,
    hidden: Sequence[Tensor],
    cos_sin: Tensor | None,
    padding: int = 0,
    max_decode_query_len: int = 1,
    num_decodes: int | None = None,
    prepare: Callable[[StepMetadata], StepMetadata] = lambda step: step,
) -> tuple[list[Tensor], StepMetadata]:
    """Return each layer's output of the new tokens and padding, and the step, which all layers see alike.

    Caches hold NaN, in every format, wherever no token is. Their blocks are all over them.

    Args:
        hidden: Hidden states of each request [cached + new, hidden_size].
        cos_sin: Angles by position; None for a model without positions.
        padding: Rows of NaN after the new tokens.
        prepare: A function that adds to a step what the layers need besides.
    """
    device, dtype, width = hidden[0].device, hidden[0].dtype, hidden[0].shape[1]
    total = [cached + new for cached, new in batch]
    index_layers = [number for number, layer in enumerate(layers) if layer.indexer is not None]
    plan = LatentCache.plan(layers[0].config, dcp, len(layers), total, dtype, index_layers)
    cache = LatentCache(plan, device)
    for memory in cache.tensors:
        memory.view(torch.uint8).fill_(0xFF)
    blocks = iter(range(plan.num_blocks - 1, -1, -1))
    tables = [[next(blocks) for _ in range(num_blocks(length, dcp))] for length in total]
    steps = StepBuilder(dcp, layers[0].mesh.dcp_rank, device)

    def run_step(
        requests: list[int], query_lens: list[int], seq_lens: list[int], padding: int, num_decodes: int | None
    ) -> tuple[list[Tensor], StepMetadata]:
        numbers = StepRequests(query_lens, seq_lens, [tables[i] for i in requests])
        step = steps.build(numbers, max_decode_query_len, num_decodes)
        step = prepare(step.with_cos_sin(None if cos_sin is None else cos_sin[step.tokens.positions]))
        rows = [hidden[i][seq - new : seq] for i, new, seq in zip(requests, query_lens, seq_lens, strict=True)]
        rows.append(torch.full((padding, width), torch.nan, dtype=dtype, device=device))
        return [layer(torch.cat(rows), memory, step) for layer, memory in zip(layers, cache, strict=True)], step

    filled = [i for i, (cached, _) in enumerate(batch) if cached]
    cached = [batch[i][0] for i in filled]
    run_step(filled, cached, cached, 0, None)
    return run_step(list(range(len(batch))), [new for _, new in batch], total, padding, num_decodes)
