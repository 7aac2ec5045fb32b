"""Triton kernels of routers with their launchers; `model/router.py` specifies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dcpmla.model.router import Router

_EPSILON = tl.constexpr(1e-20)


@triton.jit(do_not_specialize=["num_tokens"])
def logits_kernel(
    x_ptr, weight_ptr, out_ptr, num_tokens, num_experts, TERMS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Multiply every token by an expert's weights, one program per expert."""
    expert = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    weights = tl.zeros([COLUMNS], tl.float32)
    for term in tl.static_range(TERMS):
        row = term * num_experts + expert
        weights += tl.load(weight_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    for token in range(num_tokens):
        x = tl.load(x_ptr + token * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * num_experts + expert, tl.sum(x * weights))


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `model.router.router_logits` of a few tokens in one kernel."""
    num_tokens, (num_terms, num_experts, width) = len(x), weight.shape
    out = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(width)
    logits_kernel[(num_experts,)](
        x.contiguous(),
        weight.contiguous(),
        out,
        num_tokens,
        num_experts,
        TERMS=num_terms,
        WIDTH=width,
        COLUMNS=columns,
        num_warps=8,
    )
    return out


@triton.jit
def _rank_key(choice, index):
    """Return int64 keys in the order of choice [.., N], and of equal ones of falling index; all above -2^63."""
    bits = choice.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # a negative number's key falls as its magnitude grows
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - index)


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    factor,
    unchosen_score,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    SCORING: tl.constexpr,
    TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
):
    """Choose one token's experts, from scores [GROUPS, GROUP]; these and OUT are powers of two, with padding."""
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    NEVER: tl.constexpr = -(2**63)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    expert = group[:, None] * SIZE + member[None, :]
    is_expert = (group < NUM_GROUPS)[:, None] & (member < SIZE)[None, :]
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=is_expert, other=-float("inf"))
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORING == "sqrtsoftplus":
        rest = tl.exp(-tl.abs(logits))
        series = rest * (1.0 - rest * (0.5 - rest / 3.0))  # log(1 + rest), where adding 1 would lose most of it
        rest = tl.where(rest < 0.01, series, tl.log(1.0 + rest))
        scores = tl.sqrt(tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest)
    else:
        scores = tl.exp(logits - tl.max(logits))
        scores = scores / tl.sum(scores)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    choice = tl.where((choice == choice) & is_expert, choice, -float("inf"))
    if TOPK_GROUPS < NUM_GROUPS:
        best = tl.max(choice, 1)
        if TOP2:
            first = tl.min(tl.where(choice == best[:, None], member[None, :], GROUP), 1)
            best += tl.max(tl.where(member[None, :] == first[:, None], -float("inf"), choice), 1)
        keys = tl.where(group < NUM_GROUPS, _rank_key(best, group), NEVER)
        chosen = tl.zeros([GROUPS], tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            is_best = keys == tl.max(keys)
            chosen = tl.where(is_best, 1, chosen)
            keys = tl.where(is_best, NEVER, keys)
        choice = tl.where((chosen == 1)[:, None], choice, unchosen_score)
    keys = tl.where(is_expert, _rank_key(choice, expert), NEVER)
    column = tl.arange(0, OUT)
    ids, weights = NUM_EXPERTS + column - TOP_K, tl.zeros([OUT], tl.float32)
    for i in tl.static_range(TOP_K):
        is_best = keys == tl.max(tl.max(keys, 1))
        keys = tl.where(is_best, NEVER, keys)
        ids = tl.where(column == i, tl.sum(tl.sum(tl.where(is_best, expert, 0), 1)), ids)
        weights = tl.where(column == i, tl.sum(tl.sum(tl.where(is_best, scores, 0.0), 1)), weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights) + _EPSILON)
    weights = tl.where(column < TOP_K, weights * factor, 1.0)
    at = token * (TOP_K + NUM_SHARED) + column
    tl.store(ids_ptr + at, ids, mask=column < TOP_K + NUM_SHARED)
    tl.store(weights_ptr + at, weights, mask=column < TOP_K + NUM_SHARED)


def route(logits: Tensor, bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """Compute `model.router.route` in one kernel."""
    num_tokens, num_experts = logits.shape
    width = router.top_k + router.num_shared
    ids = torch.empty(num_tokens, width, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, width, dtype=torch.float32, device=logits.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits.contiguous(),
            None if bias is None else bias.contiguous(),
            ids,
            weights,
            router.routed_scaling_factor,
            router.unchosen_score,
            NUM_EXPERTS=num_experts,
            NUM_GROUPS=router.num_groups,
            TOPK_GROUPS=router.topk_groups,
            TOP_K=router.top_k,
            NUM_SHARED=router.num_shared,
            SCORING=router.scoring,
            TOP2=router.group_score == "top2_sum",
            RENORMALIZE=router.renormalize,
            GROUPS=triton.next_power_of_2(router.num_groups),
            GROUP=triton.next_power_of_2(num_experts // router.num_groups),
            OUT=triton.next_power_of_2(width),
            num_warps=1,
        )
    return ids, weights
