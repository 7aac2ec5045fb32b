"""Masks of allowed tokens on logits, and drafts that they reject."""

import numpy as np
import pytest
import torch

from dcpmla.runtime.host_copy import HostCopy
from dcpmla.runtime.masks import NO_TOKEN, Masked, _masked


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masks_are_applied_to_their_rows_alone(device: str) -> None:
    """More rows than are masked at once, a vocabulary of no whole number of words, and a mask that is wider."""
    rng, logits = np.random.default_rng(3), torch.randn(150, 1000, device=device)
    rows = rng.permutation(150)[:131]
    bits = rng.integers(0, 1 << 32, (131, 33), dtype=np.uint32)
    expected = logits.cpu().clone()
    for row, own in zip(rows, bits, strict=True):
        allowed = np.unpackbits(own.view(np.uint8), bitorder="little")[:1000]
        expected[row, allowed == 0] = -torch.inf
    before = logits.clone()
    assert torch.equal(_masked(logits, rows, bits).cpu(), expected)
    assert torch.equal(logits, before)
    drafts = HostCopy(torch.arange(5, device=device))
    assert drafts.wait() == [0, 1, 2, 3, 4]
    rejected = Masked(logits, [1, 3]).reject(torch.arange(4, device=device))
    assert rejected.tolist() == [0, NO_TOKEN, 2, NO_TOKEN]
