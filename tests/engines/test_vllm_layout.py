"""The layout of decodes and short prefills inside an engine, without one: lengths, segments, parts, against counts."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call
from dcpmla.attention.step import metadata as step_module
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder
from dcpmla.comm.exchange import LocalExchange
from dcpmla.integrations.absorbed import DecodeLayout, TokenRange
from dcpmla.integrations.vllm.sparse.layout import SelectionLayout
from dcpmla.ownership import Owner
from tests.support.layouts import dcp_config

Requests = list[tuple[int, int]]  # new tokens of each request, and its cached ones
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6)
LAYOUTS = st.tuples(st.integers(1, 4), st.sampled_from([1, 4, 16]), st.sampled_from([1, 3, 16, 48, 128, 200]))


def layout_of(dcp_size: int, interleave: int, num_heads: int, rank: int = 0, max_query_len: int = 1) -> DecodeLayout:
    dcp = dcp_config(dcp_size, dcp_size, interleave, block_size=16)
    token_lens = torch.zeros(8 * max_query_len, dtype=torch.int32)
    return DecodeLayout(StepBuilder(dcp, rank, "cpu"), num_heads, max_query_len, None, token_lens)


def build(decodes: DecodeLayout, requests: Requests, padding: int = 0) -> tuple[TokenRange, ...]:
    """Lay out requests, and a graph's padding after them. Padding has the first request's length."""
    query_lens, contexts = map(np.array, zip(*requests, strict=True))
    start = np.concatenate([[0], np.cumsum(query_lens), [query_lens.sum()] * padding]).astype(np.int32)
    seq_lens = torch.tensor([*(query_lens + contexts), *[0] * padding], dtype=torch.int32)
    table = torch.arange(len(seq_lens), dtype=torch.int32)[:, None]
    num_tokens = int(query_lens.sum()) + padding * int(query_lens[0])
    local = decodes.steps.layout.owner.local_seq_lens(seq_lens)
    return decodes.build(table, seq_lens, local, torch.from_numpy(start), start, num_tokens)


def count_seen(decodes: DecodeLayout, requests: Requests) -> list[int]:
    """Count one by one, for each new token, the tokens on this rank at its position and before."""
    owner, counts = decodes.steps.layout.owner, []
    for num_new, context in requests:
        for position in range(context, context + num_new):
            owners = [owner.rank_of(other) for other in range(position + 1)]
            counts.append(owners.count(owner.rank))
    return counts


@settings(deadline=None)
@given(requests=REQUESTS, sizes=LAYOUTS, rows=st.integers(16, 1 << 12))
def test_each_token_sees_what_is_before_it(requests: Requests, sizes: tuple[int, int, int], rows: int) -> None:
    """Pieces cover all tokens in order, with their request's row of the table; parts are bounded and alike on ranks."""
    ranges = []
    for rank in range(sizes[0]):
        decodes = layout_of(*sizes, rank)
        with patch.object(step_module, "PART_ROWS", rows):
            parts = build(decodes, requests)
            longest = max(decodes.part_len, decodes.segment_len)
        lens, owners = [], []
        for tokens, part in parts:
            assert tokens.start == len(lens)
            assert tokens.stop - tokens.start == len(part.local_seq_lens)
            lens += part.local_seq_lens.tolist()
            if part.request_index is None:
                assert part.max_query_len == 1
                owners += range(len(part.block_table))
                continue
            assert tokens.stop - tokens.start <= longest
            ones = range(len(part.local_seq_lens) + 1)
            start = ones if part.queries is None else part.queries.start_loc.tolist()
            assert len(start) == len(part.request_index) + 1
            segment_lens = np.diff(start)
            assert 0 < segment_lens.min() <= segment_lens.max() <= part.max_query_len <= decodes.segment_len
            owners += np.repeat(part.request_index.numpy(), segment_lens).tolist()
        assert lens == count_seen(decodes, requests)
        assert owners == [index for index, (num_new, _) in enumerate(requests) for _ in range(num_new)]
        ranges.append([tokens for tokens, _ in parts])
    assert all(each == ranges[0] for each in ranges)


@settings(deadline=None)
@given(
    contexts=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    sizes=LAYOUTS,
    query_len=st.integers(1, 4),
    padding=st.integers(0, 2),
)
def test_graphs_find_their_steps_in_place(
    contexts: list[int], sizes: tuple[int, int, int], query_len: int, padding: int
) -> None:
    """Decodes with equally many drafts are not cut, and padding sees nothing."""
    requests = [(query_len, context) for context in contexts]
    decodes = layout_of(*sizes, max_query_len=4)
    ((tokens, step),) = build(decodes, requests, padding)
    assert tokens == slice(0, (len(requests) + padding) * query_len)
    assert step.queries is None
    assert step.request_index is None
    assert step.max_query_len == query_len
    assert step.local_seq_lens.tolist() == count_seen(decodes, requests) + [0] * padding * query_len
    if query_len > 1:
        assert step.local_seq_lens.data_ptr() == decodes.token_lens.data_ptr()


@pytest.mark.parametrize("rows", [1 << 16, 64])
def test_segments_attend_as_whole_requests(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "PART_ROWS", rows)
    requests, num_heads, latent, rope = [(1, 11), (1, 0), (5, 9), (16, 0), (11, 5)], 16, 32, 16
    torch.manual_seed(0)
    cache = torch.randn(len(requests), 16, latent + rope)
    q = torch.randn(sum(num_new for num_new, _ in requests), num_heads, latent + rope)
    parts = build(layout_of(1, 1, num_heads), requests)
    assert len(parts) == (1 if rows > 64 else 6)
    calls = [decode_call(q[tokens], cache, part, 0.1, latent) for tokens, part in parts]
    outs = [dcp_mla_decode(call, LocalExchange())[0] for call in calls]
    rows_of = [(index, seen) for index, (new, old) in enumerate(requests) for seen in range(old + 1, old + new + 1)]
    for token, (index, seen) in enumerate(rows_of):
        keys = cache[index, :seen].double()
        expected = (q[token].double() @ keys.T * 0.1).softmax(-1) @ keys[:, :latent]
        torch.testing.assert_close(torch.cat(outs)[token].double(), expected, atol=1e-5, rtol=0)


@settings(deadline=None)
@given(
    num_heads=st.sampled_from([1, 3, 16, 128]),
    lens=st.lists(st.integers(1, 128), min_size=1, max_size=20),
)
def test_segments_are_bounded(num_heads: int, lens: list[int]) -> None:
    """No part has more segments than the warm-up takes."""
    decodes = layout_of(1, 1, num_heads)
    parts = build(decodes, [(num_new, 0) for num_new in lens])
    assert max(num_segments(part) for _, part in parts) <= decodes.max_segments(len(lens), sum(lens))


def num_segments(part: DecodeMetadata) -> int:
    return len(part.block_table if part.request_index is None else part.request_index)


@settings(deadline=None)
@given(requests=REQUESTS, sizes=LAYOUTS, uniform=st.sampled_from([0, 1, 3]), padding=st.integers(0, 2))
def test_each_token_selects_from_what_is_before_it(
    requests: Requests, sizes: tuple[int, int, int], uniform: int, padding: int
) -> None:
    """Rows of a graph's padding select nothing, and a second step is in the memory of the first."""
    if uniform:
        requests = [(uniform, context) for _, context in requests]
    else:
        padding = 0  # graphs have as many new tokens of each request
    dcp_size, interleave, _ = sizes
    for rank in range(dcp_size):
        decodes = layout_of(dcp_size, interleave, num_heads=8, rank=rank)
        layout = SelectionLayout(decodes.steps.layout.dcp, rank, 300, torch.device("cpu"))
        query_lens, contexts = map(np.array, zip(*requests, strict=True))
        starts = torch.tensor([0, *np.cumsum(query_lens), *[query_lens.sum()] * padding], dtype=torch.int32)
        seq_lens = torch.tensor([*(query_lens + contexts), *[0] * padding], dtype=torch.int32)
        step = SimpleNamespace(
            num_actual_tokens=int(query_lens.sum()) + padding * uniform,
            max_seq_len=int(seq_lens.max()),
            seq_lens=seq_lens,
            dcp_local_seq_lens=Owner(rank, dcp_size, interleave).local_seq_lens(seq_lens),
            block_table_tensor=torch.zeros(len(seq_lens), 20, dtype=torch.int32),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
        )
        sparse, again = layout.build(step), layout.build(step)
        num_real = int(query_lens.sum())
        assert sparse.request[:num_real].tolist() == np.repeat(np.arange(len(requests)), query_lens).tolist()
        seen = [context + index + 1 for new, context in requests for index in range(new)]
        assert sparse.seq_lens.tolist() == seen + [0] * (padding * uniform)
        assert sparse.local_seq_lens[:num_real].tolist() == count_seen(decodes, requests)
        assert sparse.local_seq_lens[num_real:].sum() == 0
        assert sparse.block_table.shape[1] * decodes.steps.layout.dcp.virtual_block_size >= sparse.max_seq_len
        columns = [(each.request, each.seq_lens, each.local_seq_lens) for each in (sparse, again)]
        assert all(old.data_ptr() == new.data_ptr() for old, new in zip(*columns, strict=True))
