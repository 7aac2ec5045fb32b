"""Gated linear units, the activation of MLPs and experts: silu(gate) * up, with bounds."""

from math import exp
from typing import NamedTuple

from torch import Tensor, tanh
from torch.nn import functional


class Glu(NamedTuple):
    """A gated linear unit: gate * sigmoid(gate) * up, whose factors gate and up may have bounds.

    Attributes:
        gate_bound: Upper bound of gate; None for none. A smooth one bounds its magnitude.
        up_bound: Bound of the magnitude of up; None for none.
        is_smooth: Whether x with a bound b becomes b tanh(x / b) (SiTU, Kimi-K3) and the sigmoid takes gate as it is;
            else both are clamped first (DeepSeek-V4).
    Source: transformers' deepseek_v4; vLLM's SituAndMul.
    """

    gate_bound: float | None = None
    up_bound: float | None = None
    is_smooth: bool = False


SWIGLU = Glu()


class LayerGlus(NamedTuple):
    """The gated linear units that a layer uses in routed experts, shared experts and dense MLPs."""

    routed: Glu
    shared: Glu
    dense: Glu


def clamp_after_silu(limit: float) -> Glu:
    """Return the unit silu(gate).clamp(max=limit) * up.clamp(-limit, limit), as Ling-3.0 has it; no bounds for 0.

    silu rises wherever it is positive, so its bound is one of gate: the x above 0 with silu(x) = limit.
    """
    if limit == 0:
        return SWIGLU
    bound = limit
    for _ in range(64):  # Newton's method on x - limit (1 + exp(-x)), which is concave: it never passes the root
        bound -= (bound - limit * (1 + exp(-bound))) / (1 + limit * exp(-bound))
    return Glu(bound, limit)


def activate(gate: Tensor, up: Tensor, glu: Glu) -> Tensor:
    """Return a gated linear unit of floats in one shape."""
    if glu.is_smooth:
        return _bend(gate, glu.gate_bound) * gate.sigmoid() * _bend(up, glu.up_bound)
    gate = gate if glu.gate_bound is None else gate.clamp(max=glu.gate_bound)
    up = up if glu.up_bound is None else up.clamp(-glu.up_bound, glu.up_bound)
    return functional.silu(gate) * up


def _bend(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else bound * tanh(x / bound)
