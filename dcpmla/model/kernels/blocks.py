"""Triton kernels before and after the products of many routes: a counting sort into blocks of one expert each, and the
sum over each token's routes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 16384  # routes that a program sorts at a time
_COLUMNS = 1024  # of a program that sums


@triton.jit(do_not_specialize=["num_routes", "max_blocks"])
def assign_kernel(
    ids_ptr,
    experts_ptr,
    routes_ptr,
    num_routes,
    num_experts,
    max_blocks,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the blocks of an expert, one program per expert; the last program writes the blocks that nobody has."""
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_routes, CHUNK):
        route = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + route, mask=route < num_routes, other=-1)
        counts += tl.histogram(ids, BINS, mask=(ids >= 0) & (ids < num_experts))
    num_blocks = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(tl.arange(0, BINS) < expert, num_blocks, 0))
    if expert == num_experts:
        for first in range(start, max_blocks, CHUNK):
            block = first + tl.arange(0, CHUNK)
            tl.store(experts_ptr + block, -1, mask=block < max_blocks)
        return
    end = start + tl.sum(tl.where(tl.arange(0, BINS) == expert, num_blocks, 0))
    for first in range(start, end, CHUNK):
        block = first + tl.arange(0, CHUNK)
        tl.store(experts_ptr + block, expert, mask=block < end)
    next_row = start * ROWS
    for first in range(0, num_routes, CHUNK):
        route = first + tl.arange(0, CHUNK)
        is_own = tl.load(ids_ptr + route, mask=route < num_routes, other=-1) == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(routes_ptr + next_row + rank - 1, route, mask=is_own)
        next_row += tl.sum(is_own.to(tl.int32))
    padding = next_row + tl.arange(0, ROWS)
    tl.store(routes_ptr + padding, -1, mask=padding < end * ROWS)


def assign_blocks(expert_ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Sort routes into blocks of one expert each.

    Args:
        expert_ids: int32 [T, k], contiguous; ids outside [0, num_experts) are in no block.
    Returns:
        experts [blocks] int32, an expert's blocks side by side, -1 for those that nobody has; routes [blocks, rows]
        int32, ascending within an expert, -1 where a block has fewer. As many blocks as any ids may need.
    """
    num_routes = expert_ids.numel()
    max_blocks = num_routes // rows + min(num_experts, num_routes)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=expert_ids.device)
    routes = torch.empty(max_blocks, rows, dtype=torch.int32, device=expert_ids.device)
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(num_routes)))
    assign_kernel[(num_experts + 1,)](
        expert_ids,
        experts,
        routes,
        num_routes,
        num_experts,
        max_blocks,
        ROWS=rows,
        BINS=max(32, triton.next_power_of_2(num_experts)),
        CHUNK=chunk,
        num_warps=min(32, max(4, chunk // 256)),
    )
    return experts, routes


@triton.jit
def sum_kernel(rows_ptr, ids_ptr, out_ptr, num_experts, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the rows of a token's routes in float32; one program per (token, tile of columns)."""
    route = tl.program_id(0).to(tl.int64) * TOP_K
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + route + i)
        # Nobody wrote the row of an expert that is not here.
        num_columns = tl.where((expert >= 0) & (expert < num_experts), width, 0)
        rows = tl.load(rows_ptr + (route + i) * width + column, mask=column < num_columns, other=0.0)
        acc += rows.to(tl.float32)
    out_ptrs = out_ptr + tl.program_id(0).to(tl.int64) * width + column
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=column < width)


def sum_routes(rows: Tensor, expert_ids: Tensor, num_experts: int) -> Tensor:
    """Return [T, H], the sums of each token's rows [T k, H]; those of ids outside [0, num_experts) are not read."""
    (num_tokens, top_k), width = expert_ids.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    sum_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        rows, expert_ids, out, num_experts, width, TOP_K=top_k, COLUMNS=_COLUMNS
    )
    return out
