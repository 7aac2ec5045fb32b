"""The selection of pools inside vLLM: this package's scores and its choice over all DCP ranks replace vLLM's.
vLLM's kernels pool the keys of tokens and write them into vLLM's cache.

vLLM keeps the keys and gates of each request's last tokens, whose pool may be in progress, in a ring on every rank (its
tail cache): the token at position p in entry p % ring.
"""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.layers.pooled.expand import expand_pools
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.integrations.vllm.names import max_decode_query_len
from dcpmla.integrations.vllm.pooled.layout import PoolLayout, StepPools
from dcpmla.integrations.vllm.pooled.names import (
    eager_break_during_capture,
    kpool_compress_and_write_cache,
    kpool_decode_update_and_maybe_write_cache_batched,
    kpool_seed_tail_cache,
    sparse_indexer,
)
from dcpmla.integrations.vllm.sparse.names import get_forward_context
from dcpmla.integrations.vllm.sparse.selection import (
    IndexBackend,
    IndexMetadata,
    IndexMetadataBuilder,
    reserve,
    selection_of,
)
from dcpmla.ownership import Owner


@dataclass
class PoolMetadata(IndexMetadata):
    """The pools of a step's tokens, besides the tokens."""

    pools: StepPools


class PoolIndexBackend(IndexBackend):
    """The index cache of a layer, which has a key for each pool of tokens."""

    @staticmethod
    def get_name() -> str:
        return "DCPMLA_POOL_INDEX"

    @staticmethod
    def get_builder_cls() -> type:
        return PoolMetadataBuilder


class PoolMetadataBuilder(IndexMetadataBuilder):
    """The part of each step's metadata that the selection of pools reads."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        sizes = max_decode_query_len(vllm_config), vllm_config.scheduler_config.max_num_batched_tokens
        config = self.selector.config
        self.pools = PoolLayout(self.layout, config.pool_size, config.num_pools, *sizes)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PoolMetadata:
        """Return the tokens and pools of a step, without waiting for the device."""
        pools = self.pools.build(common_attn_metadata)
        return PoolMetadata(pools.tokens, self.selector, pools)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Count pools again between drafts of one token each, whose lengths vLLM updates."""
        self.pools.update(metadata.pools)


@cache
def install() -> None:
    """Make layers of vLLM's GLM-5-Next select with this package. Later calls do nothing."""
    names = tuple(signature(sparse_indexer.sparse_attn_indexer_kpool).parameters)

    def sparse_attn_indexer_kpool(*values: Any, **named: Any) -> Tensor:
        arguments = dict(zip(names, values, strict=False)) | named
        buffer, step = arguments["topk_indices_buffer"], get_forward_context().attn_metadata
        if not isinstance(step, dict):
            reserve(buffer.device)
            return buffer
        index: PoolMetadata = step[arguments["k_cache_prefix"]]
        pairs, keys = (arguments["k"], arguments["gate_score"]), arguments["kv_cache"]
        tail = arguments["tail_kv_cache"], step[arguments["tail_prefix"]].slot_mapping
        write_pools(pairs, arguments["compress_ape"], keys, index.pools, *tail)
        select_pools(index, arguments["q_quant"], arguments["weights"], keys, selection_of(buffer))
        return buffer

    sparse_indexer.sparse_attn_indexer_kpool = eager_break_during_capture(sparse_attn_indexer_kpool)


def write_pools(
    pairs: tuple[Tensor, Tensor], bias: Tensor, index_keys: Tensor, pools: StepPools, tail: Tensor, tail_slots: Tensor
) -> None:
    """Write the keys of the pools that a step's tokens complete, and the tokens into the tail.

    Args:
        pairs: Keys and gates of tokens [T, D]; rows after the step's tokens are padding.
        bias: Bias of gates by their token's position in its pool [pool_size, D] float32.
        index_keys: Index cache [num_blocks, pools of a block, D + 4] bytes (`dcpmla.cache.index_keys`); written.
        pools: Pools of the step's tokens.
        tail: Rings of the requests' last tokens [num_blocks, 2, ring, D], keys, then gates; written.
        tail_slots: Entry of each token in the tail [T] int64, block x ring + position % ring; -1 for padding.
    """
    (size, width), num_tokens = bias.shape, len(pools.slots)
    tail_slots = tail_slots[:num_tokens]
    keys, gates = (rows[:num_tokens].to(tail.dtype) for rows in pairs)
    if pools.query_len is not None:  # one kernel, in which a token of a request follows another
        shape = num_tokens // pools.query_len, pools.query_len
        columns = tail_slots, pools.slots, pools.tokens.seq_lens - 1
        places, slots, positions = (column.view(shape) for column in columns)
        grouped = (rows.view(*shape, width) for rows in (keys, gates))
        kpool_decode_update_and_maybe_write_cache_batched(
            index_keys, tail, places, *grouped, bias, slots, positions, size, width
        )
        return
    # Each token with those before it, which are in this step, or in the tail.
    ring = tail.shape[2]
    before = torch.arange(size - 1, -1, -1, device=keys.device)
    token = torch.arange(num_tokens, device=keys.device)[:, None] - before
    entry = (tail_slots % ring)[:, None] - before
    old = tail[(tail_slots // ring).clamp(min=0)[:, None], :, entry % ring]
    new = torch.stack([keys, gates], 1)[token.clamp(min=0)]
    members = torch.where((before <= pools.num_before[:, None])[..., None, None], new, old)
    written = pools.slots >= 0
    kpool_compress_and_write_cache(
        index_keys, members[:, :, 0], members[:, :, 1], bias, pools.slots, size, width, written
    )
    kpool_seed_tail_cache(tail, keys, gates, tail_slots, ring, width)


def select_pools(
    index: PoolMetadata, q: Tensor, weights: Tensor, index_keys: Tensor, selection: SelectedTokens
) -> None:
    """Select pools for the tokens of a step, if any token has more than are selected before it. Collective.

    Args:
        q, weights, index_keys: Arguments of `sparse.selection.select`.
        selection: Tokens of the selected pools and of the pool in progress; written.
    """
    pools, selector, tokens = index.pools, index.selector, index.sparse
    if tokens.max_seq_len <= selector.config.topk:
        return
    rows = slice(0, len(tokens.request))
    chosen, table = pools.selection, tokens.block_table
    selector.select(q[rows], weights[rows], index_keys, pools.visible, table, chosen)
    pool_size = selector.config.pool_size
    of_pools = selector.owner
    owner = Owner(of_pools.rank, of_pools.size, of_pools.interleave * pool_size)
    layout = SlotLayout(table, tokens.request, selector.dcp.block_size * pool_size, owner)
    expand_pools(chosen.positions, tokens.seq_lens, pool_size, layout, selection.rows(rows))
