"""Layers of MLA with a window (dots3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from dcpmla.attention.layers.windowed.layer import WindowAttention
from dcpmla.attention.layers.windowed.step import with_windows
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.placement import Placement
from dcpmla.attention.spec import Rotary
from dcpmla.attention.step.metadata import StepMetadata


@dataclass(frozen=True)
class WindowSpec(LatentSpec):
    """A layer of gated MLA over a window of the last tokens.

    Attributes:
        selects: Whether the layer writes the step's windows, as the first of a pass does for all.
    """

    selects: bool = False

    def new_layer(self, placement: Placement) -> WindowAttention:
        """Return a layer with a window."""
        return WindowAttention(self.config, placement, self.selects)

    @classmethod
    def prepare(cls, layers: Sequence[Self], step: StepMetadata, rotary: Rotary, dtype: torch.dtype) -> StepMetadata:
        """Return a step with the angles of layers with a window, and memory for their selection."""
        window = layers[0].config.window
        assert window is not None
        return with_windows(step, window, rotary(step.tokens.positions, layers[0].rotary))
