"""Gated linear units in float64, by torch's own functions."""

from torch import Tensor
from torch.nn import functional

from dcpmla.model.glu import SWIGLU, Glu

GLUS = (SWIGLU, Glu(0.4, 0.4), Glu(4.0, 25.0, is_smooth=True), Glu(0.5, is_smooth=True))  # Kimi-K3's is the third


def glu_of(gate: Tensor, up: Tensor, glu: Glu) -> Tensor:
    """Return a gated linear unit in float64."""
    gate, up = gate.double(), up.double()
    if glu.is_smooth:
        assert glu.gate_bound is not None
        bounded = up if glu.up_bound is None else glu.up_bound * (up / glu.up_bound).tanh()
        return glu.gate_bound * (gate / glu.gate_bound).tanh() / (1 + (-gate).exp()) * bounded
    if glu.gate_bound is not None and glu.up_bound is not None:
        gate, up = gate.clamp(max=glu.gate_bound), up.clamp(-glu.up_bound, glu.up_bound)
    return functional.silu(gate) * up
