"""Requests over caches that simulated ranks share, for attention in a fixed order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dcpmla import DCPConfig
from dcpmla.attention.backends.calls import DecodeCall, split_queries
from dcpmla.attention.mla.decode import run_call
from dcpmla.attention.mla.deterministic import round_latents
from dcpmla.attention.mla.prefill import dcp_mla_prefill
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.formats import row_width, storage_dtype, write_latents
from dcpmla.cache.latent import num_blocks
from dcpmla.comm.nccl import merge_rows
from dcpmla.ownership import NUM_TILE_LANES
from tests.support.layouts import dcp_config
from tests.support.sharded_context import AllRanks

Batch = Sequence[tuple[int, int, int]]  # seed, tokens after the step, new tokens of each request
Run = Callable[[DecodeCall], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, its dtype and its device.

    Attributes:
        input_dtype: Dtype that inputs are rounded to before they have `dtype`; None for `dtype`.
    """

    num_heads: int = 3
    latent: int = 32
    rope: int = 16
    nope: int = 8
    value: int = 8
    dtype: torch.dtype = torch.float32
    cache_format: str = "auto"
    device: str = "cpu"
    input_dtype: torch.dtype | None = None

    def rows(self, seed: int, num_rows: int, *shape: int, first: int = 0) -> Tensor:
        """Draw rows [first, num_rows) of a seed; fewer rows are the first of more."""
        rows = []
        for block in range(first // 64, -(-num_rows // 64)):
            generator = torch.Generator().manual_seed(seed << 20 | block)
            rows.append(torch.randn(64, *shape, generator=generator))
        drawn = torch.cat(rows)[first % 64 :][: num_rows - first]
        return drawn.to(self.device, self.input_dtype or self.dtype).to(self.dtype)

    @property
    def softmax_scale(self) -> float:
        return (self.latent + self.rope) ** -0.5


def layout(size: int, sizes: Sizes, **options: Any) -> DCPConfig:
    return dcp_config(size, size, 64, block_size=64, deterministic=True, kv_cache_dtype=sizes.cache_format, **options)


def share_caches(
    sizes: Sizes, dcp: DCPConfig, batch: Batch, num_decodes: int, max_query_len: int = 1
) -> list[tuple[Tensor, StepMetadata]]:
    """Return each rank's cache, filled with all tokens of the batch, and its step of the last ones."""
    size = dcp.decode_context_parallel_size
    lens, new = [length for _, length, _ in batch], [num for _, _, num in batch]
    blocks = iter(torch.randperm(sum(num_blocks(each, dcp) for each in lens)).tolist())
    tables = [[next(blocks) for _ in range(num_blocks(each, dcp))] for each in lens]
    # Quantized on the CPU: on a GPU torch multiplies by a number's inverse instead of dividing, and rounds differently.
    latents = torch.cat([sizes.rows(seed, length, sizes.latent + sizes.rope) for seed, length, _ in batch]).cpu()
    storage = storage_dtype(sizes.cache_format, sizes.dtype)
    width = row_width(storage, sizes.latent, sizes.rope)
    ranks = []
    for rank in range(size):
        steps = StepBuilder(dcp, rank, sizes.device)
        numbers = sum(map(len, tables)), dcp.block_size, width
        # The bytes of unwritten slots are NaN in most formats.
        cache = torch.full((*numbers[:2], width * storage.itemsize), 255, dtype=torch.uint8)
        cache = cache.view(storage)
        slots = steps.build(StepRequests(lens, lens, tables), num_decodes=0).tokens.slots.cpu()
        kv_scale = torch.ones(1) if sizes.cache_format == "fp8" else None
        write_latents(cache, latents[:, : sizes.latent], latents[:, sizes.latent :], slots, kv_scale)
        ranks.append((cache.to(sizes.device), steps.build(StepRequests(new, lens, tables), max_query_len, num_decodes)))
    return ranks


def queries(sizes: Sizes, batch: Batch, width: int) -> Tensor:
    """Return the queries [T, H, width] of the new tokens, by their positions."""
    shape = sizes.num_heads, width
    return torch.cat([sizes.rows(seed + 1000, length, *shape, first=length - new) for seed, length, new in batch])


def decode_call(sizes: Sizes, size: int, q: Tensor, cache: Tensor, decode: DecodeMetadata) -> DecodeCall:
    kv_scale = torch.ones(1, device=sizes.device) if sizes.cache_format == "fp8" else None
    return DecodeCall(
        *split_queries(q, sizes.latent),
        cache,
        decode.block_table,
        decode.local_seq_lens,
        sizes.softmax_scale,
        sizes.latent,
        request_index=decode.request_index,
        query_start_loc=decode.query_start_loc,
        max_query_len=decode.max_query_len,
        kv_scale=kv_scale,
        num_tile_lanes=NUM_TILE_LANES // size,
    ).checked()


def decode(
    sizes: Sizes,
    size: int,
    batch: Batch,
    max_query_len: int = 1,
    run: Run = lambda call: run_call(call, None),
) -> list[tuple[Tensor, Tensor]]:
    """Return out and lse of each request's new tokens, which attend with absorbed queries on simulated ranks.

    Several ranks' rows are merged as the exchange `a2a` does: on a GPU by a kernel, which rounds as the merge within a
    rank does. torch's exponential rounds differently.
    """
    q = queries(sizes, batch, sizes.latent + sizes.rope)
    parts = []
    for cache, step in share_caches(sizes, layout(size, sizes), batch, len(batch), max_query_len):
        assert step.decode is not None
        parts.append(run(decode_call(sizes, size, q, cache, step.decode)))
    out, lse = parts[0]
    if size > 1:
        out, lse = merge_rows(*map(torch.stack, zip(*parts, strict=True)))
    new = [num for _, _, num in batch]
    return list(zip(out.split(new), lse.split(new), strict=True))


def prefill(sizes: Sizes, size: int, batch: Batch, workspace: int = 1 << 16) -> list[Tensor]:
    """Return the output of each request's new tokens, which attend by MHA over simulated ranks.

    Keys and values have a standard deviation of 1. With larger keys the softmax would choose a single key, and rounding
    would decide between keys.
    """
    w_kv_b = sizes.rows(5, sizes.num_heads * (sizes.nope + sizes.value), sizes.latent).float() * sizes.latent**-0.5

    def project(kv_c: Tensor) -> Tensor:
        """Project row by row, so that rows do not depend on each other."""
        return torch.stack([(row.float() * w_kv_b).sum(-1) for row in kv_c]).to(sizes.dtype)

    dcp = layout(size, sizes, context_workspace_tokens=workspace)
    shared = share_caches(sizes, dcp, batch, 0)
    q = queries(sizes, batch, sizes.nope + sizes.rope)
    prefill = shared[0][1].prefill
    widths = sizes.latent, sizes.rope
    kv_scale = torch.ones(1, device=sizes.device) if sizes.cache_format == "fp8" else None
    exchange = AllRanks(*zip(*shared, strict=True))
    if prefill.context_chunks:
        latents = q.new_full((len(q), sum(widths)), torch.nan)  # not read
    else:
        latents = torch.cat([sizes.rows(seed, new, sum(widths)) for seed, _, new in batch])
        if sizes.cache_format != "auto":
            latents = round_latents(latents, sizes.latent, shared[0][0].dtype, kv_scale)
    rows = q, *latents.split(widths, -1), shared[0][0]
    out, _ = dcp_mla_prefill(*rows, project, prefill, sizes.softmax_scale, exchange, kv_scale)
    return list(out.split([num for _, _, num in batch]))


def alone(batch: Batch) -> list[Batch]:
    """Return each new token of a batch as a batch of its own."""
    return [[(seed, length - new + 1 + index, 1)] for seed, length, new in batch for index in range(new)]


def in_float32(sizes: Sizes) -> Sizes:
    """Return sizes with which a CPU computes in float32 from the same inputs."""
    return replace(sizes, device="cpu", dtype=torch.float32, input_dtype=sizes.dtype)


def in_float64(sizes: Sizes) -> Sizes:
    return replace(sizes, dtype=torch.float64)
