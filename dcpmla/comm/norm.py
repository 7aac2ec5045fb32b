"""RMSNorm, alone (`norm_rows`) and after rows were added to the residual (`add_norm`).

A decoder block calls `add_norm` after rows were summed over the ranks.

Both are custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs and in float64; GPUs run
the kernel of `comm/kernels/norm.py`, whose bits of a row depend on this row alone.
"""

import torch
from torch import Tensor

from dcpmla.comm.calls import NormedSum
from dcpmla.comm.terms import Partial, Terms
from dcpmla.operators import operator
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import empty_codes


def checked(partial: Partial, residual: Tensor, weight: Tensor, eps: float, quantizes: bool) -> NormedSum:
    """Return the arguments of `add_norm` if they match, for its callers (`comm/reduce.py`).

    Raises:
        ValueError: Shapes or dtypes do not match.
    """
    terms = partial if isinstance(partial, Terms) else Terms(partial)
    if terms.rows.dim() != 2 or residual.shape != terms.shape or residual.dtype != terms.rows.dtype:
        raise ValueError(
            f"residual is {residual.dtype} {tuple(residual.shape)}; "
            f"expected the same as the rows [T, D] to add, {terms.rows.dtype} {tuple(terms.shape)}"
        )
    if weight.shape != terms.shape[1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; the rows to add have {terms.shape[1]} columns")
    if quantizes and terms.shape[1] % BLOCK:
        raise ValueError(f"the rows to add have {terms.shape[1]} columns; rows are quantized in groups of {BLOCK}")
    return NormedSum(terms, residual, weight, eps, quantizes)


@operator("add_norm", kernel="dcpmla.comm.kernels.norm:add_norm", fake=NormedSum.new_results)
def add_norm(call: NormedSum) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add rows to the residual in float32 at least, and norm the result. The caller has already summed the rows over
    the ranks.

    Returns:
        `rms_norm` of the new residual, and the new residual, rounded to its dtype; codes and scales of the first,
        with 0 columns unless quantizes.
    """
    terms, residual, weight, eps, quantizes = call
    new_residual = (residual.to(wide_dtype(residual.dtype)) + terms.add()).to(residual.dtype)
    normed = rms_norm(new_residual, weight, eps)
    return normed, new_residual, *(quantize_rows(normed) if quantizes else empty_codes(normed, False))


@operator(
    "norm_rows",
    kernel="dcpmla.comm.kernels.norm:norm_rows",
    fake=lambda x, _weight, _eps, quantizes: (x.new_empty(x.shape), *empty_codes(x, quantizes)),
)
def norm_rows(x: Tensor, weight: Tensor, eps: float, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return `rms_norm` of rows [T, D], and its codes and scales, with 0 columns unless quantizes."""
    normed = rms_norm(x, weight, eps)
    return normed, *(quantize_rows(normed) if quantizes else empty_codes(normed, False))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [T, D] in float32 at least, round to x's dtype, multiply by the weight [D], and round again.

    Source: transformers' RMSNorm rounds at the same two points.
    """
    wide = x.to(wide_dtype(x.dtype))
    return ((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight).to(x.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)
