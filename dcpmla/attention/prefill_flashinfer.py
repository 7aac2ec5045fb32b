"""FlashInfer's attention of ragged batches (FlashAttention-3 on Hopper), where FlashInfer is installed.

It plans its work on the host.
"""

import importlib
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.projections import join_keys
from dcpmla.attention.step import Segments

HEAD_DIMS = ((192, 128), (128, 128))  # of keys and values, that its kernels are made for
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer asks for


def mha_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    queries: Segments,
    keys: Segments,
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `dcpmla.attention.prefill_backends.Prefill`; takes no mask."""
    assert mask is None
    plan = _plan(queries.start, keys.start, q.shape[1], q.shape[2], v.shape[2], scale, causal, q.dtype, q.device)
    out, lse = plan.run(q, join_keys(k_nope, k_pe), v, return_lse=True)
    return _clear_empty(out, lse.mul_(math.log(2)), queries, keys)  # its LSE is in base 2


def _clear_empty(out: Tensor, lse: Tensor, queries: Segments, keys: Segments) -> tuple[Tensor, Tensor]:
    """(0, -inf), in place, for requests without keys, of which the library says otherwise."""
    if 0 in keys.lens:
        query_lens, is_empty = queries.start_loc.diff(), keys.start_loc.diff() == 0
        row_is_empty = is_empty.repeat_interleave(
            query_lens, output_size=len(out)
        )  # the size spares a sync with the host
        out.masked_fill_(row_is_empty[:, None, None], 0.0)
        lse.masked_fill_(row_is_empty[:, None], -torch.inf)
    return out, lse


@lru_cache(maxsize=16)  # 8 MB each; all layers of a step ask for the same few
def _plan(
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
    # The plan is on its way from pinned memory, which the next plan may be given if this one is dropped.
    torch.cuda.current_stream(device).synchronize()
    return wrapper


@lru_cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
