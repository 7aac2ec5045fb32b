"""The layout of decodes and short prefills inside an engine, without one: lengths, segments, parts, against counts."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call
from dcpmla.attention.step import metadata as step_module
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder, lay_out
from dcpmla.attention.step.table import StepTokens
from dcpmla.comm.exchange import LocalExchange
from dcpmla.integrations.absorbed import DecodeLayout, TokenRange, table_of_lengths
from dcpmla.integrations.vllm.pooled.layout import PoolLayout, StepPools
from dcpmla.integrations.vllm.sparse.layout import SelectionLayout
from dcpmla.ownership import Owner
from tests.support.layouts import dcp_config
from tests.support.step_batches import Batch, batches

Requests = list[tuple[int, int]]  # new tokens of each request, and its cached ones
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6)
LAYOUTS = st.tuples(st.integers(1, 4), st.sampled_from([1, 4, 16]), st.sampled_from([1, 3, 16, 48, 128, 200]))


def layout_of(dcp_size: int, interleave: int, num_heads: int, rank: int = 0, max_query_len: int = 1) -> DecodeLayout:
    dcp = dcp_config(dcp_size, dcp_size, interleave, block_size=16)
    tokens = StepTokens.empty(8 * max_query_len, "cpu")
    return DecodeLayout(StepBuilder(dcp, rank, "cpu"), num_heads, max_query_len, None, tokens)


def build(decodes: DecodeLayout, requests: Requests, padding: int = 0) -> tuple[TokenRange, ...]:
    """Lay out requests, and a graph's padding after them. Padding has the first request's length."""
    query_lens, contexts = map(np.array, zip(*requests, strict=True))
    start = np.concatenate([[0], np.cumsum(query_lens), [query_lens.sum()] * padding]).astype(np.int32)
    seq_lens = torch.tensor([*(query_lens + contexts), *[0] * padding], dtype=torch.int32)
    table = torch.arange(len(seq_lens), dtype=torch.int32)[:, None].repeat(1, 8)
    num_tokens = int(query_lens.sum()) + padding * int(query_lens[0])
    return decodes.build(table, seq_lens, torch.from_numpy(start), start, num_tokens)


def count_seen(decodes: DecodeLayout, requests: Requests) -> list[int]:
    """Count one by one, for each new token, the tokens on this rank at its position and before."""
    owner, counts = decodes.steps.layout.owner, []
    for num_new, context in requests:
        for position in range(context, context + num_new):
            owners = [owner.rank_of(other) for other in range(position + 1)]
            counts.append(owners.count(owner.rank))
    return counts


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
    assert decodes.tokens is not None
    assert step.local_seq_lens.data_ptr() == decodes.tokens.local_seq_lens.data_ptr()


@given(batch=batches())
def test_lengths_alone_give_the_tokens_of_a_step(batch: Batch) -> None:
    for step in batch.build():
        table = table_of_lengths(step.table.end, step.table.row_start, step.table.block_table)
        assert all(column.data_ptr() % 16 == 0 for column in table)  # kernels are compiled for this
        tokens = step.tokens.map(torch.empty_like)
        lay_out(table, tokens, step.layout)
        assert all(map(torch.equal, tokens, step.tokens))


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


def vllm_step(requests: Requests, owner: Owner, padding: int = 0) -> SimpleNamespace:
    """Return what vLLM's layers share in a step, and a graph's padding after the requests, as in `build`."""
    query_lens, contexts = map(np.array, zip(*requests, strict=True))
    starts = torch.tensor([0, *np.cumsum(query_lens), *[query_lens.sum()] * padding], dtype=torch.int32)
    seq_lens = torch.tensor([*(query_lens + contexts), *[0] * padding], dtype=torch.int32)
    return SimpleNamespace(
        num_actual_tokens=int(query_lens.sum()) + padding * int(query_lens[0]),
        max_seq_len=int(seq_lens.max()) + 1,  # as vLLM counts drafts that follow
        seq_lens=seq_lens,
        dcp_local_seq_lens=owner.local_seq_lens(seq_lens),
        block_table_tensor=torch.arange(len(seq_lens) * 20, dtype=torch.int32).view(-1, 20).flip(0, 1),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
    )


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
        layout = SelectionLayout(decodes.steps.layout, 300)
        step = vllm_step(requests, Owner(rank, dcp_size, interleave), padding)
        sparse, again = layout.build(step), layout.build(step)
        num_real = int(step.query_start_loc[-1])
        owners = [index for index, (new, _) in enumerate(requests) for _ in range(new)]
        assert sparse.request[:num_real].tolist() == owners
        seen = [context + index + 1 for new, context in requests for index in range(new)]
        assert sparse.seq_lens.tolist() == seen + [0] * (padding * uniform)
        assert sparse.local_seq_lens[:num_real].tolist() == count_seen(decodes, requests)
        assert sparse.local_seq_lens[num_real:].sum() == 0
        assert sparse.block_table.shape[1] * decodes.steps.layout.dcp.virtual_block_size >= sparse.max_seq_len
        columns = [(each.request, each.seq_lens, each.local_seq_lens) for each in (sparse, again)]
        assert all(old.data_ptr() == new.data_ptr() for old, new in zip(*columns, strict=True))


@given(
    requests=REQUESTS,
    dcp_size=st.integers(1, 4),
    pools_in_turn=st.sampled_from([1, 2, 4]),
    pool_size=st.sampled_from([2, 4]),
    uniform=st.sampled_from([0, 1, 3]),
    padding=st.integers(0, 2),
)
def test_each_token_selects_from_the_whole_pools_before_it(
    requests: Requests, dcp_size: int, pools_in_turn: int, pool_size: int, uniform: int, padding: int
) -> None:
    """Pools are dealt to ranks one by one, and a pool has the slot after the rank's pool before it."""
    if uniform:
        requests = [(uniform, context) for _, context in requests]
    padding *= uniform > 0
    interleave = pools_in_turn * pool_size if dcp_size > 1 else 1
    dcp = dcp_config(dcp_size, dcp_size, interleave, block_size=16)
    for rank in range(dcp_size):
        owner = dcp.owner(rank)
        layout = StepBuilder(dcp, rank, "cpu").layout
        pools = PoolLayout(SelectionLayout(layout, 300), pool_size, num_pools=2, max_query_len=3, max_num_tokens=300)
        step = vllm_step(requests, owner, padding)
        built = pools.build(step)
        assert built.query_len == (uniform or built.query_len)
        check_pools(built, requests, owner, pool_size)
        real = step.seq_lens > 0
        if uniform == 1:  # the next draft
            step.seq_lens += real
            step.dcp_local_seq_lens.copy_(owner.local_seq_lens(step.seq_lens))
            pools.update(built)
            check_pools(built, [(1, context + 1) for _, context in requests], owner, pool_size)


def check_pools(pools: StepPools, requests: Requests, owner: Owner, pool_size: int) -> None:
    """Check the pools of tokens against pools that are dealt to ranks one by one; padding sees none."""
    per_block, row = 16 // pool_size, 0
    table, visible = pools.tokens.block_table, pools.visible
    for index, (new, context) in enumerate(requests):
        dealt = [owner.rank_of(pool * pool_size) for pool in range((new + context) // pool_size)]
        for position in range(context, context + new):
            num_whole, is_complete = (position + 1) // pool_size, (position + 1) % pool_size == 0
            num_local, slot = dealt[:num_whole].count(owner.rank), -1
            if is_complete and dealt[num_whole - 1] == owner.rank:
                column, place = divmod(num_local - 1, per_block)
                slot = int(table[index, column]) * per_block + place
            columns = visible.seq_lens, visible.local_seq_lens, pools.slots
            assert [column[row].item() for column in columns] == [num_whole, num_local, slot]
            assert pools.query_len is not None or pools.num_before[row] == position - context
            row += 1
    assert visible.seq_lens[row:].sum() == visible.local_seq_lens[row:].sum() == 0
    assert (pools.slots[row:] == -1).all()
