"""SGLang's kernels of speculative decoding that it has compiled for CPUs, in plain torch, for drafts that are a chain;
by their names in `sgl_kernel`.
"""

import torch
from torch import Tensor


def fill_bonus_tokens_cpu(accepted: Tensor, lens: Tensor, bonus: Tensor, stride: int) -> None:
    """Fill the last accepted token of each request."""
    bonus.copy_(accepted.flatten()[torch.arange(len(lens)) * stride + lens - 1])


def assign_draft_cache_locs_contiguous_cpu(
    index: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, _: int, topk: int, num_steps: int
) -> None:
    """Fill the slots of each request's drafts."""
    columns = seq_lens[:, None] + torch.arange(topk * num_steps)
    out.copy_(req_to_token[index[:, None], columns].flatten())


def assign_extend_cache_locs_cpu(
    index: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, _: int
) -> None:
    """Fill the slots of each request's tokens from start to end."""
    slots = [req_to_token[row, first:last] for row, first, last in zip(index, start, end, strict=True)]
    out.copy_(torch.cat(slots))


def assign_req_to_token_pool_cpu(
    index: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, _: int
) -> None:
    """Write new slots into the table, for each request from start to end."""
    for row, first, last in zip(index.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last], slots = slots[: last - first], slots[last - first :]


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    num_steps: int,
    num_tokens: int,
    mode: int,
) -> None:
    """Fill positions of chains, and the number and the successor of each token."""
    numbers = torch.arange(num_tokens)
    positions.copy_((seq_lens[:, None] + numbers).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(numbers + 1 < num_tokens, numbers + 1, -1))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_predict: Tensor,
    **_: Tensor,
) -> None:
    """Fill how many drafts of each request are the model's own tokens, and the tokens."""
    num_tokens = candidates.shape[1]
    target = target_predict.view_as(candidates)
    predicts.copy_(target.flatten())
    right = (candidates[:, 1:] == target[:, :-1]).long().cumprod(1).sum(1)
    accept_token_num.copy_(right)
    numbers = torch.arange(num_tokens)
    first = torch.arange(len(candidates))[:, None] * num_tokens
    accept_index.copy_(torch.where(numbers <= right[:, None], first + numbers, -1)[:, : accept_index.shape[1]])
