"""FlashInfer's decode kernel (FlashAttention-3 on Hopper), where FlashInfer is installed.

It plans its work on the host, from lengths that it fetches from the GPU: once a step here, for all layers. So no CUDA graph can hold it.
"""

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

WIDTHS = (512, 64)  # of the latent and the rope part, that its kernel is made for
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer asks for


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    query_start_loc: Tensor | None,
    max_query_len: int,
    workspace: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`dcpmla.mla_decode`, for the inputs that `backends` allows."""
    if len(q) == 0:
        return q.new_empty(*q.shape[:2], kv_lora_rank), q.new_empty(q.shape[:2], dtype=torch.float32)
    run = _decoder(q.device).plan(q, kv_cache, block_table, seq_lens, scale, kv_lora_rank, query_start_loc, max_query_len).run
    q_parts, cache_parts = q.tensor_split((kv_lora_rank,), -1), kv_cache.tensor_split((kv_lora_rank,), -1)
    out, lse = run(*q_parts, *cache_parts, return_lse=True, return_lse_base_on_e=True)
    is_empty = seq_lens == 0
    return out.masked_fill_(is_empty[:, None, None], 0.0), lse.masked_fill_(is_empty[:, None], -torch.inf)


class _Decoder:
    """FlashInfer's wrapper with the step that it has planned, recognised by its tensors."""

    def __init__(self, device: torch.device) -> None:
        mla = importlib.import_module("flashinfer.mla")
        self._wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="fa3")
        self._step: tuple[Tensor, Tensor] | None = None  # held, so that no other tensor can take their place in memory
        self._planned: tuple[Any, ...] = ()

    def plan(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        kv_lora_rank: int,
        query_start_loc: Tensor | None,
        max_query_len: int,
    ) -> Any:
        key = (block_table._version, seq_lens._version, q.shape, q.dtype, kv_cache.shape[1], scale)
        is_same = self._step is not None and self._step[0] is block_table and self._step[1] is seq_lens and self._planned == key
        if not is_same:
            # Every query token is a request of its own to FlashInfer: its causal bound knows nothing of other ranks' tokens.
            num_tokens, num_columns = len(q), block_table.shape[1]
            token = torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device)
            request = token[:-1] // max_query_len
            if query_start_loc is not None:
                request = torch.searchsorted(query_start_loc[1:], token[:-1], right=True).clamp(max=len(block_table) - 1)
            indices = block_table[request].flatten()
            widths = kv_lora_rank, q.shape[2] - kv_lora_rank
            sizes = (q.shape[1], *widths, kv_cache.shape[1], False, scale, q.dtype, kv_cache.dtype)
            self._wrapper.plan(token, token * num_columns, indices, seq_lens, *sizes)
            self._step, self._planned = (block_table, seq_lens), key
        return self._wrapper


@lru_cache
def _decoder(device: torch.device) -> _Decoder:
    return _Decoder(device)
