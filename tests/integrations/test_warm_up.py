"""The warm-up of attention inside another engine: the steps that it takes, and that each step runs."""

import pytest
import torch
from torch import Tensor

from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call
from dcpmla.attention.mla.prefill import dcp_mla_prefill
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder
from dcpmla.cache.formats import FP8
from dcpmla.comm.exchange import LocalExchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.warm_up import LayerSizes, warm_up
from dcpmla.runtime.graph_sizes import warm_up_sizes
from tests.support.backends import up


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
@pytest.mark.parametrize(("max_query_len", "segment_len"), [(1, 0), (3, 1), (1, 4)])
def test_every_step_is_taken(max_query_len: int, segment_len: int, cache_dtype: torch.dtype) -> None:
    decodes, segments, contexts = [], [], []
    kv_scale = torch.ones(1) if cache_dtype == FP8 else None

    def decode(q: Tensor, cache: Tensor, step: DecodeMetadata) -> None:
        out, _ = dcp_mla_decode(decode_call(q, cache, step, 1.0, 32, kv_scale=kv_scale), LocalExchange())
        assert out.shape == (len(q), 2, 32)
        if step.request_index is None:
            decodes.append((len(step.block_table), step.max_query_len))
        else:
            assert (step.queries is None) == (segment_len == 1)
            segments.append((step.max_query_len, len(step.request_index)))

    def prefill(q: Tensor, kv_c: Tensor, k_pe: Tensor, cache: Tensor, step: PrefillMetadata) -> None:
        w_kv_b = torch.zeros(2, 8 + 24, 32)
        out, _ = dcp_mla_prefill(q, kv_c, k_pe, cache, up(w_kv_b), step, 1.0, LocalExchange(), kv_scale)
        assert out.shape == (len(q), 2, 24)
        contexts.append(int(step.first_position))

    layer = LayerSizes(2, 32, 8, 16, torch.float32, cache_dtype)
    steps = StepBuilder(DCPConfig(block_size=16), 0, "cpu")
    warm_up(decode, prefill, layer, steps, None, 5, max_query_len, segment_len, max_segments=9 if segment_len else 0)
    query_lens = sorted({1, max_query_len})
    assert decodes == [(num_reqs, query_len) for query_len in query_lens for num_reqs in (1, 2, 3, 4, 5)]
    lengths = [length for length in (1, 2, 4) if length <= segment_len]
    assert segments == [(length, number) for length in lengths for number in (1, 2, 3, 4, 6, 8, 9)]
    assert contexts == [0, *warm_up_sizes(4096)]
