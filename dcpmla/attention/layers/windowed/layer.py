"""MLA over a window of the last tokens (dots3)."""

from dcpmla.attention.layers.windowed.select import select_window
from dcpmla.attention.layers.windowed.step import of_window
from dcpmla.attention.mla.layer import MLAAttention
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.quantized import PlainRows


class WindowAttention(MLAAttention):
    """MLA whose tokens attend to the last `config.window` tokens up to themselves.

    A window is a selection that no indexer makes: decodes read its rows alone, and prefills attend under its mask to
    the part of the context that it reaches.

    Args:
        config: Geometry of the whole layer, before it is sharded, with a window.
        placement: Ranks of the layer, and dtype and device of its parameters, uninitialized until `load_weights`.
        selects: Whether the layer writes the step's windows, as the first of a pass does for all.
    """

    def __init__(self, config: MLAConfig, placement: Placement, selects: bool) -> None:
        super().__init__(config, placement)
        self._selects, self._owner = selects, placement.dcp.owner(placement.mesh.dcp_rank)

    def view(self, step: StepMetadata) -> StepMetadata:
        """Return the step with the angles, contexts and selection of layers with a window."""
        return of_window(step)

    def _select(
        self, hidden_states: PlainRows, q_c: PlainRows, cache: LayerCache, step: StepMetadata
    ) -> SelectedTokens | None:
        """Return each token's window; None where no token has more tokens before it."""
        selection, sparse = super()._select(hidden_states, q_c, cache, step), step.get(SparseMetadata)
        if selection is not None and sparse is not None and self._selects:
            layout = SlotLayout(sparse.block_table, sparse.request, self.dcp.block_size, self._owner)
            select_window(sparse.seq_lens, layout, selection)
        return selection
