"""Attention of prompts in a fixed order (`DCPConfig.deterministic`) over a cache that the ranks of a DCP group share.

A query's keys are summed up tile by tile from position 0. So all keys are tiles of one grid of positions: new tokens
are gathered from the cache with their context, chunk by chunk. Where no request has a context, they attend to their own
latents, rounded as in the cache.
"""

import torch
from torch import Tensor

from dcpmla.attention.backends.deterministic_reference import (
    DeterministicPrefillCall,
    Sums,
    new_sums,
    prefill_deterministic,
    runs_kernel,
)
from dcpmla.attention.backends.obstacles import hopper_widths
from dcpmla.attention.mla.weights import MHAInputs
from dcpmla.attention.step.chunks import ContextChunk, PrefillMetadata
from dcpmla.cache.formats import to_cache_rows, to_latents
from dcpmla.operators import import_kernel, nothing, operator


class DeterministicResults:
    """Attention of prefill tokens in a fixed order, to their own keys or chunk by chunk to all.

    Args:
        q: Queries [T, h, P + R], rotated.
        prefill: Metadata with chunks that include the new tokens, or without chunks.
        softmax_scale: Factor of the scores.
        out: Memory of the output [T, h, V] in the dtype of q, contiguous, in which rows of no request stay as they are;
            None for new memory.
    Attributes:
        out, lse: Results [T, h, V] and [T, h] float32.
    """

    out: Tensor

    def __init__(self, q: Tensor, prefill: PrefillMetadata, softmax_scale: float, out: Tensor | None = None) -> None:
        self._q, self._softmax_scale, self._memory = q, softmax_scale, out
        self._queries = prefill.queries.start_loc, prefill.first_position
        self._num_chunks = len(prefill.context_chunks)
        self._sums: Sums | None = None
        self.lse = q.new_empty(q.shape[:2], dtype=torch.float32)

    def attend_to_own(self, k_nope: Tensor, v: Tensor, k_pe: Tensor) -> None:
        """Attend to the new tokens of prompts without contexts."""
        self._attend(k_nope, v, k_pe, *self._queries)

    def attend_to_chunk(self, chunk: ContextChunk, k_nope: Tensor, v: Tensor, k_pe: Tensor) -> None:
        """Attend to a chunk."""
        self._attend(k_nope, v, k_pe, chunk.keys.start_loc, chunk.first_position)

    def _attend(self, k_nope: Tensor, v: Tensor, k_pe: Tensor, start_loc: Tensor, first_position: Tensor) -> None:
        q, keys = self._q, (start_loc, first_position)
        if self._sums is None:
            self.out = q.new_empty(*q.shape[:2], v.shape[-1]) if self._memory is None else self._memory
            # A kernel that meets all keys in one call stores no sums.
            num_rows = 0 if self._num_chunks < 2 and runs_kernel(q) else q.shape[0]
            empty = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
            self._sums = new_sums((num_rows, q.shape[1]), v.shape[-1], empty)
        call = DeterministicPrefillCall(q, k_nope, k_pe, v, *self._queries, *keys, self._softmax_scale)
        attend_to_chunk(call, self.out, self.lse, self._sums)


def overwrite_prompts(
    out: Tensor, mha: MHAInputs, latents: Tensor, prefill: PrefillMetadata, softmax_scale: float
) -> None:
    """Write the output of prompts without contexts into their rows, in a step in which only the device knows which rows
    these are (`StepMetadata.shares_rows`).

    Args:
        out: Output of the whole step [T, h, V]; rows of no prompt stay as they are.
        mha: Inputs of all tokens, with their own latents projected.
        latents: Latents of all tokens [T, L + R] as the cache holds them.
    """
    assert mha.kv is not None
    num_heads, rank = mha.q.shape[1], mha.w_kv_b.shape[2]
    k_nope, v = mha.kv.unflatten(1, (num_heads, -1)).tensor_split((mha.w_kv_b.shape[1] - out.shape[2],), -1)
    DeterministicResults(mha.q, prefill, softmax_scale, out).attend_to_own(k_nope, v, latents[:, rank:])


@operator("deterministic_prefill", fake=nothing, mutates_args=("out", "lse", "acc", "peak", "total"))
def attend_to_chunk(call: DeterministicPrefillCall, out: Tensor, lse: Tensor, sums: Sums) -> None:
    """Add a chunk of keys to each query's sums, and write results of requests that end in it."""
    if not runs_kernel(call.q):
        prefill_deterministic(call, out, lse, sums)
        return
    # A choice by anything that changes from step to step would change bits.
    folder = "triton" if hopper_widths(call.q, call.k_nope, call.k_pe, call.v) else "hopper"
    import_kernel(f"dcpmla.attention.{folder}.deterministic_prefill:run")(call, out, lse, sums)


@operator(
    "round_latents",
    kernel="dcpmla.cache.kernels:round_latents",
    fake=lambda latents, *_: latents.new_empty(latents.shape),
)
def round_latents(latents: Tensor, kv_lora_rank: int, storage: torch.dtype, kv_scale: Tensor | None) -> Tensor:
    """Return latents [N, L + R] as a cache of dtype `storage`, of 8 bits, would hold them. A custom op."""
    rows = to_cache_rows(latents[:, :kv_lora_rank], latents[:, kv_lora_rank:], storage, kv_scale)
    return to_latents(rows, kv_lora_rank, kv_scale, latents.dtype)
