"""MLA over a window of the last tokens (dots3)."""

from torch import Tensor

from dcpmla.attention.gated import GatedAttention
from dcpmla.attention.output.rows import OutputQuant, OutputRows
from dcpmla.attention.placement import Placement
from dcpmla.attention.projections import MHAInputs
from dcpmla.attention.sparse.slots import SlotLayout
from dcpmla.attention.sparse.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.windowed.select import select_window
from dcpmla.attention.windowed.step import of_window
from dcpmla.cache.latent import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.fp8 import PlainRows, QuantizedRows


class WindowAttention(GatedAttention):
    """Gated MLA whose tokens attend to the last `config.window` tokens up to themselves.

    A window is a selection that no indexer makes: decodes read its rows alone, and prefills attend under its mask to
    the part of the context that it reaches.

    Args:
        config: Geometry of the whole layer, before it is sharded, with a window.
        placement: Ranks of the layer, and dtype and device of its parameters, uninitialized until `load_weights`.
        num_gates: Same as in `GatedAttention`.
        selects: Whether the layer writes the step's windows, as the first of a pass does for all.
    """

    def __init__(self, config: MLAConfig, placement: Placement, num_gates: int, selects: bool) -> None:
        super().__init__(config, placement, num_gates)
        self._selects, self._owner = selects, placement.dcp.owner(placement.mesh.dcp_rank)

    def attend(
        self,
        hidden_states: PlainRows,
        cache: LayerCache | None,
        step: StepMetadata | None,
        output_quant: OutputQuant | None = None,
    ) -> Tensor | QuantizedRows:
        """Return the input of o_proj (`MLAAttention.attend`). Collective."""
        return super().attend(hidden_states, cache, None if step is None else of_window(step), output_quant)

    def _attend(
        self,
        hidden_states: PlainRows,
        q_c: PlainRows,
        latents: Tensor,
        mha: MHAInputs | None,
        cache: LayerCache,
        output: OutputRows,
        step: StepMetadata,
    ) -> None:
        """Write the step's rows of `output`; between graphs, step is the replay's. Collective."""
        super()._attend(hidden_states, q_c, latents, mha, cache, output, of_window(step))

    def _select(
        self, hidden_states: PlainRows, q_c: PlainRows, cache: LayerCache, step: StepMetadata
    ) -> SelectedTokens | None:
        """Return each token's window; None where no token has more tokens before it."""
        selection, sparse = super()._select(hidden_states, q_c, cache, step), step.get(SparseMetadata)
        if selection is not None and sparse is not None and self._selects:
            layout = SlotLayout(sparse.block_table, sparse.request, self.dcp.block_size, self._owner)
            select_window(sparse.seq_lens, layout, selection)
        return selection
