"""Attention in a fixed order in plain torch: the specification of the kernels of `DCPConfig.deterministic`.

Positions are cut into tiles of `ownership.TILE`, and a row's keys are summed up tile by tile, so that a row's result
depends on its own query and keys alone. Sums are made of products and additions of single elements: these round the
same way in tensors of any shape, which matrix products do not.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.cache import formats
from dcpmla.merge import merge_pair, merge_tree
from dcpmla.ownership import TILE

SPLIT_TILES = 16  # tiles of a lane that are summed up before they are merged with those before them
MAX_PRODUCTS = 1 << 24  # elements that a step holds at a time: 64 MiB of float32


class DeterministicPrefillCall(NamedTuple):
    """The arguments of one call of multi-head attention in a fixed order, of new tokens to one chunk of their keys.

    Attributes:
        q, k_nope, k_pe, v, softmax_scale: As in `PrefillCall`.
        query_start_loc, key_start_loc: First row of each request in q and in the keys, and the end [num_reqs + 1]
            int32; the first may be above 0.
        query_position, key_position: Position of each request's first query and first key [num_reqs] int32. Keys begin
            at multiples of a tile. A query sees the keys up to its own position.
    """

    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    query_start_loc: Tensor
    query_position: Tensor
    key_start_loc: Tensor
    key_position: Tensor
    softmax_scale: float


class Sums(NamedTuple):
    """Sums of online softmax over the keys so far: of weighted values [.., V], the largest score [..], of weights [..].

    In float32, or in float64 on float64 inputs.
    """

    acc: Tensor
    peak: Tensor
    total: Tensor

    def add_tile(self, scores: Tensor, v: Tensor) -> "Sums":
        """Add a tile of keys.

        Args:
            scores: [.., TILE], -inf for keys that a row does not see: such keys change no bit.
            v: Values [.., TILE, V].
        """
        peak = torch.maximum(self.peak, scores.amax(-1))
        shift = peak.where(peak != -torch.inf, 0.0)  # -inf - -inf is NaN
        factor = (self.peak - shift).exp()
        probs = (scores - shift[..., None]).contiguous().exp()
        acc = self.acc * factor[..., None] + halve(probs[..., None] * v, -2)
        return Sums(acc, peak, self.total * factor + halve(probs, -1))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output [.., V], and its lse [..] in float32: zeros and -inf without keys."""
        is_any = self.total != 0
        total = self.total.where(is_any, 1.0)
        return self.acc / total[..., None], (self.peak + total.log()).where(is_any, -torch.inf).to(torch.float32)


def runs_kernel(q: Tensor) -> bool:
    """Return whether a kernel attends for queries of a prompt: on GPUs, in 16 bits."""
    return q.is_cuda and q.dtype.itemsize == 2


def new_sums(shape: tuple[int, ...], width: int, template: Tensor) -> Sums:
    """Return sums over no keys for rows of a shape."""
    return Sums(template.new_zeros(*shape, width), template.new_full(shape, -torch.inf), template.new_zeros(shape))


def halve(products: Tensor, dim: int) -> Tensor:
    """Sum over a dim: its last half is added to its first, until one element is left. Overwrites the argument."""
    num = products.shape[dim]
    while num > 1:
        half = num // 2
        products.narrow(dim, 0, half).add_(products.narrow(dim, num - half, half))
        num -= half
    return products.select(dim, 0).contiguous()


def decode_deterministic(call: DecodeCall, table: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """Compute absorbed MLA of some query tokens, each by itself: a lane's splits in order, then the tree over the
    lanes.

    Args:
        call: Call with num_tile_lanes.
        table: Block ids of each token's request [N, max_blocks], int32.
    """
    num_tile_lanes, dtype = call.num_tile_lanes, call.out_dtype
    assert num_tile_lanes is not None
    assert call.q_pe is not None
    q = torch.cat([call.q, call.q_pe], -1)[tokens].to(dtype)[:, None, :, None]
    seq_lens = call.seq_lens[tokens]
    rows = (q.shape[0], num_tile_lanes, q.shape[2])
    merged = new_sums(rows, call.kv_lora_rank, q).result()
    round_keys = num_tile_lanes * TILE
    num_rounds = -(-int(seq_lens.max()) // round_keys) if len(seq_lens) else 0
    sums = new_sums(rows, call.kv_lora_rank, q)
    for index in range(num_rounds):
        positions = index * round_keys + torch.arange(round_keys, device=q.device)
        valid = (positions < seq_lens[:, None]).unflatten(1, (num_tile_lanes, TILE))
        # Keys after a token's last, and entries of the table after its last block, are undefined.
        blocks = table[:, (positions // call.block_size).clamp(max=table.shape[1] - 1)].clamp(0, len(call.kv_cache) - 1)
        stored = call.kv_cache[blocks.to(torch.int64), positions % call.block_size]
        kv = formats.to_latents(stored, call.kv_lora_rank, call.kv_scale, dtype).unflatten(1, (num_tile_lanes, TILE))
        kv = kv.masked_fill(~valid[..., None], 0.0)[:, :, None]  # unwritten slots may hold NaN, and 0 x NaN is NaN
        scores = (halve(q * kv, -1) * call.softmax_scale).masked_fill(~valid[:, :, None], -torch.inf)
        sums = sums.add_tile(scores, kv[..., : call.kv_lora_rank])
        if (index + 1) % SPLIT_TILES == 0 or index == num_rounds - 1:
            merged = merge_pair(*merged, *sums.result())
            sums = new_sums(rows, call.kv_lora_rank, q)
    out, lse = merged
    return merge_tree(out.transpose(0, 1), lse.transpose(0, 1))


def prefill_deterministic(call: DeterministicPrefillCall, out: Tensor, lse: Tensor, sums: Sums) -> None:
    """Add a chunk of keys to the sums of each query [T, h]; write out and lse of requests whose last keys these are.

    Args:
        out, lse: Output [T, h, V] in q's dtype, and [T, h] float32. Rows of no request stay as they are.
        sums: Sums over the chunks before; requests at position 0 begin anew.
    """
    dtype, firsts = sums.acc.dtype, zip(call.query_position.tolist(), call.key_position.tolist(), strict=True)
    query_start, key_start = call.query_start_loc.tolist(), call.key_start_loc.tolist()
    for request, (query_position, key_position) in enumerate(firsts):
        queries, keys = slice(*query_start[request : request + 2]), slice(*key_start[request : request + 2])
        if keys.start == keys.stop:
            continue
        if key_position == 0:
            for part, fill in zip(sums, (0.0, -torch.inf, 0.0), strict=True):
                part[queries] = fill
        positions = query_position + torch.arange(queries.stop - queries.start, device=out.device)
        k_pe = call.k_pe[keys, None].expand(-1, call.k_nope.shape[1], -1)
        k, v = torch.cat([call.k_nope[keys], k_pe], -1).to(dtype), call.v[keys].to(dtype)
        for first in range(0, len(k), TILE):
            # Queries before a tile see none of its keys.
            begin = queries.start + max(0, key_position + first - query_position)
            num_rows = max(1, MAX_PRODUCTS // (TILE * k.shape[1] * k.shape[2]))
            for start in range(begin, queries.stop, num_rows):
                rows = slice(start, min(start + num_rows, queries.stop))
                seen = positions[rows.start - queries.start : rows.stop - queries.start] - key_position - first
                tile = slice(first, first + TILE)
                _add_keys(call.q[rows].to(dtype), k[tile], v[tile], call.softmax_scale, seen, rows, sums)
        if key_position + len(k) == query_position + len(positions):
            result = Sums(*(part[queries] for part in sums)).result()
            out[queries], lse[queries] = result[0].to(out.dtype), result[1]


def _add_keys(q: Tensor, k: Tensor, v: Tensor, scale: float, last: Tensor, rows: slice, sums: Sums) -> None:
    """Add a tile of keys, padded if it is the last, to the sums of some queries.

    Args:
        last: Last key of the tile that each query sees [N]; TILE or more for all keys.
    """
    padding = 0, 0, 0, 0, 0, TILE - len(k)
    k, v = (F.pad(each, padding).transpose(0, 1) for each in (k, v))
    scores = halve(q[:, :, None] * k, -1) * scale
    hidden = torch.arange(TILE, device=q.device) > last[:, None]
    added = Sums(*(part[rows] for part in sums)).add_tile(scores.masked_fill(hidden[:, None], -torch.inf), v)
    for part, new in zip(sums, added, strict=True):
        part[rows] = new
