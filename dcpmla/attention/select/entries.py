"""The part of a step that the compressor reads: its tokens' places in entries, and the layout of entries in a cache.

An entry (a pool) represents consecutive tokens of a request.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.ownership import Owner


class PoolUpdate(NamedTuple):
    """The part of each request's tokens that is added to its sums at once.

    Attributes:
        positions, request: Positions [T] int64 and requests [T] int32 of all tokens of the step; a position of -1 is no
            token.
        first_position, end: Bounds of its tokens [num_reqs] int32, equal if it has none.
        source, target: Indices of the sums before and after these tokens, [num_reqs] int32; negative for padding.
    """

    positions: Tensor
    request: Tensor
    first_position: Tensor
    end: Tensor
    source: Tensor
    target: Tensor


class EntryLayout(NamedTuple):
    """The layout of a step's entries in a cache.

    Attributes:
        cos_sin: Angles of the entry that each token belongs to [T, R] float32; None for entries without positions.
        block_table: Block table [num_reqs, max_blocks] int32, in blocks of the cache.
        owner: This rank, as the owner of entries.
    """

    cos_sin: Tensor | None
    block_table: Tensor
    entries_per_block: int
    owner: Owner


class Pooling(NamedTuple):
    """A step's tokens, and the cache that their entries are written into.

    Attributes:
        pairs: Values, then gates of each token, projected from the hidden states, [T, 2 A D]; A = 2 if entries overlap
            (first the part for the next span's entry), else 1. Contiguous columns. Spans of one token may lack gates.
        bias: Bias of the gates by their token's position in its span, [ratio, A D] float32.
        norm_weight: Weight of the entries' RMSNorm, [D] float32; None for no norm.
        eps: Epsilon of the norm.
        sums: Sums of entries in progress, own and next, float32 [num_sums, A, 3, D]; written.
        cache: Rows of a layer, or with is_index an indexer's keys, whose rotated columns come first; written.
        layout: Layout of the entries.
        hadamard: Whether index keys are transformed (`norm_rope_index_keys`).
        latents, slots: Entries that are written as rows, before RoPE [T, D], and their slots [T] int64, each at the
            first token of its span in the part; others stay. None if nothing reads them.
    """

    pairs: Tensor
    bias: Tensor
    norm_weight: Tensor | None
    eps: float
    sums: Tensor
    cache: Tensor
    layout: EntryLayout
    is_index: bool
    hadamard: bool = False
    latents: Tensor | None = None
    slots: Tensor | None = None


def pool_updates(step: StepMetadata, positions: Tensor) -> tuple[PoolUpdate, ...]:
    """Return the parts of a step: one if no token may be rejected. Otherwise each of a decode's last num_sums tokens
    ends a part, because a later step may continue after any of them. Prefills are in the first part.

    A request has num_sums copies of its sums: one, and one for each draft that may be rejected.

    Args:
        step: Step over a cache with sums.
        positions: Position of each token [T], int64; -1 for a token outside all entries.
    """
    decode, num_sums = step.decode, step.layout.traits.plan.num_copies
    tokens, first, end, states = (positions, step.tokens.request), step.table.begin, step.table.end, step.table.states
    if num_sums == 1:
        return (PoolUpdate(*tokens, first, end, states, states),)
    sums, num_decodes, num_parts = states * num_sums, 0, 1
    if decode is not None:
        is_cut = decode.request_index is not None  # max_query_len is then the width of segments, not of requests
        num_decodes, num_parts = len(decode.block_table), num_sums if is_cut else min(decode.max_query_len, num_sums)
    parts = []
    for num_later in reversed(range(num_parts)):
        part_end = torch.cat([torch.maximum(first + 1, end - num_later).minimum(end)[:num_decodes], end[num_decodes:]])
        source, target = sums + (first - 1) % num_sums, sums + (part_end - 1) % num_sums
        parts.append(PoolUpdate(*tokens, first, part_end, source, target))
        first = part_end
    return tuple(parts)
