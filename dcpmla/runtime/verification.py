"""The outcome of a step's drafts, found on the device."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.upload import upload_once


class Verified(NamedTuple):
    """The outcome of a step's drafts, [n] int64 each on the device: of every request that gets new tokens.

    Attributes:
        num_accepted, num_rejected: Numbers of drafts.
        newest_at: Index, among the step's new tokens, of the last one that the request keeps.
        newest: The token at that index.
    """

    num_accepted: Tensor
    num_rejected: Tensor
    newest_at: Tensor
    newest: Tensor


class Compared(NamedTuple):
    """The numbers whose equality accepts a draft, int64 on the device.

    Attributes:
        drafts: [sum of nums], request after request.
        sampled: [sum of nums + n], a number for each draft of a request, and one after its last.
    """

    drafts: Tensor
    sampled: Tensor


def verify(drafts: Tensor, sampled: Tensor, nums: Sequence[int], compared: Compared, report: Tensor) -> Verified:
    """Accept the drafts of each request up to the first that is not the token sampled at its position. Nothing waits
    for the device.

    Each draft is thus accepted with its probability under sampling, and the tokens equal one-at-a-time sampling:
    rejection sampling of deterministic drafts, with the random numbers that plain decoding draws.

    Args:
        drafts, sampled: Tokens, in the layout of `compared`.
        nums: [n] number of drafts of each request.
        report: [n + sum of nums] int64 output: the number of accepted drafts of each request, then the drafts.
    """
    first = tuple(accumulate((1 + num for num in nums[:-1]), initial=0))
    starts, nums_there = upload_once((first, tuple(nums)), sampled.device)
    if sampled.is_cuda:
        from dcpmla.runtime.kernels import verification  # triton exists on Linux only

        return Verified(*verification.verify(drafts, sampled, starts, nums_there, compared, report))
    num_accepted = []
    for start, num, draft in zip(first, nums, accumulate(nums, initial=0), strict=False):
        is_right = compared.drafts[draft : draft + num] == compared.sampled[start : start + num]
        num_accepted.append(int(is_right.cumprod(0).sum()))
    report[: len(nums)], report[len(nums) :] = torch.tensor(num_accepted), drafts
    at = starts + report[: len(nums)]
    return Verified(report[: len(nums)], nums_there - report[: len(nums)], at, sampled[at])
