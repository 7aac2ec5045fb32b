"""The parts of a step that layers with a window read in place of what other layers read."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dcpmla.attention.select.step import SparseMetadata, with_selection
from dcpmla.attention.step.chunks import PrefillMetadata, lay_out_prefills
from dcpmla.attention.step.metadata import StepMetadata


@dataclass(frozen=True)
class WindowMetadata:
    """The prefills, angles and selection of layers with a window.

    Attributes:
        prefill: Prefills whose contexts begin at the window of their first token; None without prefills.
        cos_sin: Cosines and sines [num_tokens, R] float32 of RoPE in layers with a window.
        sparse: Tokens that a window may contain, with memory for each token's window, which the first layer with a
            window writes and the others read; no memory where no token has more tokens before it than the window. None
            while a graph is captured.
    """

    prefill: PrefillMetadata | None = None
    cos_sin: Tensor | None = None
    sparse: SparseMetadata | None = None


def with_windows(step: StepMetadata, window: int, cos_sin: Tensor) -> StepMetadata:
    """Return a step with the angles of layers with a window, the contexts in reach, and memory for their selection."""
    if step.defer is not None:
        return step.sharing(WindowMetadata(cos_sin=cos_sin))
    contexts = step.derive(WindowMetadata, lambda step: WindowMetadata(_contexts(step, window)))
    sparse = with_selection(step, window).get(SparseMetadata)
    return step.sharing(replace(contexts, cos_sin=cos_sin, sparse=sparse))


def _contexts(step: StepMetadata, window: int) -> PrefillMetadata | None:
    """Return the prefills of a step with contexts that begin at the window of their first token."""
    if step.prefill is None or step.requests is None:
        return step.prefill
    prefills, all_of = slice(step.num_decodes, None), step.requests
    columns = step.prefill.queries.start_loc, step.prefill.first_position
    numbers = all_of.query_lens[prefills], all_of.seq_lens[prefills], step.table.block_table[prefills]
    return lay_out_prefills(step.layout, *numbers, columns, window)


def of_window(step: StepMetadata) -> StepMetadata:
    """Return a step as a layer with a window sees it; a step that is so already stays as it is."""
    windows = step.get(WindowMetadata)
    if windows is None:
        return step
    shared: dict[type, Any] = {} if windows.sparse is None else {SparseMetadata: windows.sparse}
    return replace(step, cos_sin=windows.cos_sin, prefill=windows.prefill, shared=shared)
