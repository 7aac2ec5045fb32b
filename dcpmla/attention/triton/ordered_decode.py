"""Decode attention in a fixed order on GPUs; `ordered_reference.decode_in_order` specifies it."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dcpmla.attention.calls import ORDERED_ROWS, DecodeCall, request_bound
from dcpmla.attention.ordered_reference import SPLIT_TILES
from dcpmla.attention.triton.device import shared_memory
from dcpmla.attention.triton.ordered_merge import merge_classes_kernel
from dcpmla.attention.triton.ordered_units import ordered_decode_kernel
from dcpmla.comm.kernels.merge_tree import LOG2_E
from dcpmla.ownership import TILE


class Tile(NamedTuple):
    """A tile of a program: query rows, keys at a time, stages of its pipeline, and rows in shared memory.

    Five stages have three buffers of keys: two are loaded while the third is multiplied, each after the ids of its
    blocks. Two stages have two buffers, and load no keys during the products. A tile of 64 queries is in shared memory,
    too; smaller ones are in registers.
    """

    rows: int
    keys: int
    num_stages: int
    num_shared_rows: int


TILES = (Tile(64, 32, 5, 160), Tile(32, 32, 5, 96), Tile(32, 32, 2, 64), Tile(16, 16, 2, 32))
_RESERVED_BYTES = 4096  # shared memory for everything except queries and keys


def choose_tile(width: int, shared_bytes: int) -> Tile:
    """Return the first tile that fits into shared memory, for rows of `width` columns in 16 bits; else the last."""
    fits = (tile for tile in TILES if tile.num_shared_rows * width * 2 + _RESERVED_BYTES <= shared_bytes)
    return next(fits, TILES[-1])


def run(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute a `DecodeCall` with num_classes in two launches, for the calls that `backends` admits."""
    q, q_pe, kv_cache, table = call.q, call.q_pe, call.kv_cache, call.block_table
    assert q_pe is not None
    assert call.num_classes is not None
    (num_tokens, num_heads, latent), num_classes, num_segments = q.shape, call.num_classes, call.num_segments
    out, lse = call.new_output()
    if num_tokens == 0:
        return out, lse
    rows, keys, num_stages, _ = choose_tile(latent + call.rope_dim, shared_memory(q.device))
    num_rows = call.max_query_len * num_heads
    num_lines, slot_rows = triton.cdiv(num_rows, rows), min(rows, num_rows)
    num_own = num_segments * num_lines * num_classes
    max_splits = triton.cdiv(table.shape[1] * call.block_size, num_classes * TILE * SPLIT_TILES)
    num_slots = max(num_own, min(num_own * max_splits, ORDERED_ROWS // slot_rows))
    # Splits wait for each other, so all programs of a launch run at the same time.
    num_programs = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    num_programs = min(num_programs, num_own * max_splits)
    num_partials = (num_slots + num_programs) * slot_rows
    partials = torch.empty(num_partials, latent, dtype=torch.float32, device=q.device)
    lses = torch.empty(num_partials, dtype=torch.float32, device=q.device)
    first_slots = torch.empty(num_segments, dtype=torch.int32, device=q.device)
    progress = torch.zeros(num_own, dtype=torch.int32, device=q.device)
    sizes = num_segments, call.max_query_len, num_heads
    ordered_decode_kernel[(num_programs,)](
        q,
        q_pe,
        kv_cache,
        table,
        call.seq_lens,
        call.request_index,
        call.query_start_loc,
        partials,
        lses,
        first_slots,
        progress,
        call.kv_scale,
        *q.stride()[:2],
        *q_pe.stride()[:2],
        *kv_cache.stride()[:2],
        table.stride(0),
        call.block_size,
        *sizes,
        num_classes,
        num_lines,
        slot_rows,
        num_slots,
        call.scale * LOG2_E.value,
        ROWS=rows,
        KEYS=keys,
        LATENT=latent,
        ROPE=call.rope_dim,
        SEGMENTS=request_bound(num_segments),
        num_warps=8,
        num_stages=num_stages,
        enable_fp_fusion=False,  # a compiler may fuse in one variant and not in another
    )
    parts = partials, lses, first_slots, call.seq_lens, call.query_start_loc
    merge_classes_kernel[(num_tokens * num_heads,)](
        *parts,
        out,
        lse,
        *sizes,
        num_lines,
        slot_rows,
        CLASSES=num_classes,
        LATENT=latent,
        ROWS=rows,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out, lse
