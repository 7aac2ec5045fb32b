"""Decode attention in a fixed order on GPUs; `deterministic_reference.decode_deterministic` specifies it."""

from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, request_bound
from dcpmla.attention.triton.deterministic_merge import Partials, TileForm, attend_and_merge
from dcpmla.attention.triton.deterministic_units import deterministic_decode_kernel
from dcpmla.attention.triton.device import shared_memory
from dcpmla.comm.kernels.merge_tree import LOG2_E


class Tile(NamedTuple):
    """A tile of a program: query rows, keys at a time, stages of its pipeline, and rows in shared memory.

    With two stages no keys are loaded during the products; with five, two of three buffers are. A tile of 64 queries is
    in shared memory, too; smaller ones are in registers. Measured on an H200: 64 keys without overlap take 69
    to 85 % of the time of 32 keys with it.
    """

    rows: int
    keys: int
    num_stages: int
    num_shared_rows: int


TILES = (Tile(64, 64, 2, 192), Tile(32, 32, 5, 96), Tile(32, 32, 2, 64), Tile(16, 16, 2, 32))
_RESERVED_BYTES = 4096  # shared memory for everything except queries and keys


def choose_tile(width: int, shared_bytes: int) -> Tile:
    """Return the first tile that fits into shared memory, for rows of `width` columns in 16 bits; else the last."""
    fits = (tile for tile in TILES if tile.num_shared_rows * width * 2 + _RESERVED_BYTES <= shared_bytes)
    return next(fits, TILES[-1])


def run(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute a `DecodeCall` with num_tile_lanes by the portable kernel, for the calls that `backends` admits."""
    tile = choose_tile(call.q.shape[2] + call.rope_dim, shared_memory(call.q.device))
    return attend_and_merge(call, lambda call, partials: _attend(call, partials, tile), TileForm(tile.rows))


def _attend(call: DecodeCall, partials: Partials, tile: Tile) -> None:
    """Compute the partial outputs by the portable kernel."""
    q, q_pe, kv_cache, table = call.q, call.q_pe, call.kv_cache, call.block_table
    assert q_pe is not None
    num_processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    deterministic_decode_kernel[(num_processors,)](
        q,
        q_pe,
        kv_cache,
        table,
        call.seq_lens,
        call.request_index,
        call.query_start_loc,
        partials.rows,
        partials.lses,
        partials.first_rows,
        call.kv_scale,
        *q.stride()[:2],
        *q_pe.stride()[:2],
        *kv_cache.stride()[:2],
        table.stride(0),
        call.block_size,
        call.num_segments,
        call.max_query_len,
        q.shape[1],
        call.num_tile_lanes,
        len(partials.lses),
        call.softmax_scale * LOG2_E.value,
        ROWS=tile.rows,
        KEYS=tile.keys,
        LATENT=q.shape[2],
        ROPE=call.rope_dim,
        SEGMENTS=request_bound(call.num_segments),
        num_warps=8,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
