"""Triton kernels before the products of many routes: a counting sort into blocks of one expert each."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of routes that a program reads at a time: each size of step that has another is compiled again.
_CHUNKS = (256, 1024, 4096)
_SPAN = tl.constexpr(4 * _CHUNKS[-1])  # routes of a program


@triton.jit(do_not_specialize=["num_routes"])
def count_kernel(ids_ptr, counts_ptr, num_routes, CHUNK: tl.constexpr):
    """Count the routes of a span to an expert, one program per (expert, span)."""
    expert, span = tl.program_id(0), tl.program_id(1)
    count = tl.zeros([CHUNK], tl.int32)
    for first in range(span * _SPAN, tl.minimum((span + 1) * _SPAN, num_routes), CHUNK):
        route = first + tl.arange(0, CHUNK)
        count += (tl.load(ids_ptr + route, mask=route < num_routes, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert * tl.num_programs(1) + span, tl.sum(count))


@triton.jit(do_not_specialize=["num_routes", "max_blocks"])
def assign_kernel(
    ids_ptr,
    counts_ptr,
    experts_ptr,
    routes_ptr,
    num_blocks_ptr,
    num_routes,
    num_experts,
    max_blocks,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    SPANS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a span's routes to an expert, one program per (expert, span). Programs of the id num_experts mark the
    unused blocks. Without counts there is one chunk, which each program counts itself.
    """
    expert, span, num_spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    other, spans = tl.arange(0, BINS)[:, None], tl.arange(0, SPANS)[None, :]
    if counts_ptr is None:
        route = tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + route, mask=route < num_routes, other=-1)
        is_held = (ids >= 0) & (ids < num_experts)
        counts = tl.histogram(tl.where(is_held, ids, 0), BINS, mask=is_held)[:, None]
    else:
        counts_ptrs = counts_ptr + other * num_spans + spans
        counts = tl.load(counts_ptrs, mask=(other < num_experts) & (spans < num_spans), other=0)
    num_before = tl.sum(tl.where((other == expert) & (spans < span), counts, 0))
    num_blocks = (tl.sum(counts, 1) + ROWS - 1) // ROWS
    start = tl.sum(tl.where(tl.arange(0, BINS) < expert, num_blocks, 0))
    end = start + tl.sum(tl.where(tl.arange(0, BINS) == expert, num_blocks, 0))
    is_last = expert == num_experts
    if span == 0:
        for first in range(start, tl.where(is_last, max_blocks, end), CHUNK):
            block = first + tl.arange(0, CHUNK)
            mask = block < tl.where(is_last, max_blocks, end)
            tl.store(experts_ptr + block, tl.where(is_last, -1, expert), mask=mask)
    if is_last:
        tl.store(num_blocks_ptr, start)
        return
    next_row = start * ROWS + num_before
    for first in range(span * _SPAN, tl.minimum((span + 1) * _SPAN, num_routes), CHUNK):
        route = first + tl.arange(0, CHUNK)
        is_own = (tl.load(ids_ptr + route, mask=route < num_routes, other=-1) == expert).to(tl.int32)
        tl.store(routes_ptr + next_row + tl.cumsum(is_own, 0) - 1, route, mask=is_own == 1)
        next_row += tl.sum(is_own)
    padding = next_row + tl.arange(0, ROWS)
    tl.store(routes_ptr + padding, -1, mask=padding < tl.where(span == num_spans - 1, end * ROWS, 0))


class Blocks(NamedTuple):
    """Routes in blocks of one expert each, with enough blocks for any ids.

    Attributes:
        experts: int32 [blocks], an expert's blocks side by side, -1 for unused blocks, after all others.
        routes: int32 [blocks, rows], ascending within an expert, -1 where a block has fewer.
        number: int32 [1], number of used blocks.
    """

    experts: Tensor
    routes: Tensor
    number: Tensor


def assign_blocks(expert_ids: Tensor, num_experts: int, rows: int) -> Blocks:
    """Sort routes into blocks of up to `rows`.

    Args:
        expert_ids: int32 [T, k], contiguous; ids outside [0, num_experts) are in no block.
    """
    num_routes = expert_ids.numel()
    max_blocks = num_routes // rows + min(num_experts, num_routes)
    num_spans = triton.cdiv(num_routes, _SPAN.value)
    experts, routes, number = (
        torch.empty(shape, dtype=torch.int32, device=expert_ids.device) for shape in (max_blocks, (max_blocks, rows), 1)
    )
    chunk = next((chunk for chunk in _CHUNKS if num_routes <= chunk), _CHUNKS[-1])
    sizes, counts = {"CHUNK": chunk, "num_warps": 8 if chunk == _CHUNKS[-1] else 4}, None
    if chunk == _CHUNKS[-1]:
        counts = torch.empty(num_experts, num_spans, dtype=torch.int32, device=expert_ids.device)
        count_kernel[(num_experts, num_spans)](expert_ids, counts, num_routes, **sizes)
    assign_kernel[(num_experts + 1, num_spans)](
        expert_ids,
        counts,
        experts,
        routes,
        number,
        num_routes,
        num_experts,
        max_blocks,
        ROWS=rows,
        BINS=triton.next_power_of_2(num_experts),
        SPANS=triton.next_power_of_2(num_spans),
        **sizes,
    )
    return Blocks(experts, routes, number)
