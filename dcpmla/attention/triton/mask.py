"""Triton kernel that turns selected positions into bits, with its launcher (`attention/backends/mask.py`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.triton.ragged import find_tile


@triton.jit(
    do_not_specialize=["num_reqs", "num_keys", "num_words"],
    do_not_specialize_on_alignment=["positions_ptr", "query_start_loc_ptr", "first_position_ptr"],
)
def selection_mask_kernel(
    positions_ptr,
    query_start_loc_ptr,
    first_position_ptr,
    words_ptr,
    num_reqs,
    num_keys,
    num_words,
    stride,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the bits of a token's selected positions in words that hold zeros; one program per token."""
    token = tl.program_id(0)
    request, _ = find_tile(query_start_loc_ptr, num_reqs, token, 1)
    first = tl.load(first_position_ptr + request)
    column = tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + token.to(tl.int64) * stride + column, mask=column < TOPK, other=-1)
    key = position - first
    is_here = (position >= 0) & (key >= 0) & (key < num_keys)
    tl.atomic_or(words_ptr + token.to(tl.int64) * num_words + key // 32, 1 << key % 32, mask=is_here, sem="relaxed")


def selection_mask(positions: Tensor, query_start_loc: Tensor, first_position: Tensor, num_keys: int) -> Tensor:
    """Compute `mask.selection_mask` in one kernel, without synchronizing with the host."""
    num_tokens, topk = positions.shape
    words = torch.zeros(num_tokens, triton.cdiv(num_keys, 32), dtype=torch.int32, device=positions.device)
    selection_mask_kernel[(num_tokens,)](
        positions,
        query_start_loc,
        first_position,
        words,
        len(first_position),
        num_keys,
        words.shape[1],
        positions.stride(0),
        TOPK=topk,
        BLOCK=triton.next_power_of_2(topk),
        num_warps=8,
    )
    return words
