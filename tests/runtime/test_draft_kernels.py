"""The kernels between a step and the next, against the functions that specify them.

They run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import random
from itertools import accumulate

import torch

from dcpmla.runtime.acceptance import Compared, verify
from dcpmla.runtime.drafts import NO_DRAFT
from dcpmla.runtime.ngram import Texts, lookup
from tests.attention.test_small_kernels import compile_for_hopper
from tests.support.kernels import on_both, run_kernels


def check_lookup(device: str) -> None:
    from dcpmla.runtime.kernels import lookup as kernels

    rng = random.Random(0)
    for num_wanted, tile in ((1, 16), (3, 32), (5, 16)):
        texts = Texts.empty(9, 60, torch.device("cpu"))
        texts.token_ids.random_(3)
        sampled, num_accepted = torch.randint(3, (40,)), torch.randint(num_wanted + 1, (3,))
        orders = [
            (8, 0, 0, -1),  # no text to look at
            (3, 0, 0, -1),
            (5, 7, 1, -1),  # a token under way
            *((order, 9 + 6 * order, 1 + num_wanted, order) for order in range(3)),  # drafts under way
        ]
        for row, length in ((8, 1), (3, 40), (5, 50), *((row, rng.randrange(2, 45)) for row in range(3))):
            texts.lengths[row] = length
        there = torch.tensor(orders)
        own_texts = Texts(*(part.to(device, copy=True) for part in texts))
        arguments = [tensor.to(device) for tensor in (there, sampled, num_accepted)]
        drafts = kernels.lookup(own_texts, *arguments, num_wanted, 3, 8, tile=tile)
        assert drafts.tolist() == lookup(texts, there, sampled, num_accepted, num_wanted).tolist()
        for own, part in zip(own_texts, texts, strict=True):
            assert torch.equal(own.cpu(), part)
        assert any(found[0] >= 0 for found in drafts.tolist())
        alone = kernels.lookup(own_texts, arguments[0][1:2], *arguments[1:], num_wanted, 3, 8, tile=tile)
        assert alone.tolist() == drafts[1:2].tolist()


def check_verification(device: str) -> None:
    from dcpmla.runtime.kernels import verification as kernels

    for nums in ([1], [3], [4, 4, 4], [0, 5, 1, 2, 8, 0, 7]):
        starts = torch.tensor([*accumulate((1 + num for num in nums[:-1]), initial=0)])
        drafts, sampled = torch.randint(NO_DRAFT, 2, (sum(nums),)), torch.randint(2, (sum(nums) + len(nums),))
        for compared in (Compared(drafts, sampled), Compared(torch.ones_like(drafts), torch.ones_like(sampled))):
            report = torch.empty(len(nums) + len(drafts), dtype=torch.int64)
            expected = verify(drafts, sampled, nums, compared, report)
            own_report = report.new_zeros(len(report)).to(device)
            arguments = [tensor.to(device) for tensor in (drafts, sampled, starts, torch.tensor(nums))]
            there = Compared(*(column.to(device) for column in compared))
            found = kernels.verify(*arguments, there, own_report)
            assert [column.tolist() for column in found] == [column.tolist() for column in expected]
            assert own_report.tolist() == report.tolist() == [*expected.num_accepted.tolist(), *drafts.tolist()]
        assert expected.num_accepted.tolist() == nums  # the last ones were all right


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_lookup, check_verification)


def test_they_compile_for_hopper() -> None:
    from dcpmla.runtime.kernels.lookup import lookup_kernel
    from dcpmla.runtime.kernels.verification import verify_kernel

    constants = {"NUM_WANTED": 3, "SHORTEST": 3, "LONGEST": 8, "TOKENS": 4, "TILE": 2048}
    compile_for_hopper(lookup_kernel, "i64", constants, texts_ptr="*i32", arrived_ptr="*i32")
    compile_for_hopper(verify_kernel, "i64", {"DRAFTS": 4})
