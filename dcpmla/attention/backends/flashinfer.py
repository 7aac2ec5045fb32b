"""FlashInfer's prefill kernels (FlashAttention-3 on Hopper), where FlashInfer is installed."""

import importlib
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import PrefillCall, join_keys

HEAD_DIMS = ((192, 128), (128, 128))  # key and value widths that its kernels support
_WORKSPACE_BYTES = 128 << 20  # size that FlashInfer recommends


def run_prefill(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Compute a `PrefillCall` without a mask."""
    q, v, queries, keys = call.q, call.v, call.queries, call.keys
    sizes = q.shape[1], q.shape[2], v.shape[2], call.softmax_scale, call.causal, q.dtype, q.device
    out, lse = _plan_prefill(queries.start, keys.start, *sizes).run(
        q, join_keys(call.k_nope, call.k_pe), v, return_lse=True
    )
    lse.mul_(math.log(2))  # its LSE is in base 2
    if 0 in keys.lens:  # for requests without keys the library leaves other values than (0, -inf)
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
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(device))
    starts = (torch.tensor(start, dtype=torch.int32) for start in (query_start, key_start))
    options = {"head_dim_vo": v_head_dim, "causal": causal, "sm_scale": scale, "q_data_type": dtype}
    wrapper.plan(*starts, num_heads, num_heads, qk_head_dim, **options)
    # The plan is copied from pinned memory, which the next plan may reuse if this one is dropped.
    torch.cuda.current_stream(device).synchronize()
    return wrapper


@lru_cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
