"""FlashInfer's attention kernels (FlashAttention-3 on Hopper), where FlashInfer is installed.

FlashInfer plans its work on the host, so no CUDA graph can contain its decode. Planning copies the lengths from the
GPU, once a step where torch counts writes, else once a layer.
"""

import importlib
import math
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.calls import DecodeCall, PrefillCall, Segments, join_keys
from dcpmla.attention.reference import token_tables

WIDTHS = (512, 64)  # latent and rope widths that its decode kernel supports
HEAD_DIMS = ((192, 128), (128, 128))  # key and value widths that its prefill kernels support
_WORKSPACE_BYTES = 128 << 20  # size that FlashInfer recommends
_UNKNOWN = count(-1, -1)


def run_decode(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute `dcpmla.mla_decode` for the calls that `backends` admits."""
    if len(call.q) == 0:
        return call.new_output()
    parts = call.q, call.q_pe, *call.kv_cache.tensor_split((call.kv_lora_rank,), -1)
    out, lse = _decoder(call.q.device).plan(call).run(*parts, return_lse=True, return_lse_base_on_e=True)
    is_empty = call.seq_lens == 0
    return out.masked_fill_(is_empty[:, None, None], 0.0), lse.masked_fill_(is_empty[:, None], -torch.inf)


class _Decoder:
    """FlashInfer's wrapper and its planned step, which is recognized by its tensors."""

    def __init__(self, device: torch.device) -> None:
        mla = importlib.import_module("flashinfer.mla")
        self._wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(device, "decode"), backend="fa3")
        self._step: tuple[Tensor | None, ...] = ()  # references keep other tensors from getting their addresses
        self._planned: tuple[Any, ...] = ()

    def plan(self, call: DecodeCall) -> Any:
        """Return the wrapper with the call's step planned."""
        q, kv_cache, table = call.q, call.kv_cache, call.block_table
        step = table, call.seq_lens, call.request_index, call.query_start_loc
        key = (*map(_version, step), call.max_query_len, q.shape, q.dtype, kv_cache.shape[1], call.scale)
        if not (all(held is tensor for held, tensor in zip(self._step, step, strict=False)) and self._planned == key):
            # Each query token becomes a request, because FlashInfer's causal bound does not account for other ranks.
            token = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            widths = call.kv_lora_rank, call.rope_dim
            sizes = (q.shape[1], *widths, kv_cache.shape[1], False, call.scale, q.dtype, kv_cache.dtype)
            self._wrapper.plan(token, token * table.shape[1], token_tables(call).flatten(), call.seq_lens, *sizes)
            self._step, self._planned = step, key
        return self._wrapper


def _version(tensor: Tensor | None) -> int:
    """Count the writes to a tensor; an inference-mode tensor does not count them, so it counts as new each time."""
    if tensor is None:
        return 0
    return next(_UNKNOWN) if tensor.is_inference() else tensor._version


@lru_cache
def _decoder(device: torch.device) -> _Decoder:
    return _Decoder(device)


def run_prefill(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Compute a `PrefillCall` without a mask."""
    q, v = call.q, call.v
    sizes = q.shape[1], q.shape[2], v.shape[2], call.scale, call.causal, q.dtype, q.device
    plan = _plan_prefill(call.queries.start, call.keys.start, *sizes)
    out, lse = plan.run(q, join_keys(call.k_nope, call.k_pe), v, return_lse=True)
    return _clear_empty(out, lse.mul_(math.log(2)), call.queries, call.keys)  # its LSE is in base 2


def _clear_empty(out: Tensor, lse: Tensor, queries: Segments, keys: Segments) -> tuple[Tensor, Tensor]:
    """Set (0, -inf), in place, for requests without keys, because the library leaves other values."""
    if 0 in keys.lens:
        query_lens, is_empty = queries.start_loc.diff(), keys.start_loc.diff() == 0
        row_is_empty = is_empty.repeat_interleave(query_lens, output_size=len(out))  # the size spares a host sync
        out.masked_fill_(row_is_empty[:, None, None], 0.0)
        lse.masked_fill_(row_is_empty[:, None], -torch.inf)
    return out, lse


@lru_cache(maxsize=16)  # 8 MB each; all layers of a step ask for the same few
def _plan_prefill(
    query_start: tuple[int, ...],
    key_start: tuple[int, ...],
    num_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    flashinfer = importlib.import_module("flashinfer")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(device, "prefill"))
    query_start_loc, key_start_loc = (torch.tensor(start, dtype=torch.int32) for start in (query_start, key_start))
    wrapper.plan(
        query_start_loc,
        key_start_loc,
        num_heads,
        num_heads,
        qk_head_dim,
        head_dim_vo=v_head_dim,
        causal=causal,
        sm_scale=scale,
        q_data_type=dtype,
    )
    # The plan is copied from pinned memory, which the next plan may reuse if this one is dropped.
    torch.cuda.current_stream(device).synchronize()
    return wrapper


@lru_cache
def _workspace(device: torch.device, phase: str) -> Tensor:
    """Allocate FlashInfer's memory once for each phase: the plan of one must outlive calls of the other."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
