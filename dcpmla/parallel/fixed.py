"""Products and sums whose bits depend on their terms alone, for the deterministic mode.

The number of other rows, their values and a row's place choose no order of a sum. On GPUs one kernel multiplies few and
many rows. It cuts the K columns into segments of the same width, which follows from K alone: in the fewest segments of
2,048 columns or less, rounded up to whole blocks of 128. A segment is summed from its first column to its last, and the
result is ((0 + s_0) + s_1) + ... in float32. On CPUs each row is computed apart, in an order of its own, because torch
and MKL take other code for other shapes, and for the ends of a tensor.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from dcpmla.operators import operator
from dcpmla.parallel.collectives import all_gather, named


@operator(
    "fixed_linear",
    kernel="dcpmla.parallel.kernels.fixed:fixed_linear",
    fake=lambda x, weight, dtype: x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype),
)
def fixed_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows x [.., K] by a weight [N, K] of the same dtype.

    Returns:
        [.., N] in dtype, rounded once from sums in float32 (float64 for float64) over K in that order.
    """
    return multiply_rows(x.flatten(0, -2), weight).to(dtype).unflatten(0, x.shape[:-1])


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T [T, N] in float32 at least, a row apart, for x [T, K] and a weight [N, K]; or [T, h, N] of x
    [T, h, K] by a weight [h, N, K] of each head. A result's bits do not depend on N and h, either.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    # torch sums contiguous columns in an order that depends on their number alone; MKL's depends on N, too.
    x, weight = x.to(wide).contiguous(), weight.to(wide).contiguous()
    products = [(row.unsqueeze(-2) * weight).sum(-1) for row in x]
    return torch.stack(products) if products else x.new_empty(*x.shape[:-1], weight.shape[-2])


def sum_in_order(rows: Tensor, group: ProcessGroup, operation: str) -> Tensor:
    """Sum a tensor [...] of each of W ranks in float32 at least, rank after rank, whatever its shape. Collective.

    Each rank sums 1 / W of the elements, so that it receives no more than in an all-reduce.
    """
    size, wide = dist.get_world_size(group), torch.promote_types(rows.dtype, torch.float32)
    sent = F.pad(rows.flatten(), (0, -rows.numel() % size)).view(size, -1)
    parts = torch.empty_like(sent)
    with named(operation, group):
        dist.all_to_all_single(parts, sent, group=group)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    return all_gather(total, group, operation).flatten()[: rows.numel()].view(rows.shape)
