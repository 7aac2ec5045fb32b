"""The selection of tokens inside vLLM: this package's scores and its choice over all DCP ranks replace vLLM's
`sparse_attn_indexer`. vLLM's kernel writes the index keys into vLLM's cache.
"""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcpmla.attention.select.selector import WORKSPACE_BYTES, TokenSelector
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step.table import StepLayout
from dcpmla.cache.formats import FP8
from dcpmla.cache.index_keys import SCALE_BYTES
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.indexer_config import IndexerConfig
from dcpmla.integrations.vllm.exchange import dcp_config, exchange_of
from dcpmla.integrations.vllm.names import (
    AttentionCGSupport,
    MultipleOf,
    QueryLenSupport,
    get_dcp_group,
)
from dcpmla.integrations.vllm.sparse.layout import SelectionLayout, in_pools
from dcpmla.integrations.vllm.sparse.names import (
    AttentionBackend,
    AttentionMetadataBuilder,
    deepseek_v32_attention,
    get_forward_context,
)
from dcpmla.runtime.graph_sizes import warm_up_sizes


@dataclass
class IndexMetadata:
    """The tokens of a step that layers with an indexer select for, and the selector."""

    sparse: SparseMetadata
    selector: TokenSelector


class IndexBackend(AttentionBackend):
    """The index cache of a layer, as vLLM sees it: a cache that no attention of its own reads."""

    @staticmethod
    def get_name() -> str:
        return "DCPMLA_INDEX"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("the index cache has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type:
        return IndexMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_dcp(cls) -> bool:
        return True


class IndexMetadataBuilder(AttentionMetadataBuilder):
    """The part of each step's metadata that the selection reads, in memory that stays where graphs expect it.

    It makes no exchange: ranks make their builders in different orders.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar = QueryLenSupport.VARLEN
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        dcp = dcp_config(vllm_config.parallel_config, kv_cache_spec.block_size)
        exchange: Exchange = LocalExchange()
        rank = 0
        if dcp.decode_context_parallel_size > 1:
            group = get_dcp_group()
            rank, exchange = group.rank_in_group, exchange_of(group.device_group, torch.device(device))
        indexer = indexer_config(vllm_config.model_config.hf_text_config)
        self.selector = TokenSelector(indexer, in_pools(dcp, indexer.pool_size), rank, exchange)
        layout = StepLayout(dcp, dcp.owner(rank), torch.device(device))
        self.layout = SelectionLayout(layout, scheduler.max_num_batched_tokens)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexMetadata:
        """Return the tokens of a step, without waiting for the device."""
        return IndexMetadata(self.layout.build(common_attn_metadata), self.selector)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Do nothing between drafts of one token each: lengths and block tables are read where vLLM updates them."""


@torch.no_grad()
def warm_up_selection(selector: TokenSelector, most_tokens: int, device: torch.device) -> None:
    """Select in steps of every size of decodes, so that kernels are compiled, and the exchange has its memory, before
    graphs are captured. Collective over the DCP group.
    """
    config, dcp = selector.config, selector.dcp
    num_keys = config.num_pools + 1
    num_blocks = -(-num_keys // dcp.virtual_block_size)
    keys = torch.zeros(1, dcp.block_size, config.head_dim + SCALE_BYTES, dtype=torch.uint8, device=device)
    for num_tokens in warm_up_sizes(most_tokens):
        numbers = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        table = numbers.new_zeros(1, num_blocks)
        lens, local = numbers + num_keys, numbers + num_blocks * dcp.block_size
        sparse = SparseMetadata(table, numbers, lens, local, num_keys)
        q = torch.zeros(num_tokens, config.num_heads, config.head_dim, device=device).to(FP8)
        selection = SelectedTokens.empty(num_tokens, config.num_pools, device)
        weights = torch.zeros(num_tokens, config.num_heads, device=device)
        selector.select(q, weights, keys, sparse, table, selection)


def indexer_config(config: Any) -> IndexerConfig:
    """Return the sizes of a model's indexer by its config in vLLM."""
    pool_size = getattr(config, "index_kpool", 1)
    return IndexerConfig(
        num_heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        topk=config.index_topk + pool_size - 1,
        rope_interleaved=False,  # vLLM rotates; selection does not depend on it
        pool_size=pool_size,
    )


@cache
def selection_of(topk_indices_buffer: Tensor) -> SelectedTokens:
    """Return the memory of a selection whose positions are a buffer of vLLM's [max_num_tokens, topk] int32. All layers
    that share the buffer share the slots of its tokens.
    """
    with torch.inference_mode(False):  # the warm-up writes it, and so do steps in inference mode
        num_slots = torch.empty(len(topk_indices_buffer), dtype=torch.int32, device=topk_indices_buffer.device)
        return SelectedTokens(topk_indices_buffer, torch.empty_like(topk_indices_buffer), num_slots)


@cache
def install() -> None:
    """Make layers of vLLM's DeepSeek-V3.2 select with this package. Later calls do nothing."""
    names = tuple(signature(deepseek_v32_attention.sparse_attn_indexer).parameters)

    def sparse_attn_indexer(*values: Any, **named: Any) -> Tensor:
        arguments = dict(zip(names, values, strict=False)) | named
        queries = arguments["q_quant"], arguments["weights"]
        buffer: Tensor = arguments["topk_indices_buffer"]
        select(arguments["k_cache_prefix"], arguments["kv_cache"], *queries, buffer)
        return buffer

    deepseek_v32_attention.sparse_attn_indexer = sparse_attn_indexer


def select(layer: str, index_keys: Tensor, q: Tensor, weights: Tensor, buffer: Tensor) -> None:
    """Select for the tokens of vLLM's current step, if any has more than topk tokens before it. Collective.

    Args:
        layer: Name of the layer's index cache.
        index_keys: Index cache [num_blocks, block_size, D + 4] bytes (`dcpmla.cache.index_keys`).
        q: Queries [T, H, D] e4m3; rows after the step's tokens are padding.
        weights: Weights of heads [T, H] float32, times all factors, including the scales of queries.
        buffer: Positions of selected tokens [max_num_tokens, topk] int32; written, and their slots in `selection_of`.
    """
    selection, step = selection_of(buffer), get_forward_context().attn_metadata
    if not isinstance(step, dict):
        reserve(buffer.device)
        return
    index: IndexMetadata = step[layer]
    sparse = index.sparse
    if sparse.max_seq_len > index.selector.config.topk:
        tokens = slice(0, len(sparse.request))
        chosen = selection.rows(tokens)
        index.selector.select(q[tokens], weights[tokens], index_keys, sparse, sparse.block_table, chosen)


def reserve(device: torch.device) -> None:
    """Allocate what a selection takes for a while, where vLLM measures memory in a step without metadata."""
    torch.empty(4 * WORKSPACE_BYTES, dtype=torch.uint8, device=device)
