"""Memories of n-grams: rows of a huge table, chosen by hashes, which gates add to the streams of the residual.

Each rank holds some of the hashes' buckets, whole rows of the table, and the columns of the projection that take them.
So ranks exchange nothing but the sum of the projection's parts.

Source: the Engram paper (Cheng et al., 2026), section 2, and vLLM's DeepSeek-V4.1.
"""

import torch
from torch import Tensor, nn

from dcpmla.comm.norm import wide_dtype
from dcpmla.comm.reduce import Reduce
from dcpmla.model.mixing import Streams
from dcpmla.model.streams import finish
from dcpmla.operators import operator
from dcpmla.parallel.formats import Quantized, dequantize
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import unpack

_SMALLEST = 1e-6  # lower bound on a likeness's magnitude, whose root is taken


class NgramMemory(nn.Module):
    """The memory of a layer.

    Args:
        number: Index of the layer in the hashes.
        table: This rank's rows [R, D].
        projection: This rank's columns [(S + 1) hidden, C D] of the projection to a key for each of S streams, and to a
            value.
        weight: Weights [S, hidden], float32, of likenesses: of queries times of keys.
        eps: Epsilon of norms.
        reduce: Sums over the TP group.
    """

    scales: Tensor | None

    def __init__(
        self, number: int, table: Tensor | Quantized, projection: Linear, weight: Tensor, eps: float, reduce: Reduce
    ) -> None:
        super().__init__()
        self.number, self.projection, self.eps, self.reduce = number, projection, eps, reduce
        rows, scales = unpack(table)
        self.table = nn.Parameter(rows, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, streams: Streams, hashes: Tensor) -> Streams:
        """Return the streams with everything mixed in and the memory added. Collective over the TP group.

        Args:
            hashes: Rows of each layer's table, int32 [L, T, C] (`NgramHash`).
        """
        values = finish(streams)
        rows = look_up(self.table, self.scales, hashes[self.number], values.dtype)
        recalled = self.reduce.all_reduce(self.projection(rows))
        return streams._replace(values=add_recalled(values, recalled, self.weight, self.eps), mixing=None, out=None)


@operator(
    "look_up_rows",
    kernel="dcpmla.model.kernels.memory:look_up",
    fake=lambda table, _, index, dtype: table.new_empty(index.shape[0], index.shape[1] * table.shape[1], dtype=dtype),
    runs=lambda table, _scales, _index, dtype: (
        table.is_cuda and dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
)
def look_up(table: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of C rows for each token side by side, [T, C D]. A custom op.

    Args:
        table, scales: Rows [R, D]; with scales, codes and scales in MXFP8.
        index: Rows of each token, int32 [T, C].
        dtype: Dtype of the result, which represents the values of codes exactly, unless it is float16.
    """
    if scales is None:
        return table[index].flatten(1).to(dtype)
    codes = table.view(torch.uint8)[index].view(table.dtype)
    return dequantize(Quantized(codes, scales[index]), dtype).flatten(1)


@operator(
    "add_recalled",
    kernel="dcpmla.model.kernels.memory:add_recalled",
    fake=lambda streams, *_: torch.empty_like(streams),
)
def add_recalled(streams: Tensor, recalled: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add a value to each stream, by the likeness of the stream to its key. A custom op.

    The likeness is a product of both, normalized; the gate is a sigmoid of its root, with its sign.

    Args:
        streams: [T, S, hidden].
        recalled: S keys and a value, [T, (S + 1) hidden].
        weight, eps: Same as in `NgramMemory`.
    Returns:
        The streams, computed in float32 at least and rounded once.
    """
    num_streams, width = streams.shape[1:]
    wide = wide_dtype(streams.dtype)
    keys, value = recalled.to(wide).unflatten(1, (num_streams + 1, width)).split([num_streams, 1], 1)
    rows = streams.to(wide)
    factors = torch.rsqrt(rows.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    likeness = (rows * keys * weight).sum(-1) * factors * width**-0.5
    root = likeness.abs().clamp(min=_SMALLEST).sqrt()
    gate = torch.sigmoid(torch.where(likeness < 0, -root, root))
    return (rows + gate[..., None] * value).to(streams.dtype)
