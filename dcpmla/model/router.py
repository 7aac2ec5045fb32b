"""Routers of mixture-of-experts layers: the choice of a token's experts and their weights."""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from dcpmla.fields import check_fields, one_of, rules_of
from dcpmla.parallel.fixed import fixed_linear

_FEW_TOKENS = 8  # limit of our kernel; logits of more tokens are a matrix product
_EPSILON = 1e-20  # added to the sum before renormalization, as in transformers


@dataclass(frozen=True, kw_only=True)
class Router:
    """A family's way from logits to experts.

    DeepSeek-V3, V3.2, Kimi-K2, GLM: sigmoid, top2_sum; DeepSeek-V2: softmax, max; Mistral-4: softmax, top2_sum;
    LongCat: softmax, one group; DeepSeek-V4: sqrtsoftplus, one group; A.X-K2: DeepSeek-V3's with unchosen_score 0.

    Attributes:
        scoring: "sigmoid", "softmax" or "sqrtsoftplus", the root of softplus, of the logits.
        top_k: Number of routed experts per token.
        num_groups, topk_groups: Experts come from the best topk_groups of num_groups groups of equal size; 1, 1: none.
        group_score: Score of a group: "max", its best, or "top2_sum", the sum of its two best.
        unchosen_score: Score + bias of experts of other groups in the choice: -inf, or 0 in A.X-K2, where they precede
            experts of a chosen group whose score + bias is negative.
        renormalize: Whether weights are divided by their sum.
        routed_scaling_factor: Final factor of the weights.
        num_shared: Number of shared experts, with ids from E on, which every token takes with weight 1.
    Raises:
        ValueError: An unknown choice, or topk_groups outside 1 to num_groups.
    """

    scoring: Annotated[str, one_of(("sigmoid", "softmax", "sqrtsoftplus"))]
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Annotated[str, one_of(("max", "top2_sum"))] = "max"
    unchosen_score: float = -math.inf
    renormalize: bool = False
    routed_scaling_factor: float = 1.0
    num_shared: int = 0

    def __post_init__(self) -> None:
        check_fields(rules_of(Router), vars(self))
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"topk_groups is {self.topk_groups}; expected 1 to num_groups, which is {self.num_groups}")


def split_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Split a router's weight [E, H] into terms [S, E, H] of dtype that sum to it; S is 1 if dtype holds it exactly.

    LongCat's routers are published in float32, and so are routers of models saved by transformers 5.24 and later.
    Tensor cores have no product of float32 and 16 bits, but three bfloat16 hold all 24 bits of a float32 (three float16
    everything from 6e-8 up).
    """
    first = weight.to(dtype)
    rest = weight.float() - first
    if not rest.any():
        return first[None]
    second = rest.to(dtype)
    return torch.stack([first, second, (rest - second).to(dtype)])


def router_logits(x: Tensor, weight: Tensor, is_deterministic: bool = False) -> Tensor:
    """Return x W^T [T, E] in float32, where products of 16 bits are exact: transformers, which widens both factors
    first, differs only in the order of the sum.

    Args:
        x: [T, H]; weight: [S, E, H], terms of W in x's dtype (`split_weight`).
        is_deterministic: Whether a row's bits depend on no other row (`parallel.fixed`).
    """
    if is_deterministic and x.is_cuda and x.dtype != torch.float32:
        terms = fixed_linear(x, weight.flatten(0, 1), torch.float32).split(weight.shape[1], 1)
        return functools.reduce(torch.add, terms)  # in one order, which `Tensor.sum` does not promise
    if is_deterministic:
        return fixed_linear(x.float(), weight.float().sum(0), torch.float32)
    if not x.is_cuda or x.dtype == torch.float32:
        return x.float() @ weight.float().sum(0).T
    if len(x) <= _FEW_TOKENS:
        from dcpmla.model.kernels import router as kernels  # triton exists on Linux only

        return kernels.router_logits(x, weight)
    logits = torch.mm(x, weight.flatten(0, 1).T, out_dtype=torch.float32)
    return logits if len(weight) == 1 else logits.unflatten(1, weight.shape[:2]).sum(1)


def route(logits: Tensor, bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Experts are chosen by score + bias and weighted by score. Among equal ones the lower id is first; groups likewise.
    Experts with a NaN score come last, as experts of unchosen groups do by default: ids are valid and distinct for any
    logits.

    Args:
        logits: float32 [T, E].
        bias: float32 [E], added for the choice alone; None: no bias.
    Returns:
        expert_ids int32 and expert_weights float32, both [T, top_k + num_shared]: the best first, shared ones last.
    Raises:
        ValueError: Shapes or dtypes do not match, or top_k exceeds the number of experts.
    Source: the routers in transformers' models of the families that `Router` lists.
    """
    _check(logits, bias, router)
    if logits.is_cuda:
        from dcpmla.model.kernels import router as kernels

        return kernels.route(logits, bias, router)
    scores = _score(logits, router.scoring)
    choice = scores if bias is None else scores + bias
    choice = choice.masked_fill(choice.isnan(), -torch.inf)
    if router.topk_groups < router.num_groups:
        groups = choice.unflatten(1, (router.num_groups, -1))
        group_scores = groups.amax(-1) if router.group_score == "max" else groups.topk(2).values.sum(-1)
        is_chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
            1, _best(group_scores, router.topk_groups), True
        )
        choice = groups.masked_fill(~is_chosen[..., None], router.unchosen_score).flatten(1)
    return weigh(logits, _best(choice, router.top_k), router)


def weigh(logits: Tensor, ids: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Complete `route` for chosen experts [T, top_k] int64."""
    num_experts = _check(logits, None, router)
    weights = _score(logits, router.scoring).gather(1, ids)
    if router.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + _EPSILON)
    shared = torch.arange(num_experts, num_experts + router.num_shared, device=ids.device).expand(len(logits), -1)
    weights = torch.cat([weights * router.routed_scaling_factor, weights.new_ones(shared.shape)], 1)
    return torch.cat([ids, shared], 1).int(), weights


def _score(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "sqrtsoftplus":
        return functional.softplus(logits).sqrt()
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)


def _best(scores: Tensor, count: int) -> Tensor:
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _check(logits: Tensor, bias: Tensor | None, router: Router) -> int:
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"logits is {logits.dtype} {tuple(logits.shape)}; expected float32 [T, E]")
    num_experts = logits.shape[1]
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_experts,)):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; expected float32 [{num_experts}]")
    per_group, rest = divmod(num_experts, router.num_groups)
    if rest or (router.group_score == "top2_sum" and router.topk_groups < router.num_groups and per_group < 2):
        raise ValueError(
            f"num_groups is {router.num_groups}; it must divide {num_experts} experts, into groups of 2 for top2_sum"
        )
    if router.top_k > num_experts:
        raise ValueError(f"top_k is {router.top_k}, of {num_experts} experts")
    return num_experts
