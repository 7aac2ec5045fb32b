"""The arguments of sums and their norms."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.comm.terms import Terms
from dcpmla.parallel.quantized import empty_codes


class NormedSum(NamedTuple):
    """Rows that are added to a residual, and the norm of the sum.

    Attributes:
        rows: Rows [T, D], or their terms; a rank's partial rows where ranks are summed.
        residual: Residual [T, D] in the same dtype.
        weight: Weight [D] of the norm.
        eps: Epsilon of the norm.
        quantizes: Whether the norm's result is also quantized, with the bits of `quantize_rows`; D is a multiple of 128
            then.
    """

    rows: Terms
    residual: Tensor
    weight: Tensor
    eps: float
    quantizes: bool = False

    def new_results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Allocate the results of `add_norm`."""
        normed, new_residual = (self.residual.new_empty(self.residual.shape) for _ in range(2))
        return normed, new_residual, *empty_codes(normed, self.quantizes)
