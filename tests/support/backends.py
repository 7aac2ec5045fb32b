"""Tables of attention backends with some of one's own in them, and calls that only say shapes and dtypes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, PrefillCall, Queries, Segments, split_queries
from dcpmla.attention.backends.choice import Backend
from dcpmla.attention.mla.decode import mla_decode
from dcpmla.attention.projections import project_latents


@contextmanager
def only(table: list[Backend[Any]], *backends: Backend[Any]) -> Iterator[None]:
    """Have nothing but these backends in a table for a while."""
    kept = table[:]
    table[:] = backends
    try:
        yield
    finally:
        table[:] = kept


def joined_call(
    q: Queries,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    *requests: Any,
    **options: Any,
) -> DecodeCall:
    """Return the call of queries whose parts are joined, or a tuple."""
    sizes = block_table, seq_lens, softmax_scale, kv_lora_rank
    return DecodeCall(*split_queries(q, kv_lora_rank), kv_cache, *sizes, *requests, **options)


def decode(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return `mla_decode` of a `joined_call`."""
    return mla_decode(joined_call(*arguments, **options))


def checked_call(*arguments: Any, **options: Any) -> DecodeCall:
    """Return a `joined_call` that is checked."""
    return joined_call(*arguments, **options).checked()


def unchecked_call(q: Tensor, kv_cache: Tensor, *sizes: Any, kv_lora_rank: int, **options: Any) -> DecodeCall:
    """Return a call whose dtypes need not belong together, such as an exact one over a cache of 8 bits."""
    parts = q.split([kv_lora_rank, q.shape[-1] - kv_lora_rank], -1) if q.shape[-1] > kv_lora_rank else (q, None)
    return DecodeCall(*parts, kv_cache, *sizes, kv_lora_rank=kv_lora_rank, **options)


def up(w_kv_b: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the up-projection of a weight [h, P + V, L]."""
    return partial(project_latents, w_kv_b=w_kv_b, is_deterministic=False)


def in_parts(q: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """Return queries as vLLM has them: the latent part by itself, the rope part at the end of wider rows."""
    wide = q[..., kv_lora_rank:].repeat(1, 1, 3)
    return q[..., :kv_lora_rank].contiguous(), wide[..., wide.shape[-1] // 3 * 2 :]


def decode_call(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype, **more: Any) -> DecodeCall:
    """Return a call of one request, unchecked."""
    numbers = torch.zeros(1, dtype=torch.int32)
    return unchecked_call(q, kv_cache, numbers[None], numbers, 1.0, kv_lora_rank=kv_lora_rank, dtype=dtype, **more)


def prefill_call(q: Tensor, k_pe: Tensor, v: Tensor, mask: Tensor | None = None, **more: Any) -> PrefillCall:
    """Return a call whose keys are as wide as its queries."""
    rows = Segments((0, len(q)), torch.tensor([0, len(q)], dtype=torch.int32))
    return PrefillCall(q, q[..., : q.shape[-1] - k_pe.shape[-1]], k_pe, v, *rows, *rows, 1.0, False, mask, **more)


def as_kernel(
    run: Callable[[Any], tuple[Tensor, Tensor]], call: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a backend's `run` as a function of the call's arguments."""
    return lambda *args, **kwargs: run(call(*args, **kwargs))
