"""Sums of exponentials that do not depend on their order, and the order of logits."""

import torch

from dcpmla.runtime.draws import log_sums, ranks_of


def test_log_sums() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 5000) * torch.tensor([0, 1, 3, 10, 30, 100, 1e30])[:, None]
    sums = log_sums(logits)
    torch.testing.assert_close(sums, logits.double().logsumexp(-1, keepdim=True).float(), rtol=3e-7, atol=3e-7)
    assert torch.equal(log_sums(logits[:, torch.randperm(5000)]), sums)
    logits[0, 3], logits[1, 4] = torch.nan, torch.inf
    assert not log_sums(logits[:2]).isfinite().any()


def test_ranks_are_in_order_and_zeros_are_equal() -> None:
    logits = torch.tensor([[torch.inf, 3.0, 1e-45, 0.0, -0.0, -1e-45, -2.0, -torch.inf]])
    ranks = ranks_of(logits)[0].tolist()
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 7
    assert ranks[0] >= 0
    assert ranks[-1] < 1 << 32
