"""MLA with gates of its heads' outputs (Ling, Kimi-K3, HY V4)."""

from collections.abc import Mapping

from torch import Tensor

from dcpmla.attention.gates import apply_gates
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.placement import Placement, refuse_order
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LayerCache
from dcpmla.config import MLAConfig
from dcpmla.parallel.fp8 import AnyRows, PlainRows
from dcpmla.parallel.linear import Linear, Weight, read_linear, shard
from dcpmla.parallel.quantized import BLOCK


class GatedAttention(MLAAttention):
    """MLA whose heads' outputs are multiplied by gates before the output projection.

    Args:
        config: Geometry of the whole layer, before it is sharded.
        placement: Ranks of the layer, and dtype and device of its parameters, uninitialized until `load_weights`.
        num_gates: Number of gates of a head: 1, or one for each column of its output.
        skip_topk: Same as in `MLAAttention`.
    Attributes:
        output_gate: Projection of hidden states to the logits of this rank's gates.
    Source: transformers' bailing_hybrid; vLLM's Kimi-K3.
    """

    def __init__(self, config: MLAConfig, placement: Placement, num_gates: int, skip_topk: bool = False) -> None:
        refuse_order("gated attention", placement.dcp)
        super().__init__(config, placement, skip_topk)
        self.num_gates = num_gates
        self.output_gate = Linear(config.hidden_size, self.num_heads * num_gates, **placement.factory_kwargs)

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Load weights as `MLAAttention.load_weights` documents, and the gates' "g_proj.weight"."""
        super().load_weights(weights)
        num_rows = self.config.num_heads * self.num_gates
        rows = shard(num_rows, self.mesh.tp_group)
        self.output_gate.load(read_linear(weights, "g_proj.weight", (num_rows, self.config.hidden_size), rows))

    def forward(self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Run one step of a batch (`MLAAttention.forward`). Collective."""
        return self.o_proj(self._gated(hidden_states, cache, step))

    def partial(self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Run `forward` up to the sum over the TP ranks, and return this rank's part of it. Collective."""
        return self.o_proj.partial(self._gated(hidden_states, cache, step))

    def _gated(self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata | None) -> AnyRows:
        """Return the heads' outputs [T, h V] times their gates, quantized if o_proj takes them so."""
        out = self.attend(hidden_states, cache, step)
        assert isinstance(out, Tensor)  # it is quantized only if asked
        quantizes = self.o_proj.takes_quantized and self.o_proj.input_scale is None and out.shape[1] % BLOCK == 0
        return apply_gates(out, self.output_gate(hidden_states), quantizes)
