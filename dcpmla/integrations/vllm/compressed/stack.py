"""The attention layers of a model, which share a cache that vLLM allocates."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.compressed.cache import CompressedCache, CompressedPlan
from dcpmla.attention.compressed.layer import CompressedAttention
from dcpmla.attention.placement import Placement
from dcpmla.cache.formats import storage_dtype
from dcpmla.cache.index_keys import index_storage_dtype
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.integrations.families.deepseek_v4_config import compressed_config
from dcpmla.integrations.vllm.compressed.memory import fixed_bytes
from dcpmla.integrations.vllm.compressed.names import MLAAttentionSpec, get_dcp_group, get_tp_group
from dcpmla.integrations.vllm.compressed.options import layout_of
from dcpmla.integrations.vllm.exchange import exchange_of
from dcpmla.parallel.mesh import DCPMesh


class CompressedStack:
    """All attention layers of a model on one rank.

    vLLM's pages hold what grows with the context: entries and index keys. One layer declares pages that are as large as
    all layers need together. What has a fixed size for each request, windows and sums, comes from the same allocation,
    which is enlarged by it (`memory`): attention reads windows and entries as rows of one tensor.

    Attributes:
        layers: The layers, in the model's order.
        leader: Name of the layer that declares the pages, the first that compresses.
    """

    def __init__(self, vllm_config: Any, layers: list[Any]) -> None:
        self.config = compressed_config(vllm_config.model_config.hf_config)
        self.layers, self._vllm_config = layers, vllm_config
        kinds = zip(layers, self.config.layer_kinds, strict=True)
        self.leader: str = next(layer.prefix for layer, kind in kinds if kind.ratio)
        for layer in layers:
            layer.stack = self

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
        dcp, dtype = self.placement.dcp, self.placement.dtype
        return CompressedPlan(
            config=self.config,
            dcp=dcp,
            num_blocks=num_blocks,
            dcp_size=dcp.decode_context_parallel_size,
            num_states=self._vllm_config.scheduler_config.max_num_seqs,
            dtype=storage_dtype(dcp.kv_cache_dtype, dtype),
            index_dtype=index_storage_dtype(dcp.index_cache_dtype, dtype),
        )

    def pages(self, vllm_config: Any) -> Any:
        """Make this package's layers, and return vLLM's description of a page, which holds a block of all of them."""
        for number, layer in enumerate(self.layers):
            kind = self.config.layer_kinds[number]
            layer.attention = CompressedAttention(self.config, kind, self.placement, modules=layer.modules())
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

    def memory_bytes(self, num_blocks: int) -> int:
        """Return the bytes of an allocation that holds the cache."""
        return self.plan(num_blocks).bytes_carved

    def bind(self, pages: Tensor) -> None:
        """Cut the caches of all layers from vLLM's allocation.

        Args:
            pages: vLLM's view of its pages, a part of the allocation that `hooks` has enlarged.
        """
        storage = pages.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=pages.device).set_(storage)
        num_blocks = self._vllm_config.cache_config.num_gpu_blocks
        cache = CompressedCache(self.plan(num_blocks), pages.device, memory)
        for layer, of_layer in zip(self.layers, cache, strict=True):
            layer.cache = of_layer

    def rotary(self, positions: Tensor, is_compressed: bool) -> Tensor:
        """Return the angles of positions [T] in layers that compress, or in the others, [T, R] float32."""
        layers = [layer for layer in self.layers if (layer.compress_ratio > 1) == is_compressed]
        table: Tensor = (layers or self.layers)[0].rotary_emb.cos_sin_cache
        return table[positions].float()
