"""The attention layers of a model, which share a cache that vLLM allocates."""

import weakref
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.layers.compressed.cache import CompressedCache, CompressedPlan, plan_compressed
from dcpmla.attention.layers.compressed.config import WINDOW_ONLY
from dcpmla.attention.placement import Placement
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.integrations.external.compressed import ExternalCompressedAttention
from dcpmla.integrations.families.deepseek_v4_config import compressed_config
from dcpmla.integrations.vllm.compressed.memory import fixed_bytes
from dcpmla.integrations.vllm.compressed.names import MLAAttentionSpec, get_dcp_group, get_tp_group
from dcpmla.integrations.vllm.compressed.options import layout_of
from dcpmla.integrations.vllm.compressed.remembered import StateCopies, num_remembered
from dcpmla.integrations.vllm.exchange import exchange_of
from dcpmla.parallel.mesh import DCPMesh


class CompressedStack:
    """All attention layers of a model on one rank.

    vLLM's pages hold what grows with the context: entries and index keys. One layer declares pages that are as large as
    all layers need together. What has a fixed size for each request, windows and sums, comes from the same allocation,
    which is enlarged by it (`memory`): attention reads windows and entries as rows of one tensor.

    Attributes:
        layers: vLLM's layers, in the model's order.
        leader: The layer that declares the pages, the first that compresses.
        num_drafts: Maximum drafts of a request in a step.
        draft_layers: Numbers of the layers of the draft module, windows alone; empty without one.
        cache: The caches of all layers; None before vLLM has allocated its pages, and after it has freed them.
    """

    def __init__(self, vllm_config: Any, layers: list[Any]) -> None:
        self.config = compressed_config(vllm_config.model_config.hf_config)
        self.layers, self._vllm_config = layers, vllm_config
        kinds = zip(layers, self.config.layer_kinds, strict=True)
        self.leader = next(layer for layer, kind in kinds if kind.ratio)
        self.cache: CompressedCache | None = None
        self._num_running = vllm_config.scheduler_config.max_num_seqs
        self.num_drafts: int = vllm_config.num_speculative_tokens
        self.draft_layers = list[int]()
        # Copies from requests' states to remembered ones, which wait for the end of the latest step.
        self._copies = list[tuple[int, int]]()
        for number, layer in enumerate(layers):
            layer.stack, layer.number = self, number

    def add_drafts(self, layers: list[Any]) -> None:
        """Add the layers of a draft module, before the memory is planned."""
        for layer in layers:
            layer.stack, layer.number = self, len(self.layers)
            self.draft_layers.append(layer.number)
            self.layers.append(layer)
            self.config = replace(self.config, layer_kinds=(*self.config.layer_kinds, WINDOW_ONLY))

    @cached_property
    def states(self) -> Tensor:
        """State of each request of the latest step [max_num_seqs] int32, which graphs read; -1 for padding."""
        return torch.full((self._num_running,), -1, dtype=torch.int32, device=self._device)

    @cached_property
    def placement(self) -> Placement:
        """The ranks of the layers and the format of their cache. vLLM has settled its block size before it asks for
        pages, but not before it has loaded the model.
        """
        group, device = get_dcp_group(), self._device
        exchange: Exchange = LocalExchange()
        if group.world_size > 1:
            exchange = exchange_of(group.device_group, device)
        mesh = DCPMesh(get_tp_group().device_group, group.device_group)
        dtype = self._vllm_config.model_config.dtype
        return Placement(layout_of(self._vllm_config, self.config), mesh, exchange, dtype, device)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.layers[0].q_norm.weight.device
        return device

    def plan(self, num_blocks: int) -> CompressedPlan:
        """Return the sizes of the cache with so many of vLLM's blocks."""
        num_states = self._num_running + num_remembered(self._vllm_config)
        sizes = self.placement.dcp, [1], self.placement.dtype, num_states, self.num_drafts
        return replace(plan_compressed(self.config, *sizes), num_blocks=num_blocks)

    @cached_property
    def attention(self) -> list[ExternalCompressedAttention]:
        """This package's layers over the projections of vLLM's, which are loaded by now."""
        kinds, placement = self.config.layer_kinds, self.placement
        return [
            ExternalCompressedAttention(self.config, kind, placement, layer.modules())
            for kind, layer in zip(kinds, self.layers, strict=True)
        ]

    def pages(self, vllm_config: Any) -> Any:
        """Return vLLM's description of a page, which holds a block of all layers."""
        block_size = vllm_config.cache_config.block_size
        return MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=self.config.head_dim,
            dtype=torch.uint8,
            state_content_bytes=-(-self.plan(1).bytes_per_block // block_size),
        )

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of the cache besides its pages."""
        return fixed_bytes(self.plan(1))

    def bind(self, pages: Tensor) -> None:
        """Cut the caches of all layers from vLLM's allocation. They are dropped when vLLM drops its view of the pages.

        Args:
            pages: vLLM's view [num_blocks, ...], a part of the allocation that `hooks` has enlarged.
        """
        memory = torch.empty(0, dtype=torch.uint8, device=pages.device).set_(pages.untyped_storage())
        cache = CompressedCache(self.plan(len(pages)), pages.device, memory)
        self.cache = cache
        weakref.finalize(pages, self._forget, cache)

    def _forget(self, cache: CompressedCache) -> None:
        if self.cache is cache:
            self.cache = None

    def copy_states(self, copies: StateCopies, states: dict[str, int]) -> None:
        """Restore states before a step, after the copies of the step before it, and note those after this one.

        Args:
            states: State of each running request, by the request's id. Remembered states come after them.
        """
        before = [(self._num_running + copies.before[name], states[name]) for name in copies.before]
        for source, target in self._copies + before:
            assert self.cache is not None
            self.cache.copy_state(source, target)
        self._copies = [(states[name], self._num_running + copies.after[name]) for name in copies.after]

    def rotary(self, positions: Tensor, is_compressed: bool) -> Tensor:
        """Return the angles of positions [T] in layers that compress, or in the others, [T, R] float32."""
        layers = [layer for layer in self.layers if (layer.compress_ratio > 1) == is_compressed]
        table: Tensor = (layers or self.layers)[0].rotary_emb.cos_sin_cache
        return table[positions].float()
