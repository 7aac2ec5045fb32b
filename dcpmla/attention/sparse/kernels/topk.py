"""Triton kernels of the selection with their launchers; `attention/sparse/topk.py` specifies them.

A program has a tile of a row in registers, finds what parts its best keys from the others (`threshold`), and stores these side by side,
in the order in which they stood. Rows longer than a tile leave the best of each tile; another launch takes the best of those.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.sparse import candidates as packing
from dcpmla.attention.sparse.kernels.compaction import compact, fill
from dcpmla.attention.sparse.kernels.threshold import LEAST, SAMPLES, best_of

TILE = 16384  # keys of a program
GROUP_BYTES = 512  # of the keys that a warp loads at a time: it counts those that are kept of them without the others
_EMPTY = tl.constexpr(packing.EMPTY)
_LAST_POSITION = tl.constexpr(packing.LAST_POSITION)  # all ones: a position's difference from it is its bits flipped
_INFINITY = tl.constexpr(0x7F800000)
_MINUS_INFINITY = tl.constexpr(-0x7F800001)  # as _order has it


@triton.jit
def _order(bits):
    """`pack_candidates`' high words, of scores' bits. Integers all the way: no number is rounded to zero."""
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(order == -1, 0, order)  # -0
    return tl.maximum(tl.where(order > _INFINITY, _MINUS_INFINITY, order), _MINUS_INFINITY)  # NaN of either sign


@triton.jit
def _load_sample(keys_ptr, num_keys):
    """[SAMPLES] of a row's keys, evenly spread. Copies of each: of fewer loads than threads, the compiler makes one more for each use."""
    index = (2 * tl.arange(0, SAMPLES) + 1) * num_keys // (2 * SAMPLES)
    return tl.max(tl.load(tl.broadcast_to((keys_ptr + index)[:, None], [SAMPLES, 4])), 1)


@triton.jit(do_not_specialize=["num_columns"])
def local_kernel(
    scores_ptr,
    seq_lens_ptr,
    local_seq_lens_ptr,
    out_ptr,
    num_columns,
    scores_stride,
    topk: tl.constexpr,
    width: tl.constexpr,
    DCP_RANK: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program (row, tile): the best `width` of the tile -> out [T, num_tiles, width]. VECTOR divides num_columns."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    scores_ptr = scores_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * scores_stride + first
    out_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * width
    num_keys = tl.minimum(tl.load(local_seq_lens_ptr + row), num_columns) - first
    num_keys = tl.minimum(tl.maximum(num_keys, 0), TILE)
    num_kept = tl.minimum(num_keys, width)
    if num_keys > 0:
        is_scored = tl.load(seq_lens_ptr + row) > topk
        num_read = tl.where(is_scored, tl.cdiv(num_keys, VECTOR), 0) * VECTOR  # whole vectors: loads are of so many elements
        index = tl.arange(0, TILE)
        is_key = index < num_keys
        high = tl.where(is_key, _order(tl.load(scores_ptr + index, mask=index < num_read, other=0)), LEAST)
        is_kept = is_key
        if num_keys > width:
            sample = _order(_load_sample(scores_ptr, num_keys))
            is_kept = best_of(high, TILE - 1 - index, num_keys, num_kept, sample, num_keys)  # later tokens have later positions
        at = first + index
        position = at // INTERLEAVE * (DCP_SIZE * INTERLEAVE) + DCP_RANK * INTERLEAVE + at % INTERLEAVE
        compact((high.to(tl.int64) << 32) | (position ^ _LAST_POSITION), is_kept, out_ptr, GROUP)
    fill(out_ptr, _EMPTY, num_kept, width)


@triton.jit
def _load_best(candidates_ptr, num_candidates, width, TILE: tl.constexpr):
    """A tile of candidates, which of them are its best `width`, how many these are."""
    index = tl.arange(0, TILE)
    candidates = tl.load(candidates_ptr + index, mask=index < num_candidates, other=_EMPTY)
    high, low = (candidates >> 32).to(tl.int32), candidates.to(tl.int32)
    is_kept = high != LEAST
    num_keys = tl.sum(is_kept.to(tl.int32))
    num_kept = tl.minimum(num_keys, width)
    if num_keys > width:
        sample = _load_sample(candidates_ptr, num_candidates) >> 32
        is_kept = best_of(high, low, num_keys, num_kept, sample.to(tl.int32), num_candidates)
    return candidates, is_kept, num_kept


@triton.jit
def cut_kernel(candidates_ptr, out_ptr, num_candidates, stride, width: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """A program (row, tile): the best `width` of the tile -> out [T, num_tiles, width]."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    candidates_ptr += row * stride + first
    out_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * width
    candidates, is_kept, num_kept = _load_best(candidates_ptr, tl.minimum(num_candidates - first, TILE), width, TILE)
    compact(candidates, is_kept, out_ptr, GROUP)
    fill(out_ptr, _EMPTY, num_kept, width)


@triton.jit
def choose_kernel(
    candidates_ptr,
    block_table_ptr,
    request_ptr,
    positions_ptr,
    slots_ptr,
    num_slots_ptr,
    num_candidates,
    candidates_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    topk: tl.constexpr,
    SELECTED: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program a row, which is one tile."""
    row = tl.program_id(0).to(tl.int64)
    positions_ptr += row * topk
    candidates, is_kept, num_kept = _load_best(candidates_ptr + row * candidates_stride, num_candidates, topk, TILE)
    compact(candidates.to(tl.int32) ^ _LAST_POSITION, is_kept, positions_ptr, GROUP)
    fill(positions_ptr, -1, num_kept, topk)
    tl.debug_barrier()  # from here on threads have the positions that others stored
    index = tl.arange(0, SELECTED)
    position = tl.load(positions_ptr + index, mask=index < topk, other=-1)
    is_mine = (position >= 0) & (position // INTERLEAVE % DCP_SIZE == DCP_RANK)
    at = position // (DCP_SIZE * INTERLEAVE) * INTERLEAVE + position % INTERLEAVE
    request = tl.load(request_ptr + row).to(tl.int64)
    block = tl.load(block_table_ptr + request * table_stride + at // BLOCK_SIZE, mask=is_mine)
    mine = is_mine.to(tl.int32)
    tl.store(slots_ptr + row * topk + tl.cumsum(mine, 0) - mine, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=is_mine)
    tl.store(num_slots_ptr + row, tl.sum(mine, 0))


def local_candidates(
    scores: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, topk: int, dcp_rank: int, dcp_size: int, interleave: int
) -> Tensor:
    """`topk.local_candidates` in one kernel for up to TILE columns, else in two or more."""
    num_tokens, num_columns = scores.shape
    width = min(topk, num_columns)
    tile = _tile(num_columns, width)
    num_tiles = triton.cdiv(num_columns, tile)
    out = torch.empty(num_tokens, num_tiles * width, dtype=torch.int64, device=scores.device)
    if out.numel() == 0:
        return out
    local_kernel[(num_tokens, num_tiles)](
        scores,
        seq_lens,
        local_seq_lens,
        out,
        num_columns,
        scores.stride(0),
        topk=topk,
        width=width,
        DCP_RANK=dcp_rank,
        DCP_SIZE=dcp_size,
        INTERLEAVE=interleave,
        VECTOR=math.gcd(num_columns, 4),
        **_tiling(tile, scores),
    )
    while out.shape[1] > width:
        out = _cut(out, width)
    return out


def choose_tokens(
    candidates: Tensor,
    block_table: Tensor,
    request: Tensor,
    block_size: int,
    dcp_rank: int,
    dcp_size: int,
    interleave: int,
    positions: Tensor,
    slots: Tensor,
    num_slots: Tensor,
) -> None:
    """`topk.choose_tokens` in one kernel for up to TILE candidates of a token, else in two or more."""
    num_tokens, topk = positions.shape
    if num_tokens == 0:
        return
    while candidates.shape[1] > (tile := _tile(candidates.shape[1], topk)):
        candidates = _cut(candidates, topk)
    choose_kernel[(num_tokens,)](
        candidates,
        block_table,
        request,
        positions,
        slots,
        num_slots,
        candidates.shape[1],
        candidates.stride(0),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        DCP_RANK=dcp_rank,
        DCP_SIZE=dcp_size,
        INTERLEAVE=interleave,
        topk=topk,
        SELECTED=triton.next_power_of_2(topk),
        **_tiling(tile, candidates),
    )


def _cut(candidates: Tensor, width: int) -> Tensor:
    """The best `width` of each tile of a row, side by side."""
    num_tokens, num_candidates = candidates.shape
    tile = _tile(num_candidates, width)
    num_tiles = triton.cdiv(num_candidates, tile)
    out = candidates.new_empty(num_tokens, num_tiles * width)
    cut_kernel[(num_tokens, num_tiles)](candidates, out, num_candidates, candidates.stride(0), width=width, **_tiling(tile, candidates))
    return out


def _tile(num_keys: int, width: int) -> int:
    """Keys of a tile: all of a row, or at least twice as many as it leaves."""
    return min(triton.next_power_of_2(max(num_keys, 1)), max(TILE, 2 * triton.next_power_of_2(width)))


def _tiling(tile: int, keys: Tensor) -> dict[str, int]:
    """Options of a launch over tiles of keys: 16 or more of them a thread."""
    group = min(tile, GROUP_BYTES // keys.element_size())
    return {"TILE": tile, "GROUP": group, "num_warps": min(16, max(4, tile // 1024))}
