"""The protocol of a kind of attention, which plans caches, builds steps and makes layers (`AttentionKind`).

Dense MLA is `DenseKind` here; `attention/sparse/kind.py` and `attention/compressed/kind.py` have the others. Code
outside a kind's folder uses the protocol alone and does not depend on the kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dcpmla.attention.costs import AttentionCosts, LatentCosts, LayerReads
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.ordered_layer import OrderedAttention
from dcpmla.attention.placement import Placement, check_order
from dcpmla.attention.projections import query_factor
from dcpmla.attention.routes import Rates
from dcpmla.attention.step.build import StepBuilder
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.formats import row_width, storage_dtype
from dcpmla.cache.latent import LatentCache
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig, MLAConfig
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


class AttentionKind(Protocol):
    """The attention of a model, all its layers.

    Attributes:
        config: Geometry of the layers, before they are sharded.
        num_layers: Number of layers of attention, each with a cache.
        num_index_layers: Number of layers with an indexer of their own, and so an index cache.
    """

    @property
    def config(self) -> Any: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_index_layers(self) -> int: ...

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or the layers do not support an option."""

    def chunk_alignment(self, dcp: DCPConfig) -> int:
        """Return how many tokens a context chunk is a multiple of."""

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache that holds sequences of the given final lengths at once.

        Args:
            dcp: Layout of the cache; its kv_cache_dtype and index_cache_dtype are the formats.
            seq_lens: Tokens of each sequence, prompt and answer; each starts on a block of its own.
            dtype: Dtype of the model.
            num_states: Number of requests' states, in a cache with states.
            num_drafts: Maximum drafts of a request in a step, over which a state can be rolled back.
        Raises:
            ValueError: No sequences, a negative length, options or a format that the layers do not support.
        """

    def step_builder(self, plan: CachePlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str) -> StepBuilder:
        """Return the builder of one rank's steps over the caches of a plan."""

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with what its layers share: angles of positions, memory for a selection.

        Args:
            rotary: Function of positions [T] and a type of rotary embedding.
            dtype: Dtype of the model.
            layers: Numbers of the layers that the step runs; None for all.
        """

    def new_layer(self, layer: int, placement: Placement) -> AttentionLayer:
        """Return the layer of a number, its parameters uninitialized."""

    def claim_step(self, num_tokens: int, device: torch.device | str) -> Any:
        """Return memory of the size that layers share in a step of num_tokens, for a profile."""

    def reads(self, context: int) -> list[LayerReads]:
        """Return the rows and keys that one new token reads over a context, grouped by layers with equal reads."""

    def row_bytes(self, kv_cache_dtype: str) -> int:
        """Return the bytes of a cached row in one layer.

        Raises:
            ValueError: The rows cannot have the format.
        """

    def costs(self, dcp: DCPConfig, rates: Rates) -> AttentionCosts:
        """Return the modelled time of pieces of prompts in all layers."""

    def dense_stack(self) -> "AttentionKind | None":
        """Return the same layers of dense MLA, as benchmarks of layers measure them; None for other layers."""


@dataclass(frozen=True)
class DenseKind:
    """Dense MLA."""

    config: MLAConfig
    num_layers: int

    @property
    def num_index_layers(self) -> int:
        """Return 0: all layers attend to all tokens."""
        return 0

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or for options of an index cache."""
        self.config.heads_per_rank(dcp.tensor_parallel_size)
        check_order(self.config, dcp)
        check_no_index(dcp)

    def chunk_alignment(self, dcp: DCPConfig) -> int:
        """Return how many tokens a context chunk is a multiple of."""
        return dcp.chunk_alignment

    def plan_cache(
        self, dcp: DCPConfig, seq_lens: Sequence[int], dtype: torch.dtype, num_states: int = 1, num_drafts: int = 0
    ) -> CachePlan:
        """Return the sizes of a cache of latents."""
        return LatentCache.plan(self.config, dcp, self.num_layers, seq_lens, dtype, ())

    def step_builder(self, plan: CachePlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str) -> StepBuilder:
        """Return the builder of steps of latents."""
        return StepBuilder(dcp, dcp_rank, device)

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with its positions' angles and query factor."""
        factor = query_factor(step.tokens.positions, self.config.llama_4_scaling, dtype)
        return step.with_cos_sin(rotary(step.tokens.positions, MAIN_ROTARY), factor)

    def new_layer(self, layer: int, placement: Placement) -> AttentionLayer:
        """Return a layer of dense MLA."""
        layer_type = OrderedAttention if placement.dcp.deterministic else MLAAttention
        return layer_type(self.config, placement)

    def claim_step(self, num_tokens: int, device: torch.device | str) -> Any:
        """Return nothing, for the layers share no large memory."""
        return None

    def reads(self, context: int) -> list[LayerReads]:
        """Return that all layers read all tokens."""
        return [LayerReads(self.num_layers, context, self.config.latent_dim, self.config.kv_lora_rank)]

    def row_bytes(self, kv_cache_dtype: str) -> int:
        """Return the bytes of a token's latent in one layer (`dcpmla.cache.formats`)."""
        storage = storage_dtype(kv_cache_dtype, torch.bfloat16)
        return row_width(storage, self.config.kv_lora_rank, self.config.qk_rope_head_dim) * storage.itemsize

    def costs(self, dcp: DCPConfig, rates: Rates) -> AttentionCosts:
        """Return the modelled time of pieces of prompts, each by the cheaper route."""
        sizes = {"num_layers": self.num_layers, "num_index_layers": self.num_index_layers}
        return LatentCosts(self.config, dcp, rates, **sizes)

    def dense_stack(self) -> AttentionKind | None:
        """Return the layers without indexers."""
        return DenseKind(replace(self.config, indexer=None), self.num_layers)


def check_no_index(dcp: DCPConfig) -> None:
    """Raise ValueError for options of an index cache."""
    asked = (
        (f"index_cache_dtype (--index-cache-dtype) {dcp.index_cache_dtype}", dcp.index_cache_dtype != "auto"),
        ("index_hadamard (--index-hadamard)", dcp.index_hadamard),
    )
    for name, is_asked in asked:
        if is_asked:
            raise ValueError(f"{name} goes with sparse MLA, whose layers have indexers; this attention is dense")
