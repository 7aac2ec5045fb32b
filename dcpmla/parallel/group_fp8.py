"""Products with fp8 weights that have a scale per 32 columns (`GroupFp8`).

Rows are not quantized: GPUs before Blackwell multiply no such codes, and bfloat16 represents the weights' values
exactly.
"""

import torch
from torch import Tensor

from dcpmla.operators import operator
from dcpmla.parallel.fp8 import multiply_groups, runs_fp8
from dcpmla.parallel.quantized import GroupFp8, dequantize


@operator(
    "group_fp8_linear",
    kernel="dcpmla.parallel.kernels.group_linear:group_fp8_linear",
    fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
    runs=lambda x, *_: runs_fp8(x.device) and x.dtype == torch.bfloat16,
    mutates_args=("arrivals",),
)
def group_fp8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, arrivals: Tensor) -> Tensor:
    """Multiply rows [T, G K] by a `GroupFp8` [N, K]: each of G groups of K columns by N / G of its rows.

    Args:
        x: Rows, not quantized.
        weight: Codes, e4m3 [N, K], contiguous; K is a multiple of 128, and so is N / G with several groups.
        weight_scale: Scales, uint8 [N, K / 32], contiguous.
        arrivals: Same as in `fp8_linear`.
    Returns:
        [T, N] in the dtype of x, sums in float32.
    """
    values = dequantize(GroupFp8(weight, weight_scale), x.dtype)
    return multiply_groups(x, values.unflatten(0, (x.shape[1] // weight.shape[1], -1)))


def multiply_group_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, arrivals: Tensor) -> Tensor:
    """Return `group_fp8_linear` of rows x [.., G K], with the same leading dims."""
    return group_fp8_linear(x.flatten(0, -2), weight, weight_scale, arrivals).unflatten(0, x.shape[:-1])
