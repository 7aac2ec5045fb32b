"""Experts in shapes that are known before the routes are, as a CUDA graph needs them.

transformers' own ways read the routes back to the host: the loop over the experts that were hit (LongCat has no
other), and grouped matrix products of any dtype but bfloat16. Decode graphs compute experts here; all other steps
compute them as transformers does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MAX_GATHERED_BYTES = 1 << 28  # of experts' weights copied at a time, where there are no grouped matrix products
# Major capabilities: Hopper and Blackwell's data-centre GPUs. On others torch reads the sizes back.
_GROUPED_ON = (9, 10)


def prepare_experts(experts: Any) -> None:
    """Teach a module `compute_statically`, before transformers cuts it: inside whatever will be wrapped around its
    forward.
    """
    experts.compute_statically = False
    experts.forward = partial(_forward, experts, experts.forward)


@contextmanager
def static_experts(all_experts: Sequence[Any]) -> Iterator[None]:
    """Run a block in which prepared modules read nothing back to the host."""
    for experts in all_experts:
        experts.compute_statically = True
    try:
        yield
    finally:
        for experts in all_experts:
            experts.compute_statically = False


def compute_experts(experts: Any, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """Return each token's weighted sum over its experts.

    Args:
        experts: a transformers module with gate_up_proj [E, 2 I, hidden], down_proj [E, hidden, I] and act_fn; with
            zero_expert_num (LongCat), ids from E on are the identity, else they count for nothing (expert parallelism:
            another rank's).
        hidden_states: [T, hidden].
        expert_ids, expert_weights: [T, k], int64 and any float dtype.
    Returns:
        [T, hidden] in the dtype of hidden_states, sums in the dtype of the weights or wider.
    """
    is_own = expert_ids < experts.down_proj.shape[0]
    compute = _grouped if _has_grouped_mm(experts) else _gathered
    # A row that no expert of this rank computed holds anything, and 0 x NaN is NaN.
    rows = compute(experts, hidden_states, expert_ids).masked_fill(~is_own[..., None], 0)
    out = (rows * expert_weights[..., None]).sum(1)
    if hasattr(experts, "zero_expert_num"):
        out = out + experts.identity_expert(hidden_states) * expert_weights.masked_fill(is_own, 0).sum(-1, keepdim=True)
    return out.to(hidden_states.dtype)


def _forward(experts: Any, whole: Any, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    if experts.compute_statically:
        return compute_experts(experts, hidden_states, expert_ids, expert_weights)
    out: Tensor = whole(hidden_states, expert_ids, expert_weights)
    return out


def _activate(experts: Any, gate_up: Tensor) -> Tensor:
    """Return [.., I] of gates and what they gate [.., 2 I], in the module's own way where it has one (DeepSeek-V4)."""
    if hasattr(experts, "_apply_gate"):
        activated: Tensor = experts._apply_gate(gate_up)
        return activated
    gate, up = gate_up.chunk(2, -1)
    return experts.act_fn(gate) * up


def _has_grouped_mm(experts: Any) -> bool:
    """Tell whether torch's grouped matrix products run as one kernel that reads the groups' sizes on the GPU, over rows
    of whole 16 bytes.
    """
    weights = experts.down_proj
    return (
        weights.is_cuda
        and weights.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(weights.device)[0] in _GROUPED_ON
        and all(size * weights.itemsize % 16 == 0 for size in weights.shape[1:])
    )


def _grouped(experts: Any, hidden_states: Tensor, expert_ids: Tensor) -> Tensor:
    """Return [T, k, hidden], by grouped matrix products over the routes in the order of their experts; rows of ids from
    E on are undefined.
    """
    num_experts = experts.down_proj.shape[0]
    sorted_ids, order = expert_ids.flatten().sort()
    ends = torch.searchsorted(
        sorted_ids, torch.arange(num_experts, device=expert_ids.device), right=True, out_int32=True
    )
    rows = hidden_states[order // expert_ids.shape[1]]
    rows = _activate(experts, functional.grouped_mm(rows, experts.gate_up_proj.transpose(1, 2), offs=ends))
    rows = functional.grouped_mm(rows, experts.down_proj.transpose(1, 2), offs=ends)
    return torch.empty_like(rows).index_copy_(0, order, rows).unflatten(0, expert_ids.shape)


def _gathered(experts: Any, hidden_states: Tensor, expert_ids: Tensor) -> Tensor:
    """Return [T, k, hidden], each route with a copy of its expert's weights, a few tokens at a time; ids from E on get
    the last expert's.
    """
    gate_up_proj, down_proj = experts.gate_up_proj, experts.down_proj
    expert_ids = expert_ids.clamp(max=down_proj.shape[0] - 1)
    route_bytes = (gate_up_proj[0].numel() + down_proj[0].numel()) * down_proj.itemsize
    tile = max(1, _MAX_GATHERED_BYTES // (route_bytes * expert_ids.shape[1]))
    parts = []
    for ids, rows in zip(expert_ids.split(tile), hidden_states.split(tile), strict=True):
        activated = _activate(experts, torch.einsum("tkih,th->tki", gate_up_proj[ids], rows))
        parts.append(torch.einsum("tkhi,tki->tkh", down_proj[ids], activated))
    return torch.cat(parts)
