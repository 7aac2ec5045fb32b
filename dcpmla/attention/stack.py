"""The attention of a model: a list of layers (`Stack`). Code outside the folders of layers uses it alone, and does not
depend on the sorts of layers in it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from dcpmla.attention.costs import LayerCosts, Rates, StackCosts
from dcpmla.attention.spec import LayerSpec, Rotary
from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class Stack:
    """The attention of a model, all its layers.

    Attributes:
        config: Geometry of the main layers, before they are sharded.
        layers: Spec of each layer; each has a cache.
        keeps_token_ids: Whether the cache keeps the tokens' ids (`CachePlan`).
    """

    config: Any
    layers: tuple[LayerSpec, ...]
    keeps_token_ids: bool = False

    @cached_property
    def sorts(self) -> Counter[LayerSpec]:
        """Return the distinct layers, with their numbers."""
        return Counter(self.layers)

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    @cached_property
    def num_index_layers(self) -> int:
        """Return the number of layers with an indexer of their own, and so an index cache."""
        return sum(layer.has_indexer for layer in self.layers)

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or the layers do not support an option."""
        for layer in self.sorts:
            layer.check_layout(dcp)
        self.check_index(dcp)
        self.check_hot_tokens(dcp)

    def check_index(self, dcp: DCPConfig) -> None:
        """Raise ValueError for options of an index cache if no layer has an indexer."""
        asked = (
            (f"index_cache_dtype (--index-cache-dtype) {dcp.index_cache_dtype}", dcp.index_cache_dtype != "auto"),
            ("index_hadamard (--index-hadamard)", dcp.index_hadamard),
        )
        for name, is_asked in asked:
            if is_asked and not self.num_index_layers:
                raise ValueError(f"{name} goes with sparse MLA, whose layers have indexers; this attention is dense")

    def check_hot_tokens(self, dcp: DCPConfig) -> None:
        """Raise ValueError for latents in host memory, unless an indexer selects what each layer reads, and there is
        room for one token's selection.
        """
        if dcp.kv_hot_tokens is None:
            return
        given = f"kv_hot_tokens (--kv-hot-tokens) is {dcp.kv_hot_tokens}"
        others = sorted({type(layer).__name__ for layer in self.sorts if layer.num_selected is None})
        if others:
            raise ValueError(
                f"{given}, but layers of the model ({', '.join(others)}) read more than the tokens that an indexer "
                "selects; leave it out. DeepSeek-V3.2 and GLM-5 have no such layers"
            )
        least = max(layer.num_selected or 0 for layer in self.sorts)
        if dcp.kv_hot_tokens < least:
            raise ValueError(f"{given}; it must be at least {least}, the tokens that one token attends to (index_topk)")

    def chunk_alignment(self, dcp: DCPConfig) -> int:
        """Return how many tokens a context chunk is a multiple of."""
        return max(layer.chunk_alignment(dcp) for layer in self.sorts)

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
        plan = self.layers[0].plan(self.layers, dcp, seq_lens, dtype, num_states, num_drafts)
        return replace(plan, keeps_token_ids=self.keeps_token_ids)

    def step_builder(self, plan: CachePlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str) -> StepBuilder:
        """Return the builder of one rank's steps over the caches of a plan."""
        traits = StepTraits()
        for layer in self.sorts:
            traits = layer.restrict(traits, plan, torch.device(device))
        return StepBuilder(replace(dcp, cp_kv_cache_interleave_size=plan.interleave), dcp_rank, device, traits)

    def prepare(
        self, step: StepMetadata, rotary: Rotary, dtype: torch.dtype, layers: Sequence[int] | None = None
    ) -> StepMetadata:
        """Return a step with what its layers share: angles of positions, memory for a selection.

        Args:
            rotary: Function of positions [T] and a type of rotary embedding.
            dtype: Dtype of the model.
            layers: Numbers of the layers that the step runs; None for all.
        """
        chosen = self._classes if layers is None else _by_class([self.layers[layer] for layer in layers])
        for kind, specs in chosen.items():
            step = kind.prepare(specs, step, rotary, dtype)
        return step

    def touch_peak_memory(self, num_tokens: int, device: torch.device | str) -> list[Any]:
        """Return memory of the size that layers share in a step of num_tokens, for a profile."""
        return [kind.touch_peak_memory(specs, num_tokens, device) for kind, specs in self._classes.items()]

    def costs(self, dcp: DCPConfig, rates: Rates) -> StackCosts:
        """Return the modelled time of pieces of prompts in all layers."""
        costs = Counter[LayerCosts]()
        for layer, number in self.sorts.items():
            costs[layer.costs(dcp, rates)] += number
        return StackCosts(costs)

    def dense_stack(self) -> "Stack | None":
        """Return as many layers of dense MLA, as benchmarks of layers measure them; None without layers of MLA."""
        dense = [layer for spec in self.layers if (layer := spec.dense(self.config)) is not None]
        return Stack(dense[0].config, tuple(dense)) if dense else None

    @cached_property
    def _classes(self) -> dict[type[LayerSpec], list[LayerSpec]]:
        return _by_class(self.layers)


def _by_class(layers: Iterable[LayerSpec]) -> dict[type[LayerSpec], list[LayerSpec]]:
    """Return layers by their class."""
    classes: dict[type[LayerSpec], list[LayerSpec]] = {}
    for layer in layers:
        classes.setdefault(type(layer), []).append(layer)
    return classes
