"""Triton kernels of the selection with their launchers; `attention/select/topk.py` specifies them.

A program holds a tile of a row in registers, finds the threshold of its best keys (`threshold`) and stores them
contiguously, in their order (`compaction`). For a row longer than a tile, one launch keeps the best keys of each tile,
and another launch selects the best keys among them.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.select import candidates as packing
from dcpmla.attention.select.kernels.candidates import EMPTY, by_thread, load_best, load_sample, pack
from dcpmla.attention.select.kernels.compaction import compact, fill
from dcpmla.attention.select.kernels.slots import store_slots
from dcpmla.attention.select.kernels.threshold import best_of, sample_guesses
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.ownership import Owner

TILE = 16384  # keys of a program
WARPS = 8  # warps per program; each repeats the scalar work between counts, so more would take longer
_FEW_PROGRAMS = 256  # A Hopper GPU runs as many at the same time.
_LAST_POSITION = tl.constexpr(packing.LAST_POSITION)  # all ones: xor with it flips a position's bits


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["seq_lens_ptr", "local_seq_lens_ptr"])
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
    WARPS: tl.constexpr,
):
    """Store the best `width` candidates of a tile in out [T, num_tiles, width]; one program per (row, tile).

    VECTOR divides num_columns.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    scores_ptr += row * scores_stride + first
    out_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * width
    num_keys = tl.minimum(tl.load(local_seq_lens_ptr + row), num_columns) - first
    num_keys = tl.minimum(tl.maximum(num_keys, 0), TILE)
    num_kept = tl.minimum(num_keys, width)
    if num_keys > 0:
        is_scored = tl.load(seq_lens_ptr + row) > topk
        num_read = tl.where(is_scored, tl.cdiv(num_keys, VECTOR), 0) * VECTOR  # whole vectors, so that loads are
        sample = load_sample(scores_ptr, num_keys, width)
        index = tl.arange(0, TILE)
        scores = tl.load(scores_ptr + index, mask=index < num_read, other=0.0)
        scores = tl.where(scores == scores, scores, float("-inf"))
        keys = by_thread(tl.where(index < num_keys, scores, float("nan")), WARPS, 4)
        index = by_thread(index, WARPS, 4)
        bound = tl.cast(float("-inf"), tl.float32)
        if num_keys > width:
            later = TILE - 1 - index  # later columns have later positions
            keys, bound = best_of(keys, later, num_keys, num_kept, sample_guesses(sample, num_kept, num_keys))
        at = first + index
        position = at // INTERLEAVE * (DCP_SIZE * INTERLEAVE) + DCP_RANK * INTERLEAVE + at % INTERLEAVE
        compact(out_ptr, pack(keys, position ^ _LAST_POSITION), keys, bound)
    fill(out_ptr, EMPTY, num_kept, width)


@triton.jit(do_not_specialize=["num_candidates"])
def cut_kernel(
    candidates_ptr, out_ptr, num_candidates, stride, width: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr
):
    """Store the best `width` candidates of a tile in out [T, num_tiles, width]; one program per (row, tile)."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    candidates_ptr += row * stride + first
    out_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * width
    keys, low_words, bound = load_best(candidates_ptr, tl.minimum(num_candidates - first, TILE), width, TILE, WARPS)
    num_kept = compact(out_ptr, pack(keys, low_words), keys, bound)
    fill(out_ptr, EMPTY, num_kept, width)


@triton.jit(
    do_not_specialize=["num_candidates", "table_stride", "num_blocks"],
    do_not_specialize_on_alignment=["request_ptr", "num_first_ptr", "num_slots_ptr"],
)
def choose_kernel(
    candidates_ptr,
    block_table_ptr,
    request_ptr,
    num_first_ptr,
    positions_ptr,
    slots_ptr,
    num_slots_ptr,
    num_candidates,
    candidates_stride,
    slots_stride,
    table_stride,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    topk: tl.constexpr,
    SELECTED: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Store the positions of a row's best candidates, and the slots of this rank's candidates; one program per row.

    A failed exchange leaves arbitrary candidates, so the block table is never read out of bounds.
    """
    row = tl.program_id(0).to(tl.int64)
    positions_ptr += row * topk
    keys, low_words, bound = load_best(candidates_ptr + row * candidates_stride, num_candidates, topk, TILE, WARPS)
    num_kept = compact(positions_ptr, low_words ^ _LAST_POSITION, keys, bound)
    fill(positions_ptr, -1, num_kept, topk)
    tl.debug_barrier()  # makes the positions visible to all threads
    index = tl.arange(0, SELECTED)
    position = tl.load(positions_ptr + index, mask=index < topk, other=-1)
    request, num_first = tl.load(request_ptr + row).to(tl.int64), 0
    if num_first_ptr is not None:
        num_first = tl.load(num_first_ptr + row)
    slots_ptr += row * slots_stride + num_first
    table_ptr = block_table_ptr + request * table_stride
    num_owned = store_slots(slots_ptr, position, table_ptr, num_blocks, BLOCK_SIZE, DCP_RANK, DCP_SIZE, INTERLEAVE)
    tl.store(num_slots_ptr + row, num_first + num_owned)


def local_candidates(scores: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, topk: int, owner: Owner) -> Tensor:
    """Compute `topk.local_candidates`, in one launch, and for more than TILE / 2 columns in several."""
    num_tokens, num_columns = scores.shape
    width = packing.candidate_width(topk, num_columns)
    tile = _shared_tile(num_tokens, num_columns, width)
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
        DCP_RANK=owner.rank,
        DCP_SIZE=owner.size,
        INTERLEAVE=owner.interleave,
        VECTOR=math.gcd(num_columns, 4),
        **_tiling(tile, scores),
    )
    while out.shape[1] > width:
        out = _cut(out, width)
    return out


def choose_tokens(candidates: Tensor, layout: SlotLayout, selection: SelectedTokens) -> None:
    """Compute `topk.choose_tokens`, in one kernel for up to TILE candidates of a token."""
    num_tokens, topk = selection.positions.shape
    if num_tokens == 0:
        return
    while candidates.shape[1] > (tile := _tile(candidates.shape[1], topk)):
        candidates = _cut(candidates, topk)
    choose_kernel[(num_tokens,)](
        candidates,
        *layout[:2],  # block_table, request
        selection.num_first,
        *selection[:3],  # positions, slots, num_slots
        candidates.shape[1],
        candidates.stride(0),
        selection.slots.stride(0),
        layout.block_table.stride(0),
        layout.block_table.shape[1],
        BLOCK_SIZE=layout.block_size,
        DCP_RANK=layout.owner.rank,
        DCP_SIZE=layout.owner.size,
        INTERLEAVE=layout.owner.interleave,
        topk=topk,
        SELECTED=triton.next_power_of_2(topk),
        **_tiling(tile, candidates),
    )


def _cut(candidates: Tensor, width: int) -> Tensor:
    """Reduce each tile of a row to its best `width` candidates, side by side."""
    num_tokens, num_candidates = candidates.shape
    tile = _tile(num_candidates, width)
    num_tiles = triton.cdiv(num_candidates, tile)
    out = candidates.new_empty(num_tokens, num_tiles * width)
    cut_kernel[(num_tokens, num_tiles)](
        candidates, out, num_candidates, candidates.stride(0), width=width, **_tiling(tile, candidates)
    )
    return out


def _shared_tile(num_rows: int, num_keys: int, width: int) -> int:
    """Choose a tile's keys where all tiles of a row run at the same time if the rows are few: then smaller tiles take
    less time, and the cut after them takes more, for it reads `width` keys of each.
    """
    tile = _tile(num_keys, width)
    if num_keys <= TILE // 2:
        return tile
    balanced = max(2 ** round(math.log2(num_keys * width) / 2), 2 * triton.next_power_of_2(width), 128)
    while balanced < tile and num_rows * triton.cdiv(num_keys, balanced) > _FEW_PROGRAMS:
        balanced *= 2
    return min(balanced, tile)


def _tile(num_keys: int, width: int) -> int:
    """Choose a tile's keys: the whole row, or at least twice the keys that it keeps; at least a warp's load."""
    return min(triton.next_power_of_2(max(num_keys, 128)), max(TILE, 2 * triton.next_power_of_2(width)))


def _tiling(tile: int, keys: Tensor) -> dict[str, int]:
    """Choose a launch's warps: a thread loads 16 bytes at a time and has registers for about 64 keys."""
    num_warps = min(max(WARPS, tile // 2048), tile * keys.element_size() // 512, 32)
    return {"TILE": tile, "WARPS": num_warps, "num_warps": num_warps}
