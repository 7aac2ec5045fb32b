"""The kernel of prompt lookup, with its launcher; `runtime/ngram.py: find_following` specifies it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # tokens
_WARPS = 8


@triton.jit
def lookup_kernel(
    texts_ptr,
    width,
    columns_ptr,
    num_reqs,
    sampled_ptr,
    num_accepted_ptr,
    drafts_ptr,
    NUM_WANTED: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Append a request's tokens under way to its text, and look up what follows its last ones."""
    request = tl.program_id(0)
    text_ptr = texts_ptr + tl.load(columns_ptr + request) * width
    length = tl.load(columns_ptr + num_reqs + request)
    start = tl.load(columns_ptr + 2 * num_reqs + request)
    num_sampled = tl.load(columns_ptr + 3 * num_reqs + request)
    order = tl.load(columns_ptr + 4 * num_reqs + request)
    index = tl.arange(0, TOKENS)
    is_sampled = index < num_sampled
    sampled = tl.load(sampled_ptr + start + index, mask=is_sampled, other=0)
    tl.store(text_ptr + length + index, sampled.to(tl.int32), mask=is_sampled)
    length += (num_sampled > 0).to(tl.int64)
    length += tl.load(num_accepted_ptr + order, mask=order >= 0, other=0)
    tl.debug_barrier()  # what was stored is read below

    best = tl.full((), -1, tl.int64)
    for first in range(0, length - 1, TILE):
        ends = first + tl.arange(0, TILE)
        is_same = ends < length - 1
        num_same = tl.zeros((TILE,), tl.int64)
        for back in tl.static_range(LONGEST):
            last = tl.load(text_ptr + length - 1 - back, mask=length - 1 >= back, other=-1)
            token = tl.load(text_ptr + ends - back, mask=is_same & (ends >= back), other=-2)
            is_same = is_same & (token == last)
            num_same += is_same.to(tl.int64)
        scores = tl.where(num_same >= SHORTEST, (num_same << 32) + ends, -1)
        best = tl.maximum(best, tl.max(scores, 0))
    end = (best & 0xFFFFFFFF) + tl.zeros((TOKENS,), tl.int64)
    places = end + 1 + index % tl.maximum(length - 1 - end, 1)
    is_found = (end != 0xFFFFFFFF) & (index < NUM_WANTED)
    found = tl.load(text_ptr + places, mask=is_found, other=-1)
    tl.store(drafts_ptr + request * NUM_WANTED + index, found.to(tl.int64), mask=index < NUM_WANTED)


def lookup(
    texts: Tensor,
    columns: Tensor,
    sampled: Tensor,
    num_accepted: Tensor,
    num_wanted: int,
    shortest: int,
    longest: int,
    tile: int = _TILE,
) -> Tensor:
    """Append tokens under way to texts, and look up what follows the last ones.

    Args:
        texts: [rows, width] int32.
        columns: [5, n] int64: each request's text and its length, the first of its tokens under way among those
            sampled, how many there are, and its index in num_accepted, -1 for none.
        sampled, num_accepted: [any] int64.
    Returns:
        [n, num_wanted] int64; -1 for a text without a match of the shortest length.
    """
    num_reqs = columns.shape[1]
    drafts = torch.empty(num_reqs, num_wanted, dtype=torch.int64, device=texts.device)
    lookup_kernel[(num_reqs,)](
        texts,
        texts.stride(0),
        columns,
        num_reqs,
        sampled,
        num_accepted,
        drafts,
        NUM_WANTED=num_wanted,
        SHORTEST=shortest,
        LONGEST=longest,
        TOKENS=triton.next_power_of_2(num_wanted + 1),
        TILE=tile,
        num_warps=_WARPS,
    )
    return drafts
