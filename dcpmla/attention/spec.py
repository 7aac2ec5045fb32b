"""The description of a layer of attention (`LayerSpec`). Folders of layers have a spec each: `latent_spec.py`,
`factored_spec.py`, `windowed/`, `pooled/`, `linear/` and `compressed/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from dcpmla.attention.costs import LayerCosts, LayerReads, Rates
from dcpmla.attention.placement import Placement
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.latent import LayerMemory, plan_latents
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig
from dcpmla.parallel.linear import Weight

# Angles [T, R] float32 (`apply_rope`) of positions [T], for one of a model's types of rotary embedding.
Rotary = Callable[[Tensor, str], Tensor]
MAIN_ROTARY = "main"


class AttentionLayer(Protocol):
    """A layer of attention, an nn.Module.

    Attributes:
        takes_quantized: Whether the layer accepts quantized hidden states.
    """

    @property
    def takes_quantized(self) -> bool: ...

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Load the layer's weights, by their names in a checkpoint."""

    def partial(self, hidden_states: Any, cache: Any, step: StepMetadata | None) -> Tensor:
        """Return this rank's part of the layer's output [T, hidden], before the sum over the TP ranks. Collective.

        Args:
            hidden_states: Hidden states [T, hidden].
            cache: The layer's part of a `Cache`; None, like step, in a profile.
        """


class LayerSpec(ABC):
    """A layer of attention before it is made. Equal specs describe equal layers.

    Attributes:
        config: Geometry of the layer, before it is sharded.
        has_indexer: Whether the layer has an indexer of its own, and so a cache of index keys.
        num_selected: Number of tokens that each token attends to, which an indexer selects, so that latents can be in
            host memory (`cache.hot`); None for layers that read others, too.
        has_scales: Whether its rows in fp8 have a scale, which a checkpoint may have.
    """

    config: Any
    has_indexer: bool = False
    num_selected: int | None = None
    has_scales: bool = False

    @abstractmethod
    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or the layer does not support an option."""

    def chunk_alignment(self, dcp: DCPConfig) -> int:
        """Return how many tokens a context chunk is a multiple of."""
        return dcp.chunk_alignment

    def memory(self, dcp: DCPConfig, dtype: torch.dtype, num_drafts: int) -> LayerMemory:
        """Return the layer's memory on a rank (`Stack.plan_cache`); none for layers that have a `plan` of their own."""
        return LayerMemory()

    def restrict(self, traits: StepTraits, plan: Any, device: torch.device) -> StepTraits:
        """Return the traits of steps that have this layer, too."""
        return traits

    @abstractmethod
    def new_layer(self, placement: Placement) -> AttentionLayer:
        """Return the layer, its parameters uninitialized."""

    @abstractmethod
    def reads(self, context: int) -> LayerReads:
        """Return what one new token reads over a context."""

    def row_bytes(self, kv_cache_dtype: str, num_groups: int = 1) -> int:
        """Return the bytes of a cached row.

        Args:
            num_groups: DCP groups of a TP group, over which rows of heads are cut.
        Raises:
            ValueError: The rows cannot have the format.
        """
        return 0

    @abstractmethod
    def costs(self, dcp: DCPConfig, rates: Rates) -> LayerCosts:
        """Return the modelled time of pieces of prompts, hashable."""

    def dense(self, main: Any) -> "LayerSpec | None":
        """Return a layer of dense MLA with the main layers' geometry in place of this one; None if it is not MLA."""
        return None

    @classmethod
    def plan(
        cls,
        layers: Iterable[Self],
        dcp: DCPConfig,
        seq_lens: Sequence[int],
        dtype: torch.dtype,
        num_states: int,
        num_drafts: int,
    ) -> CachePlan:
        """Return the sizes of a cache of layers (`Stack.plan_cache`)."""
        memory = [layer.memory(dcp, dtype, num_drafts) for layer in layers]
        return plan_latents(memory, dcp, seq_lens, dtype, num_states, num_drafts)

    @classmethod
    def prepare(cls, layers: Sequence[Self], step: StepMetadata, rotary: Rotary, dtype: torch.dtype) -> StepMetadata:
        """Return a step with what layers of this class share (`Stack.prepare`)."""
        return step

    @classmethod
    def touch_peak_memory(cls, layers: Sequence[Self], num_tokens: int, device: torch.device | str) -> Any:
        """Return memory of the size that layers of this class share in a step of num_tokens."""
        return None
