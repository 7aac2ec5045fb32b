"""Layers of MLA, dense or sparse, with or without gates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dcpmla.attention.costs import LayerReads, Rates, RouteCosts
from dcpmla.attention.mla.layer import MLAAttention
from dcpmla.attention.placement import Placement, check_order
from dcpmla.attention.select.step import SelectedTokens, with_selection
from dcpmla.attention.spec import MAIN_ROTARY, AttentionLayer, LayerSpec, Rotary
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.cache.formats import row_width, storage_dtype
from dcpmla.cache.latent import LayerMemory
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.parallel.by_rows import by_rows


@dataclass(frozen=True)
class LatentSpec(LayerSpec):
    """A layer of MLA. With config.indexer it is sparse: without an indexer of its own it attends to the selection of
    the latest layer with one.

    Attributes:
        rotary: Type of rotary embedding, in a model with several.
    """

    config: MLAConfig
    has_indexer: bool = False
    rotary: str = MAIN_ROTARY
    has_scales = True

    @property
    def num_selected(self) -> int | None:  # type: ignore[override]
        """Return the number of selected tokens of layers with an indexer, or that reuse one's selection."""
        indexer = self.config.indexer
        return None if indexer is None or indexer.pool_size > 1 else indexer.topk

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError if heads do not divide by the TP size, or the layer has no order of dcp.deterministic."""
        self.config.heads_per_rank(dcp.tensor_parallel_size)
        check_order(self.config, dcp)

    def memory(self, dcp: DCPConfig, dtype: torch.dtype, num_drafts: int) -> LayerMemory:
        """Return rows of latents, and keys for an indexer."""
        return LayerMemory.of(self.config, dcp, dtype, self.has_indexer)

    def restrict(self, traits: StepTraits, plan: Any, device: torch.device) -> StepTraits:
        """Return the traits; the attention of decodes depends on a selection in sparse layers."""
        return traits if self.config.topk is None else traits._replace(has_static_decodes=False)

    def new_layer(self, placement: Placement) -> AttentionLayer:
        """Return a layer of MLA."""
        return MLAAttention(self.config, placement, skip_topk=not self.has_indexer)

    def reads(self, context: int) -> LayerReads:
        """Return that a token reads all tokens or selected ones, and an indexer all keys."""
        config, widths = self.config, (self.config.latent_dim, self.config.kv_lora_rank)
        if config.topk is None or context <= config.topk:
            return LayerReads(context, *widths)
        if config.indexer is None or not self.has_indexer:
            return LayerReads(config.topk, *widths)
        return LayerReads(config.topk, *widths, context // config.indexer.pool_size, config.indexer.num_pools)

    def row_bytes(self, kv_cache_dtype: str, num_groups: int = 1) -> int:
        """Return the bytes of a token's latent (`dcpmla.cache.formats`)."""
        storage = storage_dtype(kv_cache_dtype, torch.bfloat16)
        return row_width(storage, self.config.kv_lora_rank, self.config.qk_rope_head_dim) * storage.itemsize

    def costs(self, dcp: DCPConfig, rates: Rates) -> RouteCosts:
        """Return the modelled time of pieces of prompts, each by the cheaper route."""
        return RouteCosts(self.config, dcp, rates, self.has_indexer)

    def dense(self, main: MLAConfig) -> LayerSpec:
        """Return a layer with the main layers' geometry, without an indexer, factors, gates and norms of k_pe."""
        return LatentSpec(replace(main, indexer=None, has_query_factors=False, norms_k_pe=False, num_gates=0))

    @classmethod
    def prepare(cls, layers: Sequence[Self], step: StepMetadata, rotary: Rotary, dtype: torch.dtype) -> StepMetadata:
        """Return a step with its positions' angles and query factor, and memory for a selection."""
        config, positions = layers[0].config, step.tokens.positions
        if config.use_rope:
            factor = query_factor(positions, config.llama_4_scaling, dtype)
            step = step.with_cos_sin(rotary(positions, layers[0].rotary), factor)
        return step if config.indexer is None else with_selection(step, config.indexer.topk)

    @classmethod
    def touch_peak_memory(cls, layers: Sequence[Self], num_tokens: int, device: torch.device | str) -> Any:
        """Return memory for a selection of num_tokens; None for dense layers."""
        topk = layers[0].config.topk
        return None if topk is None else SelectedTokens.empty(num_tokens, topk, device)


def llama_4_factor(positions: Tensor, beta: float, original_max_position: int) -> Tensor:
    """Return the query's factor [T] float32 at positions [T]: 1 + beta ln(1 + floor(position / original_max_position)).

    Source: Llama 4's attention temperature, as Mistral 4 uses it.
    """
    return 1 + beta * torch.log1p(torch.floor(positions / original_max_position))


def query_factor(positions: Tensor, llama_4_scaling: tuple[float, int] | None, dtype: torch.dtype) -> Tensor | None:
    """Return the factor of a step's queries: `llama_4_factor` [T] in their dtype; None for a model without it.

    Source: transformers' Mistral 4 rounds the factor before the product.
    """
    if llama_4_scaling is None:
        return None
    factor: Tensor = by_rows(lambda position: llama_4_factor(position, *llama_4_scaling), positions)
    return factor.to(dtype)
