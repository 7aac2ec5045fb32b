"""The activation of MLPs as one Triton kernel; `dcpmla.model.mlp.swiglu` is its reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, width, limit, HAS_LIMIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute COLUMNS of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    at = gate_up_ptr + row * 2 * width + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + row * width + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """Compute `model.mlp.swiglu` of contiguous rows."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = num_rows, triton.cdiv(width, _COLUMNS)
        swiglu_kernel[grid](gate_up, out, width, limit or 0.0, HAS_LIMIT=limit is not None, COLUMNS=_COLUMNS)
    return out
