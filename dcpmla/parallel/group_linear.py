"""Products with weights that have scales for groups of columns: MXFP8, and weights in 4 bits.

Rows are not quantized: GPUs before Blackwell multiply no such codes, and bfloat16 represents the values of e4m3 and
e2m1 exactly.
"""

import torch
from torch import Tensor

from dcpmla.operators import operator
from dcpmla.parallel.formats import Quantized, dequantize
from dcpmla.parallel.fp8 import multiply_groups, runs_fp8


@operator(
    "group_linear",
    kernel="dcpmla.parallel.kernels.group_linear:group_linear",
    fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.codes.shape[0]),
    runs=lambda x, *_: runs_fp8(x.device) and x.dtype in (torch.bfloat16, torch.float16),
    mutates_args=("arrivals",),
)
def group_linear(x: Tensor, weight: Quantized, arrivals: Tensor) -> Tensor:
    """Multiply rows [T, G K] by a weight [N, K]: each of G groups of K columns by N / G of its rows.

    Args:
        x: Rows that are not quantized. The kernels compute those in bfloat16 and float16.
        weight: Contiguous MXFP8, K a multiple of 128, and so is N / G with several groups; or 4 bits, K a multiple of
            32 and of the columns that share a scale, and G = 1.
        arrivals: Same as in `fp8_linear`.
    Returns:
        [T, N] in the dtype of x, sums in float32.
    """
    values = dequantize(weight, x.dtype)
    return multiply_groups(x, values.unflatten(0, (x.shape[1] // values.shape[1], -1)))


def multiply_quantized(x: Tensor, weight: Quantized, arrivals: Tensor) -> Tensor:
    """Return `group_linear` of rows x [.., G K], with the same leading dims."""
    return group_linear(x.flatten(0, -2), weight, arrivals).unflatten(0, x.shape[:-1])
