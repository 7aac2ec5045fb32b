"""vLLM's attention backend for dense MLA: the metadata of a step, from vLLM's own tensors.

vLLM's layer gathers queries before attention, and merges partial outputs after it, by its `dcp_manager`. Here both
happen inside attention, whose kernel sends rows as it has them: the builder puts identities into the manager.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.step.chunks import lay_out_prefills, max_chunk_tokens
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepTokens
from dcpmla.cache.formats import row_width, storage_dtype
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.integrations.absorbed import DecodeLayout, TokenRange
from dcpmla.integrations.vllm.exchange import dcp_config, exchange_of
from dcpmla.integrations.vllm.impl import DCPMLAImpl
from dcpmla.integrations.vllm.invariance import is_batch_invariant
from dcpmla.integrations.vllm.names import (
    AttentionCGSupport,
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonMetadataBuilder,
    MultipleOf,
    QueryLenSupport,
    get_dcp_group,
    max_decode_query_len,
)


class DCPMLABackend(MLACommonBackend):
    """Properties that vLLM checks before it takes a backend; its error lists the unsupported ones."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "DCPMLA"

    @staticmethod
    def get_impl_cls() -> type:
        return DCPMLAImpl

    @staticmethod
    def get_builder_cls() -> type:
        return DCPMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return -(-default_block_size // 64) * 64  # whole tiles of the kernel for Hopper

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class DecodePart(MLACommonDecodeMetadata):
    """vLLM's metadata of a step's decodes, and this package's, over the same tensors."""

    parts: tuple[TokenRange, ...] = ()


class DCPMLAMetadataBuilder(MLACommonMetadataBuilder):
    """The metadata of each step, and the memory that steps share: made once for a group of layers, before graphs are
    captured.

    Requests with few new tokens are decodes, whether they are prefills or not. With VLLM_BATCH_INVARIANT all requests
    are decodes, because after a preemption vLLM computes the tokens of an answer as part of the prompt. Full graphs of
    decode read block tables and lengths where vLLM keeps them, and the lengths of speculated tokens where the builder
    does.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar = QueryLenSupport.VARLEN
    supports_draft_decode_metadata_update = True
    # A decode reads the cached context as it is; a prefill up-projects it first, at a cost that does not depend on the
    # new tokens. On an H100 both took as long at 171 new tokens of 128 heads over 65,536 cached ones, at about 200 of
    # 16 heads over 8,192, and at more over longer contexts.
    reorder_batch_threshold: int = 128

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        scheduler = vllm_config.scheduler_config
        if is_batch_invariant():
            self.reorder_batch_threshold = scheduler.max_num_batched_tokens
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, supports_dcp_with_varlen=True)
        asked = vllm_config.cache_config.cache_dtype
        kv_cache_dtype = "fp8_ds_mla" if asked == "fp8_ds_mla" else "fp8" if asked.startswith("fp8") else "auto"
        dcp = dcp_config(vllm_config.parallel_config, kv_cache_spec.block_size, kv_cache_dtype)
        longest = vllm_config.model_config.max_model_len
        num_tokens = max_chunk_tokens(longest, scheduler.max_num_seqs, dcp.chunk_alignment)
        self.dcp = replace(dcp, context_workspace_tokens=num_tokens)
        self.exchange: Exchange = LocalExchange()
        rank = 0
        if self.dcp_world_size > 1:
            group = get_dcp_group()
            rank, self.exchange = group.rank_in_group, exchange_of(group.device_group, torch.device(device))
        self.steps = StepBuilder(self.dcp, rank, device)
        cache_dtype = storage_dtype(kv_cache_dtype, vllm_config.model_config.dtype)
        width = row_width(cache_dtype, self.mla_dims.kv_lora_rank, self.mla_dims.qk_rope_head_dim)
        self.exchange.reserve_context(num_tokens, width, cache_dtype, torch.device(device))
        max_query_len = max_decode_query_len(vllm_config)
        tokens = StepTokens.empty(scheduler.max_num_seqs * max_query_len, device)
        num_heads = self.num_heads * self.dcp_world_size
        self.layout = DecodeLayout(self.steps, num_heads, max_query_len, decode_workspace(device), tokens)
        for name in layer_names:
            layer = vllm_config.compilation_config.static_forward_context[name]
            layer.impl.exchange, layer.impl.num_tile_lanes = self.exchange, self.dcp.num_own_lanes
            if layer.dcp_manager is not None:
                layer.dcp_manager.query_gather = lambda q: q
                layer.dcp_manager.combine = lambda out, lse, **_: out
        max_tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * self.reorder_batch_threshold)
        segments = self.layout.segment_len, self.layout.max_segments(scheduler.max_num_seqs, max_tokens)
        sizes = scheduler.max_num_seqs, max_query_len, *segments
        layer.impl.warm_up(layer, cache_dtype, self.steps, self.layout.workspace, *sizes)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return vLLM's metadata with this package's in its parts."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.prefill is not None:
            first = metadata.num_decodes
            starts = common_attn_metadata.query_start_loc_cpu[first:]
            seq_lens = common_attn_metadata.seq_lens_cpu_upper_bound[first : metadata.num_reqs]  # exact of prefills
            metadata.prefill.step = lay_out_prefills(
                self.steps.layout, starts.diff().tolist(), seq_lens.tolist(), metadata.prefill.block_table
            )
        return metadata

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Do nothing between drafts of one token each: block tables and lengths are read where vLLM updates them, so a
        graph can hold all drafts of a step.
        """

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        **_: Any,
    ) -> DecodePart:
        if num_decode_tokens == len(block_table_tensor):  # one token a request, padding included
            parts = self.layout.whole(block_table_tensor, seq_lens_device, 1)
        else:
            totals = seq_lens_device if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device
            starts = query_start_loc_device, query_start_loc_cpu.numpy()
            parts = self.layout.build(block_table_tensor, totals, *starts, num_decode_tokens)
        return DecodePart(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, parts)
