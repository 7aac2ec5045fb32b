"""Gated linear units, the activation of MLPs and experts: silu(gate) * up, with bounds."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dcpmla.operators import operator
from dcpmla.parallel.fp8 import AnyRows, QuantizedRows, empty_codes, quantize_rows


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


def activate(gate: Tensor, up: Tensor, glu: Glu) -> Tensor:
    """Return a gated linear unit of floats in one shape."""
    if glu.is_smooth:
        return _bend(gate, glu.gate_bound) * gate.sigmoid() * _bend(up, glu.up_bound)
    gate = gate if glu.gate_bound is None else gate.clamp(max=glu.gate_bound)
    up = up if glu.up_bound is None else up.clamp(-glu.up_bound, glu.up_bound)
    return functional.silu(gate) * up


def _bend(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else bound * torch.tanh(x / bound)


def activate_rows(gate_up: Tensor, glu: Glu, quantizes: bool = False) -> AnyRows:
    """Return a gated linear unit [T, I] of gate_up [T, 2 I], in float32 at least, rounded once.

    Args:
        quantizes: Whether to return `quantize_rows` of it instead; I must be a multiple of 128 then.
    """
    out, *codes = _activate_rows(gate_up, glu, quantizes)
    return QuantizedRows(*codes) if quantizes else out


def _empty(gate_up: Tensor, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    return gate_up.new_empty(num_rows, 0 if quantizes else width), *empty_codes(gate_up[:, :width], quantizes)


@operator("glu", kernel="dcpmla.model.kernels.glu:activate_rows", fake=_empty)
def _activate_rows(gate_up: Tensor, glu: Glu, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, codes and scales; either the first or the others have no columns."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    out = activate(gate, up, glu).to(gate_up.dtype)
    return (out.new_empty(len(out), 0), *quantize_rows(out)) if quantizes else (out, *empty_codes(out, False))
