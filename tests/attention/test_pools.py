"""From selected pools to tokens: the torch code against sets, kernels against the torch code; pools without norms."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.attention.layers.pooled.expand import expand_pools
from dcpmla.attention.layers.pooled.kernels import expand as kernels
from dcpmla.attention.layers.pooled.step import PoolMetadata, with_pools
from dcpmla.attention.select import compressor
from dcpmla.attention.select.entries import EntryLayout, Pooling, PoolUpdate, pool_updates
from dcpmla.attention.select.kernels import compressor as pooling
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests, StepTraits, TableSizes
from dcpmla.config import DCPConfig
from dcpmla.indexer_config import IndexerConfig
from dcpmla.ownership import Owner
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import on, on_both, run_kernels
from tests.support.step_tables import fill_table, lay_out_step
from tests.support.steps import selection_of

TABLE = torch.tensor([[3, 0, 5, 8, 1, 7], [2, 4, 6, 9, 10, 11]], dtype=torch.int32)
BLOCK_SIZE = 8


def new_selection(num_tokens: int, width: int, device: str = "cpu") -> SelectedTokens:
    positions, slots = (torch.full((num_tokens, width), -7, dtype=torch.int32, device=device) for _ in range(2))
    return SelectedTokens(positions, slots, torch.full((num_tokens,), -7, dtype=torch.int32, device=device))


def make_case(seed: int, pool_size: int, num_pools: int) -> tuple[Any, ...]:
    """Return pools, lengths and requests of rows with no pools, some, and as many as are selected."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = torch.randint(0, 40, (9,), generator=generator, dtype=torch.int32)
    seq_lens[0], seq_lens[1] = 0, pool_size - 1
    pools = torch.full((9, num_pools), -1, dtype=torch.int32)
    for row, seq_len in enumerate(seq_lens.tolist()):
        chosen = torch.randperm(seq_len // pool_size, generator=generator)[:num_pools]
        pools[row, : len(chosen)] = chosen.int()
    return pools, seq_lens, pool_size, TABLE, torch.tensor([0, 1] * 4 + [0], dtype=torch.int32), BLOCK_SIZE


@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 5), st.sampled_from([(1, 1), (2, 1), (2, 4), (3, 2)]))
def test_tokens_of_pools(seed: int, pool_size: int, num_pools: int, layout: tuple[int, int]) -> None:
    case, (size, interleave) = make_case(seed, pool_size, num_pools), layout
    pools, seq_lens, _, table, request, _ = case
    width = num_pools * pool_size + pool_size - 1
    owned = [set[int]() for _ in seq_lens]
    for rank in range(size):
        selection = new_selection(len(seq_lens), width)
        positions, slots, num_slots, _ = selection
        owner = Owner(rank, size, interleave)
        cache = SlotLayout(table, request, BLOCK_SIZE, owner)
        expand_pools(pools, seq_lens, pool_size, cache, selection)
        for row, seq_len in enumerate(seq_lens.tolist()):
            whole = {int(pool) * pool_size + at for pool in pools[row] if pool >= 0 for at in range(pool_size)}
            expected = whole | set(range(seq_len // pool_size * pool_size, seq_len))
            found = positions[row].tolist()
            assert sorted(found[: len(expected)]) == sorted(expected)
            assert found[len(expected) :] == [-1] * (width - len(expected))
            mine = [p for p in found if p >= 0 and owner.rank_of(p) == rank]
            index = [owner.local_index(p) for p in mine]
            blocks = table[request[row]].tolist()
            assert slots[row, : num_slots[row]].tolist() == [
                blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in index
            ]
            owned[row] |= set(mine)
    assert [len(tokens) for tokens in owned] == [
        int((pools[row] >= 0).sum()) * pool_size + seq_len % pool_size for row, seq_len in enumerate(seq_lens.tolist())
    ]


@given(
    query_lens=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    num_sums=st.integers(1, 5),
    width=st.integers(1, 6),
    data=st.data(),
)
def test_parts_hold_each_token_once(query_lens: list[int], num_sums: int, width: int, data: st.DataObject) -> None:
    """Decodes of any length, beside prefills: a later step may continue after any of a decode's last tokens."""
    num_decodes = data.draw(st.integers(0, len(query_lens)))
    contexts = data.draw(st.lists(st.integers(0, 9), min_size=len(query_lens), max_size=len(query_lens)))
    ends = [context + new for context, new in zip(contexts, query_lens, strict=True)]
    tables = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(len(ends))]
    traits = StepTraits(plan=SimpleNamespace(num_copies=num_sums), num_states=len(ends))
    steps = StepBuilder(DCPConfig(block_size=8), 0, "cpu", traits)
    step = steps.build(StepRequests(query_lens, ends, tables, range(len(ends))), width, num_decodes)
    assert step.table.begin.tolist() == contexts
    assert step.table.end.tolist() == ends
    parts = pool_updates(step, step.tokens.positions)
    assert len(parts) <= num_sums
    for index, (context, stop) in enumerate(zip(contexts, ends, strict=True)):
        bounds = [(int(part.first_position[index]), int(part.end[index])) for part in parts]
        assert [bound[0] for bound in bounds] == [context, *(bound[1] for bound in bounds[:-1])]
        assert bounds[-1][1] == stop
        kept = {}
        for part, (begin, until) in zip(parts, bounds, strict=True):
            assert begin <= until
            if num_sums > 1:
                assert part.source[index] == index * num_sums + (begin - 1) % num_sums
                assert part.target[index] == index * num_sums + (until - 1) % num_sums
            kept[int(part.target[index])] = until - 1
        last = range(max(context, stop - num_sums), stop) if index < num_decodes else [stop - 1]
        assert set(last) <= set(kept.values())


def test_pools_of_a_padded_step() -> None:
    """Rows that repeat a request's last token, and rows of padding, are in no pool. A captured step has no pools."""
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=8)
    plan = SimpleNamespace(latents=SimpleNamespace(pool_size=2), num_copies=3)
    layout = StepBuilder(dcp, 1, "cpu", StepTraits(plan=plan)).layout
    sizes = TableSizes(3, 9, 0, query_len=3)
    requests = StepRequests([3, 2], [21, 9], [[3, 1], [2]], [4, 0])
    step = lay_out_step(fill_table(requests, sizes), sizes, layout)
    indexer = IndexerConfig(num_heads=1, head_dim=4, topk=5, rope_interleaved=True, pool_size=2)
    prepared = with_pools(step, indexer)
    pools = prepared.get(PoolMetadata)
    for each in pools.parts:
        assert each.positions.tolist() == [18, 19, 20, 7, 8, -1, -1, -1, -1]
        assert each.request.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert pools.entries.entries_per_block == 4
    assert pools.visible.seq_lens.tolist() == [9, 10, 10, 4, 4, 4, 0, 0, 0]
    assert pools.visible.local_seq_lens.tolist() == [4, 5, 5, 2, 2, 2, 0, 0, 0]
    assert pools.visible.max_seq_len == 10
    assert pools.selection.positions.shape == (9, indexer.num_pools)
    assert selection_of(prepared).positions.shape == (9, 5)
    captured = replace(step, defer=lambda work, arguments: None)
    assert with_pools(captured, indexer) is captured


def check_kernels(device: str) -> None:
    for pool_size, num_pools, layout in ((4, 3, (0, 1, 1)), (2, 5, (1, 2, 4)), (3, 1, (0, 2, 1)), (1, 9, (1, 2, 1))):
        case = make_case(pool_size, pool_size, num_pools)
        width = num_pools * pool_size + pool_size - 1
        expected, found = new_selection(9, width), new_selection(9, width, device)
        there = on(device, case)
        expand_pools(*case[:3], SlotLayout(*case[3:], Owner(*layout)), expected)
        kernels.expand_pools(*there[:3], SlotLayout(*there[3:], Owner(*layout)), found)
        assert torch.equal(found[0].cpu(), expected[0])
        assert torch.equal(found[2].cpu(), expected[2])
        for row, number in enumerate(expected[2].tolist()):
            assert torch.equal(found[1][row, :number].cpu(), expected[1][row, :number])
    torch.manual_seed(0)
    pairs, bias = torch.randn(11, 32), torch.randn(4, 16)
    positions = torch.tensor([*range(2, 12), -1])
    numbers = (torch.zeros(11), torch.tensor([2]), torch.tensor([12]), torch.tensor([0]), torch.tensor([1]))
    part = PoolUpdate(positions, *(number.int() for number in numbers))
    sums = torch.randn(2, 1, 3, 16).abs()
    results = []
    for run, where in ((compressor.compress_, "cpu"), (pooling.compress_, device)):
        cache, copies = torch.zeros(12, 2, 16, device=where), sums.to(where, copy=True)
        layout = EntryLayout(None, TABLE[:1].to(where), 2, Owner())
        moved = PoolUpdate(*(column.to(where) for column in part))
        run(Pooling(pairs.to(where), bias.to(where), None, 0.0, copies, cache, layout, is_index=True), moved)
        results.append((cache.cpu(), copies.cpu()))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert results[0][0].flatten(0, 1).any(1).sum() == 3  # pools 0, 1 and 2


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_kernels)


def test_the_kernel_compiles_for_hopper() -> None:
    names = ("pools", "seq_lens", "block_table", "request", "positions", "slots", "num_slots")
    constants = {"NUM_POOLS": 128, "POOL_SIZE": 16, "WIDTH": 2063, "COLUMNS": 4096, "BLOCK_SIZE": 64}
    constants |= {"DCP_RANK": 1, "DCP_SIZE": 4, "INTERLEAVE": 1}
    for sizes in ({}, {"NUM_POOLS": 2048, "POOL_SIZE": 1, "WIDTH": 2048, "COLUMNS": 2048}):
        ptx_for_hopper(kernels.expand_kernel, "bf16", constants | sizes, **{f"{name}_ptr": "*i32" for name in names})
