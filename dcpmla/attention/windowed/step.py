"""The parts of a step that layers with a window read in place of what other layers read."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dcpmla.attention.sparse.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step import PrefillMetadata, StepMetadata


@dataclass(frozen=True)
class WindowMetadata:
    """The prefills, angles and selection of layers with a window.

    Attributes:
        prefill: Prefills whose contexts begin at the window of their first token; None without prefills.
        cos_sin: Cosines and sines [num_tokens, R] float32 of RoPE in layers with a window.
        selection: Memory for each token's window, which the first layer with a window writes and the others read. None
            where no token has more tokens before it than the window.
    """

    prefill: PrefillMetadata | None = None
    cos_sin: Tensor | None = None
    selection: SelectedTokens | None = None

    def of_tokens(self, index: int, size: int) -> "WindowMetadata":
        """Return metadata without prefills, for a token of each request."""
        return WindowMetadata()


def with_windows(step: StepMetadata, window: int, cos_sin: Tensor) -> StepMetadata:
    """Return a step with the angles of layers with a window, and memory for their selection."""
    windows, sparse, selection = step.get(WindowMetadata) or WindowMetadata(), step.get(SparseMetadata), None
    if sparse is not None and sparse.max_seq_len > window:
        selection = SelectedTokens.empty(step.num_tokens, window, step.positions.device)
    return step.with_kind(replace(windows, cos_sin=cos_sin, selection=selection))


def of_window(step: StepMetadata) -> StepMetadata:
    """Return a step as a layer with a window sees it; a step that is so already stays as it is."""
    windows, sparse = step.get(WindowMetadata), step.get(SparseMetadata)
    if windows is None:
        return step
    kinds: dict[type, Any] = {} if sparse is None else {SparseMetadata: replace(sparse, selection=windows.selection)}
    return replace(step, cos_sin=windows.cos_sin, prefill=windows.prefill, kinds=kinds)
