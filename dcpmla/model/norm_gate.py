"""Gates of norms' rows (A.X-K2): each column times the sigmoid of a low-rank MLP of the row."""

from torch import Tensor, nn
from torch.nn import functional as F

from dcpmla.comm.norm import wide_dtype
from dcpmla.operators import operator
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import NormedRows, PlainRows, empty_codes


class NormGate(nn.Module):
    """The gate of a norm's rows.

    Args:
        down: Weight [N, hidden] of the MLP's first layer, which SiLU follows.
        up: Weight [hidden, N] of its second.
    Source: transformers' A.X-K2.
    """

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(down, requires_grad=False)
        self.up = nn.Parameter(up, requires_grad=False)

    def forward(self, x: Tensor, quantizes: bool) -> PlainRows:
        """Return rows x [T, hidden] times their gates; with quantizes also in fp8."""
        gated, *codes = gate_norm(x, F.linear(x, self.down), self.up, quantizes)
        return NormedRows.join(gated, *codes)


@operator(
    "gate_norm",
    kernel="dcpmla.model.kernels.norm_gate:gate_norm",
    fake=lambda x, _low, _up, quantizes: (x.new_empty(x.shape), *empty_codes(x, quantizes)),
)
def gate_norm(x: Tensor, low: Tensor, up: Tensor, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply x [T, hidden] by sigmoid(silu(low) up^T), rounded once.

    Args:
        low: Output [T, N] of the MLP's first layer.
        up: Weight [hidden, N].
    Returns:
        The product; its codes and scales, with 0 columns unless quantizes.
    """
    logits = F.linear(F.silu(low), up)
    gated = (x * logits.to(wide_dtype(x.dtype)).sigmoid()).to(x.dtype)
    return gated, *(quantize_rows(gated) if quantizes else empty_codes(gated, False))
