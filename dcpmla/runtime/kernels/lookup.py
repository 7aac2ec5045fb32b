"""The kernel of prompt lookup, with its launcher; `runtime/ngram.py: find_following` specifies it."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dcpmla.runtime.ngram import Texts

_TILE = 2048  # tokens
_MOST_PARTS = 64  # limit of programs per text
_WARPS = 8


# A new offset of tokens in a message, or a new width of texts, must not trigger a compilation while requests wait.
@triton.jit(
    do_not_specialize=["width"], do_not_specialize_on_alignment=["orders_ptr", "sampled_ptr", "num_accepted_ptr"]
)
def lookup_kernel(
    texts_ptr,
    width,
    lengths_ptr,
    best_ptr,
    arrived_ptr,
    orders_ptr,
    sampled_ptr,
    num_accepted_ptr,
    drafts_ptr,
    NUM_WANTED: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Append a request's tokens under way to its text, and look up the continuation of its last ones: each part scans
    some tiles of the text, and the last part to finish takes the best match.
    """
    request, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    order_ptr = orders_ptr + request * 4
    row, start, num_sampled = tl.load(order_ptr), tl.load(order_ptr + 1), tl.load(order_ptr + 2)
    verified = tl.load(order_ptr + 3)
    text_ptr = texts_ptr + row * width
    length = tl.load(lengths_ptr + row)
    index = tl.arange(0, TOKENS)
    is_sampled = index < num_sampled
    sampled = tl.load(sampled_ptr + start + index, mask=is_sampled, other=0)
    tl.store(text_ptr + length + index, sampled.to(tl.int32), mask=is_sampled)
    length += (num_sampled > 0).to(tl.int64)
    length += tl.load(num_accepted_ptr + verified, mask=verified >= 0, other=0)
    tl.debug_barrier()  # the stored tokens are read below; all parts store the same

    best = tl.full((), -1, tl.int64)
    for first in range(part * TILE, length - 1, num_parts * TILE):
        ends = first + tl.arange(0, TILE)
        is_same = ends < length - 1
        num_same = tl.zeros((TILE,), tl.int64)
        for back in tl.static_range(LONGEST):
            last = tl.load(text_ptr + length - 1 - back, mask=length - 1 >= back, other=-1)
            # Loads do not depend on the tokens after them, so that they do not wait for each other.
            token = tl.load(text_ptr + ends - back, mask=(ends < length - 1) & (ends >= back), other=-2)
            is_same = is_same & (token == last)
            num_same += is_same.to(tl.int64)
        scores = tl.where(num_same >= SHORTEST, (num_same << 32) + ends, -1)
        best = tl.maximum(best, tl.max(scores, 0))

    tl.atomic_max(best_ptr + row, best, sem="relaxed")
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == num_parts - 1:
        best = tl.atomic_xchg(best_ptr + row, -1, sem="relaxed")
        tl.store(arrived_ptr + row, 0)
        tl.store(lengths_ptr + row, length)  # all have read it
        end = (best & 0xFFFFFFFF) + tl.zeros((TOKENS,), tl.int64)
        places = end + 1 + index % tl.maximum(length - 1 - end, 1)
        is_found = (end != 0xFFFFFFFF) & (index < NUM_WANTED)
        found = tl.load(text_ptr + places, mask=is_found, other=-1)
        tl.store(drafts_ptr + request * NUM_WANTED + index, found.to(tl.int64), mask=index < NUM_WANTED)


def lookup(
    texts: "Texts",
    orders: Tensor,
    sampled: Tensor,
    num_accepted: Tensor,
    num_wanted: int,
    shortest: int,
    longest: int,
    tile: int = _TILE,
) -> Tensor:
    """Append tokens under way to texts, and look up the continuations of the last ones.

    Args:
        texts: Texts of all requests; rows named in `orders` grow.
        orders: [n, 4] int64: each request's row in texts, the index of its first token under way in `sampled`, the
            number of these tokens, and its index in num_accepted, -1 for none.
        sampled, num_accepted: [any] int64.
    Returns:
        [n, num_wanted] int64; -1 for a text without a match of the shortest length.
    """
    drafts = torch.empty(len(orders), num_wanted, dtype=torch.int64, device=orders.device)
    num_parts = min(triton.cdiv(texts.token_ids.shape[1], tile), _MOST_PARTS)
    lookup_kernel[(len(orders), num_parts)](
        texts.token_ids,
        texts.token_ids.stride(0),
        texts.lengths,
        texts.best,
        texts.arrived,
        orders,
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
