"""Experts inside decode graphs: what transformers computes, with nothing read back to the host."""

import pytest
import torch

from dcpmla.integrations.static_experts import _gathered, _grouped, compute_experts, static_experts
from tests.support.models import random_model, tiny_config


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_static_experts(family: str) -> None:
    """Both ways against transformers' own; routes elsewhere (expert parallelism) count for nothing, whatever their rows
    hold.
    """
    model = random_model(tiny_config(family))
    experts = next(module for name, module in model.named_modules() if name.endswith(".experts"))
    num_experts, generator = experts.down_proj.shape[0], torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 48, generator=generator)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:3] for _ in range(7)])
    weights = torch.rand(7, 3, generator=generator)
    assert experts.gate_up_proj is not None
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[:num_experts])
    with torch.no_grad():
        expected = experts(hidden, ids, weights)
        torch.testing.assert_close(compute_experts(experts, hidden, ids, weights), expected, atol=1e-5, rtol=1e-5)
        elsewhere = ids.masked_fill(ids == 1, num_experts)
        grouped, gathered = (compute(experts, hidden, elsewhere) for compute in (_grouped, _gathered))
        torch.testing.assert_close(
            grouped[elsewhere < num_experts], gathered[elsewhere < num_experts], atol=1e-5, rtol=1e-5
        )
        if family == "longcat_flash":
            expected = (
                expected
                - experts(hidden, ids, weights.masked_fill(ids != 1, 0))
                + hidden * (weights * (ids == 1)).sum(1, keepdim=True)
            )
        else:
            expected = expected - experts(hidden, ids, weights.masked_fill(ids != 1, 0))
        torch.testing.assert_close(compute_experts(experts, hidden, elsewhere, weights), expected, atol=1e-5, rtol=1e-5)


def test_experts_are_static_inside_decodes_alone() -> None:
    experts = [torch.nn.Module(), torch.nn.Module()]
    inside = []

    def fail() -> None:
        with static_experts(experts):
            inside.extend(module.compute_statically for module in experts)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [True, True]
    assert not any(module.compute_statically for module in experts)
