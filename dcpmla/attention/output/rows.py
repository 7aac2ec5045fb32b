"""Attention's output [T, h V], the input of o_proj: sinks, W_UV, rows of all parts of a batch, gates, quantization."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dcpmla.attention.output import formats
from dcpmla.attention.output.gates import apply_gates
from dcpmla.attention.output.ops import project_rows_, write_rows_
from dcpmla.attention.output.sinks import apply_sinks
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.parallel.fp8 import QuantizedRows
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import BLOCK, BlockFp8, unpack

_KINDS = ("fp8", "fp8_groups", "nvfp4")


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputQuant:
    """How attention's output is quantized (`attention/output/formats.py`).

    Attributes:
        kind: "fp8", "fp8_groups" or "nvfp4".
        scale: Scale, float32 of one element on the output's device. fp8: value = scale x code; nvfp4: global scale,
            448 * 6 over the largest expected value; None for fp8_groups, which compute their scales.
        group_size, scale_layout, ue8m0: Options of fp8_groups alone: 64 or 128 columns that share a scale; "row",
            "column" or "tma"; whether scales are powers of two.
    Raises:
        ValueError: The kind, group size or layout does not exist; the scale is missing, superfluous, or of another
            dtype or size.
    """

    kind: str
    scale: Tensor | None = None
    group_size: int = 128
    scale_layout: str = "row"
    ue8m0: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind is {self.kind!r}; choose one of {', '.join(_KINDS)}")
        if self.kind == "fp8_groups":
            formats.check_groups(self.group_size, self.scale_layout)
            if self.scale is not None:
                raise ValueError("scale is given for kind 'fp8_groups', which makes its scales; leave it out")
        elif self.scale is None:
            raise ValueError(f"scale is None; kind {self.kind!r} needs one, float32 of one element")
        else:
            formats.check_scale("scale", self.scale, self.scale.device)

    @property
    def group(self) -> int:
        """Return the number of columns that share a computed scale; 1 for fp8, whose one scale is given."""
        return {"fp8": 1, "fp8_groups": self.group_size, "nvfp4": formats.NVFP4_GROUP}[self.kind]

    @property
    def is_linears(self) -> bool:
        """Return whether rows are quantized as linear layers quantize their inputs (`quantize_rows`)."""
        return (self.kind, self.group_size, self.scale_layout, self.ue8m0) == ("fp8_groups", BLOCK, "tma", False)

    def empty(self, num_rows: int, width: int, device: torch.device) -> QuantizedRows:
        """Return uninitialized memory for num_rows rows of width columns."""
        values, scales = formats.new_rows(num_rows, width, self.group, self.scale_layout, device)
        return QuantizedRows(values, self.scale if self.kind == "fp8" and self.scale is not None else scales)

    def target(self, rows: QuantizedRows, first_row: int) -> formats.TargetRows:
        """Return memory of `empty`, from first_row on, for an operator that writes it."""
        scales = None if self.kind == "fp8" else rows.scales
        return formats.TargetRows(first_row, rows.values, scales, self.scale, self.ue8m0)


def quant_for(linear: Linear, head_dim: int) -> OutputQuant | None:
    """Return how to quantize heads' outputs for a linear layer that takes them in fp8: by its static scale if it has
    one; None for a layer that does not take them, or whose groups would cross heads.
    """
    if not linear.takes_quantized:
        return None
    if linear.input_scale is not None:
        return OutputQuant(kind="fp8", scale=linear.input_scale)
    fits = head_dim % BLOCK == 0
    return OutputQuant(kind="fp8_groups", group_size=BLOCK, scale_layout="tma") if fits else None


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
        w_uv: Tensor | BlockFp8,
        dtype: torch.dtype,
        quant: OutputQuant | None,
        sinks: Tensor | None = None,
        has_gates: bool = False,
        is_deterministic: bool = False,
    ) -> None:
        self._num_rows, self._quant, self._sinks, self._has_gates, self._end = num_rows, quant, sinks, has_gates, 0
        self._is_deterministic = is_deterministic
        self._w_uv, self._w_scales = unpack(w_uv)
        self._width = self._w_uv.shape[0] * self._w_uv.shape[1]
        self._new: dict[str, Any] = {"dtype": dtype, "device": self._w_uv.device}
        self._rows: Tensor | QuantizedRows | None = None
        self._gates: Tensor | None = None
        if quant is not None:
            formats.check_heads(self._w_uv.view(1, self._width, -1) if has_gates else self._w_uv, dtype, quant.group)
            if quant.scale is not None:
                formats.check_scale("scale", quant.scale, self._w_uv.device)
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
        """Append values [n, h, V].

        Args:
            lse: LSE of the values [n, h], float32; None without sinks.
            gates: Logits of gates [n, h, V]; None without gates, or if `rows` takes them.
        """
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
        """Return the output [num_rows, h V], times its gates.

        Args:
            logits: Logits of gates [num_rows, N]; None without gates, or if parts have brought them.
        """
        rows, quant = self._rows, self._quant
        assert rows is not None
        if isinstance(rows, QuantizedRows) or not self._has_gates:
            return rows
        logits = self._gates if logits is None else logits
        if logits is None:  # no part has brought any: all rows are zeros
            gated: Tensor | QuantizedRows = rows
        else:
            gated = apply_gates(rows, logits, quantizes=quant is not None and quant.is_linears)
        if quant is None or isinstance(gated, QuantizedRows):
            return gated
        codes = quant.empty(self._num_rows, self._width, gated.device)
        write_rows_(gated, quant.target(codes, 0))
        return codes

    def _with_sinks(self, out: Tensor, lse: Tensor | None) -> Tensor:
        if self._sinks is None:
            return out
        assert lse is not None
        return apply_sinks(out, lse, self._sinks)

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

    def _target(self) -> formats.TargetRows:
        """Return the rows of the next part."""
        if self._rows is None:
            self._rows = torch.empty(self._num_rows, self._width, **self._new)
        if isinstance(self._rows, QuantizedRows):
            assert self._quant is not None
            return self._quant.target(self._rows, self._end)
        return formats.TargetRows(self._end, self._rows)
