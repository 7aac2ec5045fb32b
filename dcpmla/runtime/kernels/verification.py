"""The kernel that verifies drafts, with its launcher; `runtime/acceptance.py: verify` specifies it."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dcpmla.runtime.acceptance import Compared


_MOST_DRAFTS = 16  # drafts per request; one compiled kernel serves any number
_PARTS = ["drafts_ptr", "sampled_ptr", "nums_ptr", "compared_drafts_ptr", "compared_sampled_ptr", "report_ptr"]


# A new alignment of these slices of larger buffers must not trigger a compilation while requests wait.
@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=_PARTS)
def verify_kernel(
    drafts_ptr,
    sampled_ptr,
    starts_ptr,
    nums_ptr,
    compared_drafts_ptr,
    compared_sampled_ptr,
    report_ptr,
    outcome_ptr,
    num_reqs,
    DRAFTS: tl.constexpr,
):
    """Verify one request's drafts."""
    request = tl.program_id(0)
    start, num = tl.load(starts_ptr + request), tl.load(nums_ptr + request)
    first = start - request  # its first draft: each earlier request has one token more than drafts
    index = tl.arange(0, DRAFTS)
    is_draft = index < num
    guess = tl.load(compared_drafts_ptr + first + index, mask=is_draft, other=0)
    token = tl.load(compared_sampled_ptr + start + index, mask=is_draft, other=0)
    num_accepted = tl.min(tl.where(is_draft & (guess == token), DRAFTS, index), 0)
    num_accepted = tl.minimum(num_accepted, num)  # all are right
    tl.store(report_ptr + request, num_accepted)
    drafts = tl.load(drafts_ptr + first + index, mask=is_draft, other=0)
    tl.store(report_ptr + num_reqs + first + index, drafts, mask=is_draft)
    tl.store(outcome_ptr + request, num - num_accepted)
    tl.store(outcome_ptr + num_reqs + request, start + num_accepted)
    tl.store(outcome_ptr + 2 * num_reqs + request, tl.load(sampled_ptr + start + num_accepted))


def verify(
    drafts: Tensor, sampled: Tensor, starts: Tensor, nums: Tensor, compared: "Compared", report: Tensor
) -> tuple[Tensor, ...]:
    """Verify drafts, as `runtime/acceptance.py: verify` documents it; return the parts of `Verified`.

    Args:
        starts, nums: [n] int64, index of each request's first token in sampled, and number of its drafts, below 16.
    """
    num_reqs = len(nums)
    outcome = nums.new_empty(3, num_reqs)
    verify_kernel[(num_reqs,)](
        drafts,
        sampled,
        starts,
        nums,
        *compared,
        report,
        outcome,
        num_reqs,
        DRAFTS=_MOST_DRAFTS,
        num_warps=1,
    )
    return report[:num_reqs], *outcome
