"""MLPs cut over the TP group: dense MLPs, and shared ones that every token takes in addition to its experts."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dcpmla.model.glu import Glu, activate
from dcpmla.operators import operator
from dcpmla.parallel.by_rows import by_rows
from dcpmla.parallel.formats import AnyWeight
from dcpmla.parallel.fp8 import rows_or_codes
from dcpmla.parallel.linear import Linear, Weight, read_linear
from dcpmla.parallel.quantized import AnyRows, PlainRows, QuantizedRows, empty_rows


def activate_rows(gate_up: Tensor, glu: Glu, quantizes: bool = False) -> AnyRows:
    """Return a gated linear unit [T, I] of gate_up [T, 2 I], in float32 at least, rounded once.

    Args:
        quantizes: Whether to return `quantize_rows` of it instead; I must be a multiple of 128 then.
    """
    out, *codes = _activate_rows(gate_up, glu, quantizes)
    return QuantizedRows(*codes) if quantizes else out


def _empty(gate_up: Tensor, _: Glu, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(gate_up[:, : gate_up.shape[1] // 2], quantizes)


@operator("glu", kernel="dcpmla.model.kernels.glu:activate_rows", fake=_empty)
def _activate_rows(gate_up: Tensor, glu: Glu, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return `rows_or_codes` of the unit."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return rows_or_codes(activate(gate, up, glu).to(gate_up.dtype), quantizes)


class MLPPart(NamedTuple):
    """Columns of an MLP that a rank holds, or that are one of its experts.

    Attributes:
        prefix: Prefix of its weights' names.
        size: Intermediate columns of the whole MLP.
        cut: Columns of the part.
    """

    prefix: str
    size: int
    cut: slice

    def read(self, weights: Mapping[str, Weight], hidden_size: int) -> tuple[AnyWeight, AnyWeight, AnyWeight]:
        """Return the parts of gate_proj, up_proj and down_proj, as they are stored."""
        wide, tall = (self.size, hidden_size), (hidden_size, self.size)
        return (
            read_linear(weights, f"{self.prefix}gate_proj.weight", wide, rows=self.cut),
            read_linear(weights, f"{self.prefix}up_proj.weight", wide, rows=self.cut),
            read_linear(weights, f"{self.prefix}down_proj.weight", tall, cols=self.cut),
        )


class MLP(nn.Module):
    """This rank's columns of down(glu(gate, up)).

    Args:
        hidden_size, size: Inputs and this rank's intermediate columns.
        dtype, device: Dtype and device of the parameters, which are empty until `load_weights`.
    Attributes:
        is_deterministic: Whether a token's output depends on no other token.
    """

    is_deterministic = False

    def __init__(self, hidden_size: int, size: int, glu: Glu, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.glu = glu
        self.gate_up_proj = Linear(hidden_size, 2 * size, dtype=dtype, device=device)
        self.down_proj = Linear(size, hidden_size, dtype=dtype, device=device)

    def load_weights(self, weights: Mapping[str, Weight], part: MLPPart) -> None:
        """Read this rank's part of the weights.

        Raises:
            ValueError: A weight is missing or has another shape.
        """
        gate, up, down = part.read(weights, self.gate_up_proj.in_features)
        self.gate_up_proj.load(gate, up)
        self.down_proj.load(down)

    @property
    def takes_quantized(self) -> bool:
        """True if quantized rows save work."""
        return self.gate_up_proj.takes_quantized

    def forward(self, x: PlainRows) -> Tensor:
        """Return this rank's share [T, hidden] of the MLP's output for x [T, hidden], to be summed over the ranks."""
        gate_up, down = self.gate_up_proj(x), self.down_proj
        activate = functools.partial(activate_rows, glu=self.glu, quantizes=down.takes_quantized)
        out: Tensor = down(by_rows(activate, gate_up) if self.is_deterministic else activate(gate_up))
        return out
