"""Attention's output [T, h V], the input of o_proj: sinks, W_UV, rows of all parts of a batch, gates, quantization."""

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from dcpmla.attention.output.formats import OutputQuant, TargetRows, check_heads
from dcpmla.attention.output.gates import apply_gates
from dcpmla.attention.output.ops import project_rows_, write_rows_
from dcpmla.attention.output.sinks import apply_sinks
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.parallel.formats import BLOCK, Quantized
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import QuantizedRows, unpack


def quant_for(linear: Linear, head_dim: int) -> OutputQuant | None:
    """Return how to quantize heads' outputs for a linear layer that takes them in fp8: by its static scale if it has
    one; None for a layer that does not take them, or whose groups would cross heads.
    """
    if not linear.takes_quantized:
        return None
    if linear.input_scale is not None:
        return OutputQuant("fp8", scale=linear.input_scale)
    fits = head_dim % BLOCK == 0
    return OutputQuant("fp8_groups", scale_layout="tma") if fits else None


class OutputRows:
    """The output of a batch, whose parts append their rows, quantized on the way if quant is given.

    If one call of `append` or `project` brings all rows, and nothing is quantized, its tensor is the output: a step of
    decodes alone copies nothing. Gates multiply whole rows, which are quantized after them.

    Args:
        num_rows: Number of rows T, padding included.
        w_uv: Weight [h, V, L].
        dtype: Dtype of values that are not quantized.
        quant: Options of quantization; None keeps values in dtype.
        sinks: Logits of attention sinks [h], float32 (`apply_sinks`); None without.
        has_gates: Whether the output is multiplied by gates (`apply_gates`).
        is_deterministic: Whether a row's bits depend on no other row.
    Raises:
        ValueError: The dtype cannot be quantized, the scale is on another device, or groups would cross heads (with
            gates: the end of a row).
    """

    def __init__(
        self,
        num_rows: int,
        w_uv: Tensor | Quantized,
        dtype: torch.dtype,
        quant: OutputQuant | None,
        sinks: Tensor | None = None,
        has_gates: bool = False,
        is_deterministic: bool = False,
    ) -> None:
        self._num_rows, self._quant, self._sinks, self._has_gates, self._end = num_rows, quant, sinks, has_gates, 0
        self._is_deterministic, (self._w_uv, self._w_scales) = is_deterministic, unpack(w_uv)
        self._width = self._w_uv.shape[0] * self._w_uv.shape[1]
        self._new: dict[str, Any] = {"dtype": dtype, "device": self._w_uv.device}
        self._rows: Tensor | QuantizedRows | None = None
        self._gates: Tensor | None = None
        if quant is not None:
            quant.checked(self._w_uv.device)
            check_heads(self._width if has_gates else self._w_uv.shape[1], dtype, quant.group)
            if not has_gates:
                self._rows = quant.empty(num_rows, self._width, self._w_uv.device)

    def project(self, out: Tensor, lse: Tensor | None = None, gates: Tensor | None = None) -> None:
        """Apply W_UV to attention over latents [n, h, L], and append the values (`append`)."""
        self._append_gates(gates)
        call = ValueProjection(self._with_sinks(out, lse), self._w_uv, self._w_scales, self._is_deterministic)
        if self._rows is None and out.shape[0] == self._num_rows:
            self._rows = project_values(call)
        else:
            project_rows_(call, self._target())
        self._end += out.shape[0]

    def append(self, values: Tensor, lse: Tensor | None = None, gates: Tensor | None = None) -> None:
        """Append values [n, h, V]. Sinks need their LSE [n, h] in float32; gates are logits [n, h, V] of this part."""
        self._append_gates(gates)
        values = self._with_sinks(values, lse).flatten(1)
        if self._rows is None and values.shape[0] == self._num_rows:
            self._rows = values
        else:
            write_rows_(values, self._target())
        self._end += values.shape[0]

    def pad(self) -> None:
        """Append zeros up to num_rows."""
        if self._end < self._num_rows:
            zeros = torch.zeros(self._num_rows - self._end, self._width, **self._new)
            if self._gates is not None:
                self._gates[self._end :] = zeros
            write_rows_(zeros, self._target())
            self._end = self._num_rows

    def reserve(self, has_logits: bool) -> None:
        """Allocate the result now, so that its address is known before any part is appended.

        Args:
            has_logits: Whether parts bring logits of gates.
        """
        self._target()
        if has_logits:
            self._gates = torch.empty(self._num_rows, self._width, **self._new)

    def seek(self, first_row: int) -> None:
        """Make first_row the first row of the next part."""
        self._end = first_row

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy of the output with function(tensor) for each tensor; `capture.borrow` calls it."""
        other = copy(self)
        for name in ("_rows", "_gates"):
            match getattr(self, name):
                case QuantizedRows() as rows:
                    setattr(other, name, QuantizedRows(*map(function, rows)))
                case Tensor() as tensor:
                    setattr(other, name, function(tensor))
        return other

    def rows(self, logits: Tensor | None = None) -> Tensor | QuantizedRows:
        """Return the output [num_rows, h V], times gates of logits [num_rows, N]; None if parts brought all logits."""
        assert self._rows is not None
        return self._gated(self._gates if logits is None else logits) if self._has_gates else self._rows

    def _gated(self, logits: Tensor | None) -> Tensor | QuantizedRows:
        """Apply gates to whole rows, then quantize."""
        rows, quant = self._rows, self._quant
        assert isinstance(rows, Tensor)
        if logits is None:  # no part has brought any: all rows are zeros
            gated: Tensor | QuantizedRows = rows
        else:
            gated = apply_gates(rows, logits, quantizes=quant is not None and quant.is_linears)
        if quant is None or isinstance(gated, QuantizedRows):
            return gated
        codes = quant.empty(self._num_rows, self._width, gated.device)
        write_rows_(gated, quant.target(*codes))
        return codes

    def _with_sinks(self, out: Tensor, lse: Tensor | None) -> Tensor:
        assert self._sinks is None or lse is not None
        return out if self._sinks is None or lse is None else apply_sinks(out, lse, self._sinks)

    def _append_gates(self, gates: Tensor | None) -> None:
        """Append logits to the gates; call it before the values are appended."""
        if gates is None:
            return
        if self._gates is None and len(gates) == self._num_rows:
            self._gates = gates.flatten(1)
            return
        if self._gates is None:
            self._gates = torch.empty(self._num_rows, self._width, **self._new)
        self._gates[self._end : self._end + len(gates)] = gates.flatten(1)

    def _target(self) -> TargetRows:
        """Return the rows of the next part."""
        if self._rows is None:
            self._rows = torch.empty(self._num_rows, self._width, **self._new)
        if isinstance(self._rows, QuantizedRows):
            assert self._quant is not None
            return self._quant.target(*self._rows, self._end)
        return TargetRows(self._end, self._rows)
