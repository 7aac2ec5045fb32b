"""The caller's side of quantized outputs (`MLAAttention.attend`): the options, and the results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcpmla.attention.output import formats
from dcpmla.attention.output.ops import check_groups, check_scale
from dcpmla.cache.formats import FP8
from dcpmla.parallel.fp8 import QuantizedRows
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import BLOCK

_KINDS = ("fp8", "fp8_groups", "nvfp4")


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputQuant:
    """How attention's output is quantized (`attention/output/formats.py`).

    Attributes:
        kind: "fp8", "fp8_groups" or "nvfp4".
        scale: Scale, float32 of one element on the output's device. fp8: factor of quantized values; nvfp4: global
            scale, 448 * 6 over the largest expected value; None for fp8_groups, which compute their scales.
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
            check_groups(self.group_size, self.scale_layout)
            if self.scale is not None:
                raise ValueError("scale is given for kind 'fp8_groups', which makes its scales; leave it out")
        elif self.scale is None:
            raise ValueError(f"scale is None; kind {self.kind!r} needs one, float32 of one element")
        else:
            check_scale("scale", self.scale, self.scale.device)

    @property
    def group(self) -> int:
        """The number of columns that determine a scale; 1 if the scale is given."""
        return {"fp8": 1, "fp8_groups": self.group_size, "nvfp4": formats.NVFP4_GROUP}[self.kind]

    def empty(self, num_rows: int, width: int, device: torch.device) -> QuantizedRows:
        """Return uninitialized memory for num_rows rows of width columns."""
        if self.kind == "fp8_groups":
            return QuantizedRows(*formats.empty_fp8_groups(num_rows, width, self.group_size, self.scale_layout, device))
        if self.kind == "nvfp4":
            return QuantizedRows(*formats.empty_nvfp4(num_rows, width, device))
        assert self.scale is not None
        return QuantizedRows(torch.empty(num_rows, width, dtype=FP8, device=device), self.scale)


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
