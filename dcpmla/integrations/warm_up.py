"""The warm-up of attention inside another engine: decodes and prefills of every size, so that no request waits for
kernels to compile.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments
from dcpmla.attention.step.chunks import PrefillMetadata, lay_out_prefills
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder
from dcpmla.cache.formats import row_width
from dcpmla.runtime.graph_sizes import warm_up_sizes

_NEW_TOKENS = 16
_LONGEST_CONTEXT = 4096  # tokens on each rank; longer contexts are gathered by the same kernels


@dataclass(frozen=True)
class LayerSizes:
    """A layer's sizes on one rank, and the dtypes of its activations and of its cache."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


@torch.no_grad()
def warm_up(
    decode: Callable[[Tensor, Tensor, DecodeMetadata], object],
    prefill: Callable[[Tensor, Tensor, Tensor, Tensor, PrefillMetadata], object],
    layer: LayerSizes,
    steps: StepBuilder,
    workspace: Tensor | None,
    max_num_seqs: int,
    max_query_len: int,
    segment_len: int = 0,
    max_segments: int = 0,
) -> None:
    """Attend in steps of decodes, in segments of short prefills, then in prefills without a context and with one, over
    zeros. Collective over the DCP group.

    Args:
        decode: Attention from q [T, h, L + R] over a cache [1, block_size, width].
        prefill: Attention from q [T, h, P + R], kv_c [T, L] and k_pe [T, R] over such a cache.
        workspace: Memory of decode (`decode_workspace`).
        max_num_seqs, max_query_len: Maximum requests of a step, and new tokens of a decode.
        segment_len, max_segments: Maximum tokens of a segment, and segments of a call; 0 if no request is cut.
    """
    rank, rope, device = layer.kv_lora_rank, layer.qk_rope_head_dim, steps.layout.device

    def zeros(*shape: int, dtype: torch.dtype = layer.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    width = row_width(layer.cache_dtype, rank, rope)
    cache = zeros(1, steps.layout.dcp.block_size, width, dtype=layer.cache_dtype)
    table = zeros(max_num_seqs, 1, dtype=torch.int32)
    seq_lens = torch.ones(max(max_num_seqs * max_query_len, max_segments), dtype=torch.int32, device=device)
    for query_len in sorted({1, max_query_len}):
        for num_reqs in warm_up_sizes(max_num_seqs):
            num_tokens = num_reqs * query_len
            step = DecodeMetadata(table[:num_reqs], seq_lens[:num_tokens], None, query_len, workspace)
            decode(zeros(num_tokens, layer.num_heads, rank + rope), cache, step)
    for length in _powers_of_two(segment_len):
        for num_segments in warm_up_sizes(max_segments):
            step = _segments(num_segments, length, segment_len == 1, table, seq_lens, workspace)
            decode(zeros(num_segments, layer.num_heads, rank + rope), cache, step)
    q = zeros(_NEW_TOKENS, layer.num_heads, layer.qk_nope_head_dim + rope)
    new_tokens = q, zeros(_NEW_TOKENS, rank), zeros(_NEW_TOKENS, rope)
    longest = _LONGEST_CONTEXT * steps.layout.dcp.decode_context_parallel_size
    table = zeros(1, longest + _NEW_TOKENS, dtype=torch.int32)
    for context in (0, *warm_up_sizes(longest)):
        prefill(*new_tokens, cache, lay_out_prefills(steps.layout, [_NEW_TOKENS], [context + _NEW_TOKENS], table))


def _segments(
    num_segments: int, max_query_len: int, is_uniform: bool, table: Tensor, seq_lens: Tensor, workspace: Tensor | None
) -> DecodeMetadata:
    """Return a step of segments that share a row of the table. Each has one token, whatever the longest may have:
    the kernels do not depend on it.
    """
    start = torch.arange(num_segments + 1, dtype=torch.int32, device=table.device)
    queries = None if is_uniform else Segments(tuple(range(num_segments + 1)), start)
    index = torch.zeros(num_segments, dtype=torch.int32, device=table.device)
    return DecodeMetadata(table, seq_lens[:num_segments], queries, max_query_len, workspace, index)


def _powers_of_two(largest: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [1 << exponent for exponent in range(largest.bit_length())]
