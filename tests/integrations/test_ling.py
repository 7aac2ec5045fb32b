"""Ling-3.0's bounds of activations, by layer and kind of expert, against transformers' model with the bounds added."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.integrations.test_transformers import check, make_cases, rewrite_config
from tests.support.models import STATE_FAMILIES, save_tiny

pytestmark = pytest.mark.skipif("bailing_hybrid" not in STATE_FAMILIES, reason="needs a transformers with Ling")
ROUTED, SHARED = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"


class Experts(nn.Module):
    """transformers' experts with the bound of vLLM's and SGLang's models; a limit of 0 is none."""

    def __init__(self, experts: Any, limit: float) -> None:
        super().__init__()
        self.experts, self.limit = experts, limit

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eoh->teo", x, self.experts.gate_up_proj).chunk(2, -1)
        gate = functional.silu(gate)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        rows = torch.einsum("tei,ehi->teh", gate * up, self.experts.down_proj)
        return (rows.gather(1, ids[..., None].expand(-1, -1, x.shape[1])) * weights[..., None]).sum(1)


def bound_shared(mlp: Any, limit: float) -> None:
    """Give transformers' shared experts a bound."""
    if limit:
        mlp.act_fn.register_forward_hook(lambda _, __, gate: gate.clamp(max=limit))
        mlp.up_proj.register_forward_hook(lambda _, __, up: up.clamp(-limit, limit))


def test_bounds_of_each_layer(tmp_path: Path) -> None:
    reference = save_tiny("bailing_hybrid", tmp_path)
    # Layer 0 has no experts; the others have a bound for either kind, for both, or the same for both.
    routed, shared = [0.1, 0, 0.3, 0.2], [0.1, 0.4, 0, 0.2, 9.0]
    for layer, of_routed, of_shared in zip(reference.model.layers[1:], routed[1:], shared[1:], strict=False):
        layer.mlp.experts = Experts(layer.mlp.experts, of_routed)
        bound_shared(layer.mlp.shared_experts, of_shared)
    rewrite_config(tmp_path, {ROUTED: routed, SHARED: shared, "pad_token_id": 0})
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("a2a",)))
