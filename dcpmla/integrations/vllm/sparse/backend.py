"""vLLM's attention backend for sparse MLA: the metadata of a step, and the route of its prefills."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from dcpmla.attention.costs import RouteCosts
from dcpmla.attention.select.selector import TokenSelector
from dcpmla.cache.formats import storage_dtype
from dcpmla.config import MLAConfig
from dcpmla.indexer_config import IndexerConfig
from dcpmla.integrations.vllm.backend import DCPMLABackend, DCPMLAMetadataBuilder, DecodePart
from dcpmla.integrations.vllm.names import max_decode_query_len
from dcpmla.integrations.vllm.sparse.impl import DCPMLASparseImpl
from dcpmla.integrations.vllm.sparse.layout import in_pools
from dcpmla.integrations.vllm.sparse.selection import indexer_config, warm_up_selection


class DCPMLASparseBackend(DCPMLABackend):
    """Properties that vLLM checks before it takes a backend; its error lists the unsupported ones."""

    supported_kv_cache_dtypes: ClassVar = [*DCPMLABackend.supported_kv_cache_dtypes, "fp8_ds_mla"]

    @staticmethod
    def get_name() -> str:
        return "DCPMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type:
        return DCPMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type:
        return DCPMLASparseMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False


class DCPMLASparseMetadataBuilder(DCPMLAMetadataBuilder):
    """The metadata of each step: the tokens that attend with absorbed queries, and whether tokens select.

    Requests with few new tokens are decodes, as in dense MLA. All others of a step attend with absorbed queries, too,
    or with up-projected keys under a mask, whichever takes less time by a model of both (`attention.routes`).
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        indexer = indexer_config(vllm_config.model_config.hf_text_config)
        self.costs, self.topk = RouteCosts(_config_of(layer, vllm_config, indexer), self.dcp), indexer.topk
        self._selects = False
        most_tokens = vllm_config.scheduler_config.max_num_seqs * max_decode_query_len(vllm_config)
        cache_dtype = storage_dtype(self.dcp.kv_cache_dtype, vllm_config.model_config.dtype)
        pools = in_pools(self.dcp, indexer.pool_size)
        selector = TokenSelector(indexer, pools, self.steps.layout.owner.rank, self.exchange)
        warm_up_selection(selector, most_tokens, device)
        layer.impl.warm_up_selected(layer, cache_dtype, self.layout.workspace, most_tokens)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return vLLM's metadata with this package's in its parts."""
        self._selects = common_attn_metadata.max_seq_len > self.topk  # the same on all ranks
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.selects = self._selects
        if metadata.prefill is not None:
            metadata.prefill.use_dense_mha = not self._absorbs(metadata, common_attn_metadata)
            if not metadata.prefill.use_dense_mha:
                self._absorb_all(metadata, common_attn_metadata)
        return metadata

    def _absorbs(self, metadata: Any, step: Any) -> bool:
        """Return whether the prefills of a step take less time with absorbed queries."""
        first = metadata.num_decodes
        lens = step.query_start_loc_cpu[first:].diff()
        contexts = step.seq_lens_cpu_upper_bound[first : metadata.num_reqs] - lens
        pieces = list(zip(lens.tolist(), contexts.tolist(), strict=True))
        num_tiles = sum(self.costs.num_tiles(new) for new, _ in pieces)
        absorbed, mha = self.costs.absorbed_us, self.costs.mha_us
        return sum(absorbed(*piece) for piece in pieces) < sum(mha(*piece, num_tiles) for piece in pieces)

    def _absorb_all(self, metadata: Any, step: Any) -> None:
        """Turn the prefills of a step into decodes."""
        num_reqs, num_tokens = metadata.num_reqs, metadata.num_actual_tokens
        totals = step.seq_lens if self.dcp_world_size > 1 else None
        local = step.dcp_local_seq_lens if self.dcp_world_size > 1 else step.seq_lens
        metadata.decode = self._build_decode(
            step.block_table_tensor, local, step.query_start_loc_cpu, step.query_start_loc, num_tokens, totals
        )
        metadata.num_decodes, metadata.num_decode_tokens = num_reqs, num_tokens
        metadata.num_prefills, metadata.prefill = 0, None

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        **unused: Any,
    ) -> DecodePart:
        if self._selects:
            parts = self.layout.single_tokens(block_table_tensor, seq_lens_device, num_decode_tokens)
            return DecodePart(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, parts)
        starts = query_start_loc_cpu, query_start_loc_device
        return super()._build_decode(
            block_table_tensor, seq_lens_device, *starts, num_decode_tokens, dcp_tot_seq_lens_device, **unused
        )


def _config_of(layer: Any, vllm_config: Any, indexer: IndexerConfig) -> MLAConfig:
    """Return the geometry of one of vLLM's layers, before it is sharded."""
    config = vllm_config.model_config.hf_text_config
    return MLAConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=layer.q_lora_rank,
        kv_lora_rank=layer.kv_lora_rank,
        qk_nope_head_dim=layer.qk_nope_head_dim,
        qk_rope_head_dim=layer.qk_rope_head_dim or 2,  # rows of latents alone cost nearly the same
        v_head_dim=layer.v_head_dim,
        softmax_scale=layer.scale,
        indexer=indexer,
    )
