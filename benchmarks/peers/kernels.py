"""Triton kernels around the grouped products of others (`experts`): the sort of routes, copies of rows in its
order, the gate, and the sum over a token's routes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.kernels.blocks import count_kernel
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.kernels.quantize import to_codes
from dcpmla.parallel.quantized import QuantizedRows, empty_groups

_BLOCK = tl.constexpr(BLOCK)
_SPAN = 1 << 30  # routes that one program counts: all
_CHUNK = 4096  # routes that a program looks at at a time
_GROUPS = 8  # limit of groups that one program gates
_COLUMNS = 1024  # columns that one program sums


@triton.jit(do_not_specialize=["num_routes", "num_rows"])
def sort_kernel(
    ids_ptr,
    counts_ptr,
    routes_ptr,
    experts_ptr,
    ends_ptr,
    num_routes,
    num_experts,
    num_rows,
    ROWS: tl.constexpr,
    PADDING: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the blocks of an expert and where its rows end, one program per expert; the last program writes the rows
    of no expert.
    """
    expert, other = tl.program_id(0), tl.arange(0, BINS)
    counts = tl.load(counts_ptr + other, mask=other < num_experts, other=0)
    num_blocks = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(other < expert, num_blocks, 0))
    next_row = start * ROWS
    if expert == num_experts:
        tl.store(ends_ptr + expert, next_row)
        for first in range(next_row, num_rows, CHUNK):
            row = first + tl.arange(0, CHUNK)
            tl.store(routes_ptr + row, num_routes, mask=row < num_rows)
        return
    end = start + tl.sum(tl.where(other == expert, num_blocks, 0))
    for block in range(start, end):
        tl.store(experts_ptr + block, expert)
    for first in range(0, num_routes, CHUNK):
        route = first + tl.arange(0, CHUNK)
        is_own = (tl.load(ids_ptr + route, mask=route < num_routes, other=-1) == expert).to(tl.int32)
        tl.store(routes_ptr + next_row + tl.cumsum(is_own, 0) - 1, route, mask=is_own == 1)
        next_row += tl.sum(is_own)
    tl.store(ends_ptr + expert, next_row)
    padding = next_row + tl.arange(0, PADDING)
    tl.store(routes_ptr + padding, num_routes, mask=padding < end * ROWS)


def sort_routes(expert_ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routes into blocks of one expert each, of any number of rows: humming's tiles have any multiple of 8, and
    `assign_blocks` takes powers of two.

    Args:
        expert_ids: Experts of each token, int32 [T, k], contiguous, in [0, num_experts).
    Returns:
        routes int32 [blocks * rows], T k where a block has fewer rows and past the last block; experts int32 [blocks],
        undefined past the last block; ends int32 [num_experts + 1], the row past each expert's last, and past the last
        block. As many blocks as any ids may need.
    """
    num_routes = expert_ids.numel()
    max_blocks = num_routes // rows + min(num_experts, num_routes)
    counts, routes, experts, ends = (
        torch.empty(size, dtype=torch.int32, device=expert_ids.device)
        for size in (num_experts, max_blocks * rows, max_blocks, num_experts + 1)
    )
    chunk = min(_CHUNK, triton.next_power_of_2(num_routes))
    num_warps = 8 if chunk == _CHUNK else 4
    count_kernel[(num_experts, 1)](expert_ids, counts, num_routes, SPAN=_SPAN, CHUNK=chunk, num_warps=num_warps)
    sort_kernel[(num_experts + 1,)](
        expert_ids,
        counts,
        routes,
        experts,
        ends,
        num_routes,
        num_experts,
        len(routes),
        ROWS=rows,
        PADDING=triton.next_power_of_2(rows),
        BINS=triton.next_power_of_2(num_experts + 1),
        CHUNK=chunk,
        num_warps=num_warps,
    )
    return routes, experts, ends


@triton.jit(do_not_specialize=["num_routes", "scales_stride", "out_scales_stride"])
def gather_kernel(
    codes_ptr,
    scales_ptr,
    routes_ptr,
    out_ptr,
    out_scales_ptr,
    rows_ptr,
    num_routes,
    scales_stride,
    out_scales_stride,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Copy the token of a row's route; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    route = tl.load(routes_ptr + row)
    if route >= num_routes:
        return
    tl.store(rows_ptr + route, row.to(tl.int32))
    token = (route // TOP_K).to(tl.int64)
    column, group = tl.arange(0, COLUMNS), tl.arange(0, GROUPS)
    codes = tl.load(codes_ptr + token * WIDTH + column, mask=column < WIDTH)
    tl.store(out_ptr + row * WIDTH + column, codes, mask=column < WIDTH)
    is_group = group * _BLOCK < WIDTH
    s = tl.load(scales_ptr + token + group.to(tl.int64) * scales_stride, mask=is_group)
    tl.store(out_scales_ptr + row + group.to(tl.int64) * out_scales_stride, s, mask=is_group)


def gather_rows(x: QuantizedRows, routes: Tensor, top_k: int) -> tuple[QuantizedRows, Tensor]:
    """Return the tokens of sorted routes, padding undefined, and the row of each route [T k] int32.

    Args:
        x: Rows [T, K], scales column by column, as in the result.
    """
    codes = x.values.view(torch.uint8)
    num_tokens, width = codes.shape
    out = QuantizedRows(*empty_groups(codes[:1].expand(len(routes), width)))
    rows = routes.new_empty(num_tokens * top_k)
    gather_kernel[(len(routes),)](
        codes,
        x.scales,
        routes,
        out.values.view(torch.uint8),
        out.scales,
        rows,
        len(rows),
        x.scales.stride(1),
        out.scales.stride(1),
        TOP_K=top_k,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        GROUPS=triton.next_power_of_2(width // BLOCK),
        num_warps=8,
    )
    return out, rows


@triton.jit(do_not_specialize=["num_routes", "scales_stride_row", "scales_stride_group"])
def gate_kernel(
    x_ptr,
    routes_ptr,
    weights_ptr,
    codes_ptr,
    scales_ptr,
    num_routes,
    scales_stride_row,
    scales_stride_group,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Gate some groups of a row, weigh and quantize them; one program per (row, groups)."""
    row = tl.program_id(0).to(tl.int64)
    route = row if routes_ptr is None else tl.load(routes_ptr + row).to(tl.int64)
    if route >= num_routes:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_column = column < WIDTH
    gate_ptrs = x_ptr + row * (2 * WIDTH) + column
    gate = tl.load(gate_ptrs, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=is_column, other=0.0).to(tl.float32)
    h = gate / (1 + tl.exp(-gate)) * up * tl.load(weights_ptr + route)
    codes, s = to_codes(h.to(x_ptr.dtype.element_ty).to(tl.float32))
    tl.store(codes_ptr + row * WIDTH + column, codes, mask=is_column)
    scales_ptrs = scales_ptr + row * scales_stride_row + group.to(tl.int64) * scales_stride_group
    tl.store(scales_ptrs, s, mask=group * _BLOCK < WIDTH)


def gate_rows(x: Tensor, routes: Tensor | None, expert_weights: Tensor, out: QuantizedRows) -> QuantizedRows:
    """Return silu(gate) * up times the experts' weights, rounded as ours, and quantized into `out`.

    Args:
        x: Rows [R, 2 I], gates first; row r is of routes[r], padding is not read; None: row r is of route r.
        out: Rows [R, I], scales of any strides.
    """
    width = out.values.shape[1]
    groups = min(_GROUPS, triton.next_power_of_2(width // BLOCK))
    grid = len(x), triton.cdiv(width, groups * BLOCK)
    sizes = expert_weights.numel(), *out.scales.stride()
    gate_kernel[grid](x, routes, expert_weights, *out, *sizes, WIDTH=width, GROUPS=groups)
    return out


@triton.jit
def sum_kernel(x_ptr, rows_ptr, out_ptr, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the rows of a token's routes in float32; one program per (token, tile of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + i).to(tl.int64)
        acc += tl.load(x_ptr + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, acc.to(out_ptr.dtype.element_ty), mask=column < width)


def sum_rows(x: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Return [T, H], the sums of each token's rows of x [R, H]: rows [T k] int32."""
    num_tokens, width = len(rows) // top_k, x.shape[1]
    out = x.new_empty(num_tokens, width)
    grid = num_tokens, triton.cdiv(width, _COLUMNS)
    sum_kernel[grid](x, rows, out, width, TOP_K=top_k, COLUMNS=_COLUMNS)
    return out
