"""Ownership compared with dealing cards: tokens go to ranks one by one and blocks fill slot by slot."""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.ownership import Owner, check_block_size

SIZES = tuple(range(1, 9))
INTERLEAVES = (1, 2, 16)
LAYOUTS = list(itertools.product(SIZES, INTERLEAVES))
layouts = pytest.mark.parametrize(("dcp_size", "interleave"), LAYOUTS, ids=[f"W{w}-I{i}" for w, i in LAYOUTS])


def deal(num_tokens: int, dcp_size: int, interleave: int) -> list[tuple[int, int]]:
    """Deal `interleave` tokens to each rank in turn; return (rank, index among the rank's tokens) of each token."""
    counts = [0] * dcp_size
    turns = itertools.chain.from_iterable(
        itertools.repeat(rank, interleave) for rank in itertools.cycle(range(dcp_size))
    )
    dealt = []
    for rank in itertools.islice(turns, num_tokens):
        dealt.append((rank, counts[rank]))
        counts[rank] += 1
    return dealt


def deal_slots(
    num_tokens: int, blocks: list[int], block_size: int, dcp_size: int, interleave: int
) -> list[tuple[int, int]]:
    """Return (rank, cache slot) of each token: every rank fills the same blocks in order, slot after slot."""
    free: list[Iterator[int]] = [
        (block * block_size + offset for block in blocks for offset in range(block_size)) for _ in range(dcp_size)
    ]
    return [(rank, next(free[rank])) for rank, _ in deal(num_tokens, dcp_size, interleave)]


def test_deal_is_the_layout_of_the_specification() -> None:
    assert [rank for rank, _ in deal(8, 3, 1)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [rank for rank, _ in deal(9, 2, 2)] == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert deal(9, 2, 2)[4:] == [(0, 2), (0, 3), (1, 2), (1, 3), (0, 4)]


@layouts
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_owner_and_indices_of_every_position(dcp_size: int, interleave: int, dtype: torch.dtype) -> None:
    """Of numbers, and of tensors of any shape."""
    num_tokens = 3 * dcp_size * interleave + interleave // 2 + 1
    dealt, owner = deal(num_tokens, dcp_size, interleave), Owner(0, dcp_size, interleave)
    assert [(owner.rank_of(position), owner.local_index(position)) for position in range(num_tokens)] == dealt
    for shape in ((num_tokens,), (), (0,), (2, 1, 4)):
        positions = torch.arange(shape[0]) if len(shape) == 1 else torch.randint(num_tokens, shape)
        owners, indices = owner.rank_of(positions.to(dtype)), owner.local_index(positions.to(dtype))
        assert owners.shape == indices.shape == torch.Size(shape)
        found = zip(owners.flatten().tolist(), indices.flatten().tolist(), strict=True)
        assert [*found] == [dealt[position] for position in positions.flatten().tolist()]
    for rank in range(dcp_size):
        mine, owner = [at for at, (other, _) in enumerate(dealt) if other == rank], Owner(rank, dcp_size, interleave)
        assert owner.global_position(torch.arange(len(mine), dtype=dtype)).tolist() == mine
        assert [owner.global_position(index) for index in range(len(mine))] == mine


@layouts
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_seq_lens_of_every_length(dcp_size: int, interleave: int, dtype: torch.dtype) -> None:
    lengths = list(range(2 * dcp_size * interleave + interleave + 2))  # 0, shorter than W, ragged tails
    owners = [rank for rank, _ in deal(lengths[-1], dcp_size, interleave)]
    for rank in range(dcp_size):
        owner, expected = Owner(rank, dcp_size, interleave), [owners[:length].count(rank) for length in lengths]
        mine, array = owner.local_seq_lens(torch.tensor(lengths, dtype=dtype)), owner.local_seq_lens(np.array(lengths))
        numbers = [owner.local_seq_lens(length) for length in lengths]
        assert (mine.dtype, array.dtype, {*map(type, numbers)}) == (torch.int32, np.int32, {int})
        assert mine.tolist() == array.tolist() == numbers == expected
        grid = owner.local_seq_lens(torch.tensor([[lengths, lengths]], dtype=dtype))
        assert (grid.dtype, grid.tolist()) == (torch.int32, [[expected, expected]])


@given(
    dcp_size=st.integers(1, 8),
    interleave=st.sampled_from(INTERLEAVES),
    rounds=st.integers(2**26, 2**45),
    offset=st.integers(0, 127),
)
def test_positions_past_32_bits(dcp_size: int, interleave: int, rounds: int, offset: int) -> None:
    """Whole rounds of dealing shift the position by W I each and every rank's index by I; the owner stays."""
    offset %= dcp_size * interleave
    rank, index = deal(offset + 1, dcp_size, interleave)[-1]
    position, local = rounds * dcp_size * interleave + offset, rounds * interleave + index
    owner = Owner(rank, dcp_size, interleave)
    for kind in (int, torch.tensor):
        assert int(owner.rank_of(kind(position))) == rank
        assert int(owner.local_index(kind(position))) == local
        assert int(owner.global_position(kind(local))) == position


@given(data=st.data())
def test_ranks_together_hold_each_token_once(data: st.DataObject) -> None:
    """A batch holds several sequences, tokens in any order and padding."""
    dcp_size, interleave = data.draw(st.integers(1, 8)), data.draw(st.sampled_from(INTERLEAVES))
    block_size = interleave * data.draw(st.integers(1, 3))
    ids = random.Random(data.draw(st.integers(0, 9))).sample(range(1000), 12)
    tables = torch.tensor(ids, dtype=torch.int32).view(3, 4)
    capacity = 4 * block_size * dcp_size
    tokens = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-3, capacity - 1)), min_size=1, max_size=30, unique=True)
    )
    sequences, positions = (torch.tensor(column) for column in zip(*tokens, strict=True))
    expected = [deal_slots(capacity, table, block_size, dcp_size, interleave) for table in tables.tolist()]
    slots = torch.stack(
        [
            Owner(rank, dcp_size, interleave).slot_mapping(positions, tables[sequences], block_size)
            for rank in range(dcp_size)
        ]
    )
    for (sequence, position), column in zip(tokens, slots.T.tolist(), strict=True):
        owner, slot = expected[sequence][position] if position >= 0 else (None, None)
        assert column == [slot if rank == owner else -1 for rank in range(dcp_size)]


@pytest.mark.parametrize(("dcp_size", "interleave"), [(1, 1), (2, 1), (3, 4), (8, 2), (4, 64)])
def test_a_window_has_no_more_tokens_of_a_rank_than_its_bound(dcp_size: int, interleave: int) -> None:
    owners = Owner(0, dcp_size, interleave).rank_of(torch.arange(900))
    for window in (1, 2, 5, 63, 128):
        most = int((owners == 0).long().unfold(0, window, 1).sum(-1).max())
        assert most <= Owner(0, dcp_size, interleave).window_bound(window) <= min(window, most + 2 * interleave)


def test_padding_alone_and_no_tokens() -> None:
    table = torch.tensor([[5], [6]], dtype=torch.int32)
    assert Owner(1, 2).slot_mapping(torch.tensor([-1, -7]), table, 4).tolist() == [-1, -1]
    empty = Owner(1, 2).slot_mapping(torch.empty(0, dtype=torch.int64), table[0], 4)
    assert (tuple(empty.shape), empty.dtype) == ((0,), torch.int64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_past_32_bits(dtype: torch.dtype) -> None:
    block = 2**31 - 1  # the last id of an int32 table
    table = torch.tensor([block], dtype=torch.int32)
    slots = Owner(1, 2).slot_mapping(torch.tensor([0, 1, 127], dtype=dtype), table, 64)
    assert slots.tolist() == [-1, block * 64, block * 64 + 63]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Owner(0, 0), "dcp_size is 0; it must be at least 1"),
        (lambda: Owner(0, -2), "dcp_size is -2; it must be at least 1"),
        (lambda: Owner(0, 2, 0), "interleave (--cp-kv-cache-interleave-size) is 0; it must be at least 1"),
        (lambda: Owner(0, 3, -1), "interleave (--cp-kv-cache-interleave-size) is -1; it must be at least 1"),
        (lambda: Owner(2, 2), "dcp_rank is 2; with dcp_size 2 it must be in [0, 2)"),
        (lambda: Owner(-1, 2), "dcp_rank is -1; with dcp_size 2 it must be in [0, 2)"),
        (lambda: Owner(0, 2).rank_of(-1), "position is -1; it must not be negative"),
        (lambda: Owner(0, 2).local_index(-4), "position is -4; it must not be negative"),
        (lambda: Owner(0, 2).global_position(-1), "index is -1; it must not be negative"),
        (lambda: Owner(0, 2).local_seq_lens(-1), "seq_lens is -1; it must not be negative"),
        (
            lambda: Owner(0, 2, 16).slot_mapping(torch.tensor([0]), torch.tensor([0]), 24),
            "cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) is 16; it must divide block_size "
            "(--block-size) 24",
        ),
        (lambda: check_block_size(0, 1), "block_size (--block-size) is 0; it must be at least 1"),
        (lambda: check_block_size(-4, 2), "block_size (--block-size) is -4; it must be at least 1"),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()


def test_tensors_are_not_looked_into() -> None:
    """Reading a tensor would synchronize with the host; on the meta device it fails."""
    positions, owner = torch.empty(3, dtype=torch.int64, device="meta"), Owner(1, 4)
    tensors: list[Tensor] = [
        owner.rank_of(positions),
        owner.local_index(positions),
        owner.global_position(positions),
        owner.local_seq_lens(positions),
        owner.slot_mapping(positions, torch.empty(3, 2, dtype=torch.int32, device="meta"), 16),
    ]
    assert all(tensor.shape == (3,) and tensor.device.type == "meta" for tensor in tensors)
