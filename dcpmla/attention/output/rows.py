"""Attention's output [T, h V], the input of o_proj, assembled from the parts of a batch."""

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from dcpmla.attention.output.ops import check_heads, check_scale, project_rows_, write_rows_
from dcpmla.attention.output.quant import OutputQuant
from dcpmla.attention.projections import project_values
from dcpmla.parallel.fp8 import QuantizedRows
from dcpmla.parallel.quantized import BlockFp8, unpack


class OutputRows:
    """A result that parts append their rows to, quantized on the way if quant is given.

    A part that makes up the whole of a plain output becomes the output, so a step of decodes alone copies nothing.

    Args:
        num_rows: Number of rows T, padding included.
        w_uv: Weight [h, V, L].
        dtype: Dtype of values that are not quantized.
        quant: Options of quantization; None keeps values in dtype.
    Raises:
        ValueError: The dtype cannot be quantized, the scale is on another device, or groups would cross heads.
    """

    def __init__(self, num_rows: int, w_uv: Tensor | BlockFp8, dtype: torch.dtype, quant: OutputQuant | None) -> None:
        self._num_rows, self._quant, self._end = num_rows, quant, 0
        self._w_uv, self._w_scales = unpack(w_uv)
        self._width = self._w_uv.shape[0] * self._w_uv.shape[1]
        self._new: dict[str, Any] = {"dtype": dtype, "device": self._w_uv.device}
        self._values: Tensor | None = None
        if quant is not None:
            check_heads(self._w_uv, dtype, quant.group)
            if quant.scale is not None:
                check_scale("scale", quant.scale, self._w_uv.device)
            self._values, self._scales = quant.empty(num_rows, self._width, self._w_uv.device)

    def project(self, out: Tensor) -> None:
        """Append attention over latents [n, h, L], which W_UV is still to be applied to."""
        if self._values is None and out.shape[0] == self._num_rows:
            self._values = project_values(out, self._w_uv, self._w_scales)
        else:
            project_rows_(out, self._w_uv, self._end, *self._result(), self._w_scales)
        self._end += out.shape[0]

    def append(self, values: Tensor) -> None:
        """Append values [n, h V]."""
        if self._values is None and values.shape[0] == self._num_rows:
            self._values = values
        else:
            write_rows_(values, self._end, *self._result())
        self._end += values.shape[0]

    def pad(self) -> None:
        """Append zeros up to num_rows."""
        if self._end < self._num_rows:
            self.append(torch.zeros(self._num_rows - self._end, self._width, **self._new))

    def reserve(self) -> None:
        """Allocate the result now, so that its address is known before any part is appended."""
        self._result()

    def restart(self, first_row: int) -> None:
        """Let the next part begin at a row."""
        self._end = first_row

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same output over other tensors, function(result)."""
        other = copy(self)
        other._values = None if self._values is None else function(self._values)
        if self._quant is not None:
            other._scales = function(self._scales)
        return other

    def rows(self) -> Tensor | QuantizedRows:
        """Return the output [num_rows, h V]."""
        assert self._values is not None
        return self._values if self._quant is None else QuantizedRows(self._values, self._scales)

    def _result(self) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
        """Return values, scales, scale and ue8m0, as the custom ops take them."""
        if self._values is None:
            self._values = torch.empty(self._num_rows, self._width, **self._new)
        if self._quant is None:
            return self._values, None, None, False
        scales = None if self._quant.kind == "fp8" else self._scales
        return self._values, scales, self._quant.scale, self._quant.ue8m0
