"""FlashInfer's decode kernel (FlashAttention-3 on Hopper), where FlashInfer is installed.

It plans its work on the host, from lengths that it fetches from the GPU: once a step here where torch counts
writes, else once a layer. So no CUDA graph can hold it.
"""

import importlib
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

WIDTHS = (512, 64)  # of the latent and the rope part, that its kernel is made for
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer asks for
_UNKNOWN = count(-1, -1)


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
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`dcpmla.mla_decode`, for the inputs that `backends` allows."""
    if len(q) == 0:
        return q.new_empty(*q.shape[:2], kv_lora_rank), q.new_empty(q.shape[:2], dtype=torch.float32)
    run = (
        _decoder(q.device)
        .plan(q, kv_cache, block_table, seq_lens, scale, kv_lora_rank, query_start_loc, max_query_len)
        .run
    )
    q_parts, cache_parts = q.tensor_split((kv_lora_rank,), -1), kv_cache.tensor_split((kv_lora_rank,), -1)
    out, lse = run(*q_parts, *cache_parts, return_lse=True, return_lse_base_on_e=True)
    is_empty = seq_lens == 0
    return out.masked_fill_(is_empty[:, None, None], 0.0), lse.masked_fill_(is_empty[:, None], -torch.inf)


class _Decoder:
    """FlashInfer's wrapper with the step that it has planned, recognized by its tensors."""

    def __init__(self, device: torch.device) -> None:
        mla = importlib.import_module("flashinfer.mla")
        self._wrapper = mla.BatchMLAPagedAttentionWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="fa3"
        )
        self._step: tuple[Tensor | None, ...] = ()  # held, so that no other tensor can take their place in memory
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
        step = block_table, seq_lens, query_start_loc
        key = (*map(_version, step), max_query_len, q.shape, q.dtype, kv_cache.shape[1], scale)
        if not (all(held is tensor for held, tensor in zip(self._step, step, strict=False)) and self._planned == key):
            # Every query token is a request of its own to FlashInfer: its causal bound knows nothing of other ranks'
            # tokens.
            num_tokens, num_columns = len(q), block_table.shape[1]
            token = torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device)
            request = token[:-1] // max_query_len
            if query_start_loc is not None:
                request = torch.searchsorted(query_start_loc[1:], token[:-1], right=True).clamp(
                    max=len(block_table) - 1
                )
            indices = block_table[request].flatten()
            widths = kv_lora_rank, q.shape[2] - kv_lora_rank
            sizes = (q.shape[1], *widths, kv_cache.shape[1], False, scale, q.dtype, kv_cache.dtype)
            self._wrapper.plan(token, token * num_columns, indices, seq_lens, *sizes)
            self._step, self._planned = step, key
        return self._wrapper


def _version(tensor: Tensor | None) -> int:
    """Counts writes; a tensor of inference mode does not count, and is taken as new each time."""
    if tensor is None:
        return 0
    return next(_UNKNOWN) if tensor.is_inference() else tensor._version


@lru_cache
def _decoder(device: torch.device) -> _Decoder:
    return _Decoder(device)
