"""vLLM's attention backend for dense MLA: the metadata of a step, from vLLM's own tensors.

vLLM's layer gathers queries before attention, and merges partial outputs after it, by its `dcp_manager`. Here both
happen inside attention, whose kernel sends rows as it has them: the builder puts identities into the manager.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.attention.build import StepBuilder, context_workspace_tokens
from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.step import DecodeMetadata
from dcpmla.cache.formats import FP8
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.vllm.exchange import exchange_of
from dcpmla.integrations.vllm.impl import DCPMLAImpl
from dcpmla.integrations.vllm.names import (
    AttentionCGSupport,
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonMetadataBuilder,
    MultipleOf,
    QueryLenSupport,
    get_dcp_group,
)


class DCPMLABackend(MLACommonBackend):
    """The answers to what vLLM asks before it takes a backend; its error lists what is not supported."""

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


@dataclass
class DecodePart(MLACommonDecodeMetadata):
    """vLLM's metadata of a step's decodes, and this package's, over the same tensors."""

    step: DecodeMetadata | None = None


class DCPMLAMetadataBuilder(MLACommonMetadataBuilder):
    """The metadata of each step, and what lives longer: made once for a group of layers, before graphs are captured.

    Full graphs of decode read block tables and lengths where vLLM keeps them, and the lengths of speculated tokens
    where the builder does.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar = QueryLenSupport.UNIFORM
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, supports_dcp_with_varlen=True)
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        dcp = _dcp_config(vllm_config.parallel_config, kv_cache_spec.block_size)
        num_tokens = context_workspace_tokens(vllm_config.model_config.max_model_len, max_num_seqs, dcp)
        self.dcp = replace(dcp, context_workspace_tokens=num_tokens)
        self.exchange: Exchange = LocalExchange()
        self.rank = 0
        if self.dcp_world_size > 1:
            group = get_dcp_group()
            self.rank, self.exchange = group.rank_in_group, exchange_of(group.device_group, torch.device(device))
        self.steps = StepBuilder(self.dcp, self.rank, device)
        self.workspace = decode_workspace(device)
        is_fp8 = vllm_config.cache_config.cache_dtype.startswith("fp8")
        cache_dtype = FP8 if is_fp8 else vllm_config.model_config.dtype
        self.exchange.reserve_context(num_tokens, kv_cache_spec.head_size, cache_dtype, torch.device(device))
        max_query_len = self.reorder_batch_threshold
        self.token_lens = torch.zeros(max_num_seqs * max_query_len, dtype=torch.int32, device=device)
        for name in layer_names:
            layer = vllm_config.compilation_config.static_forward_context[name]
            layer.impl.exchange = self.exchange
            if layer.dcp_manager is not None:
                layer.dcp_manager.query_gather = lambda q: q
                layer.dcp_manager.combine = lambda out, lse, **_: out
        layer.impl.warm_up(layer, cache_dtype, self.steps, self.workspace, max_num_seqs, max_query_len)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return vLLM's metadata with this package's in its parts.

        Raises:
            PeerFault: an exchange of an earlier step has failed; it ends vLLM's engine, as any error of a worker does.
        """
        self.exchange.check()
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.prefill is not None:
            first = metadata.num_decodes
            starts = common_attn_metadata.query_start_loc_cpu[first:]
            seq_lens = common_attn_metadata.seq_lens_cpu_upper_bound[first : metadata.num_reqs]  # exact of prefills
            metadata.prefill.step = self.steps.prefill(
                starts.diff().tolist(), seq_lens.tolist(), metadata.prefill.block_table
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
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        **_: Any,
    ) -> DecodePart:
        num_decodes = len(block_table_tensor)
        query_len = num_decode_tokens // num_decodes
        local_seq_lens = seq_lens_device
        if query_len > 1:
            totals = seq_lens_device if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device
            local_seq_lens = self._token_lens(totals, query_len)
        step = DecodeMetadata(block_table_tensor, local_seq_lens, None, query_len, self.workspace)
        return DecodePart(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, step)

    def _token_lens(self, seq_lens: Tensor, query_len: int) -> Tensor:
        """Return how many tokens on this rank each of the last query_len tokens of requests [n] sees: [n query_len]."""
        after = torch.arange(1 - query_len, 1, device=seq_lens.device)
        seen = (seq_lens[:, None] + after).clamp(min=0).flatten()  # a padded request has no tokens
        dcp = self.dcp
        local = ownership.local_seq_lens(
            seen, dcp.decode_context_parallel_size, self.rank, dcp.cp_kv_cache_interleave_size
        )
        return self.token_lens[: len(local)].copy_(local)


def _dcp_config(parallel: Any, block_size: int) -> DCPConfig:
    return DCPConfig(
        tensor_parallel_size=parallel.tensor_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        cp_kv_cache_interleave_size=parallel.cp_kv_cache_interleave_size,
        block_size=block_size,
    )
