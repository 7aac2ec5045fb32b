"""Host memory: blocks and states of every cache return byte for byte, in any order of stores and loads."""

from hashlib import sha256
from random import Random
from typing import Any

import pytest
import torch

from dcpmla import DCPConfig
from dcpmla.cache.host import HostMemory
from dcpmla.cache.host_rows import PAGE_BYTES, runs
from dcpmla.cache.latent import LatentCache, LatentPlan, LayerMemory
from dcpmla.cache.layers import Cache
from dcpmla.cache.shared_format import row_items, rows_shape
from dcpmla.cache.shared_rows import read_rows, write_rows
from dcpmla.cache.tier import HostTier, SlotTable, Tier
from dcpmla.integrations.families.table import attention_of
from tests.support.models import FAMILIES, tiny_config

CPU = torch.device("cpu")
FORMATS = ("auto", "fp8", "fp8_ds_mla")


def new_cache(family: str, kv_cache_dtype: str, num_blocks: int = 12, device: torch.device = CPU) -> Cache:
    """Return a cache with random bytes; ValueError where a family does not have the format."""
    dcp = DCPConfig(block_size=64, kv_cache_dtype=kv_cache_dtype)
    kind = attention_of(tiny_config(family))
    plan = kind.plan_cache(dcp, [1], torch.bfloat16, num_states=4, num_drafts=2)
    tokens = num_blocks * plan.block_tokens
    cache = kind.plan_cache(dcp, [tokens], torch.bfloat16, num_states=4, num_drafts=2).allocate(device)
    randomize(cache)
    return cache


def randomize(cache: Cache) -> None:
    for tensor in cache.tensors:
        tensor.view(torch.uint8).random_()


def digests(cache: Cache, number: int, kind: str) -> list[bytes]:
    """Return a digest of each part of a block or a state, read by the copies' own views, one at a time."""
    layers = cache.block_items if kind == "block" else [cache.state_items]
    parts = []
    for items in (items for layer in layers for items in layer):
        device = items.pages.device
        out = torch.empty(1, items.num_bytes, dtype=torch.uint8, device=device)
        items.read(torch.tensor([number], device=device), out)
        parts.append(sha256(out.cpu().numpy().tobytes()).digest())
    return parts


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_states_of_all_families_return(family: str, kv_cache_dtype: str) -> None:
    try:
        cache = new_cache(family, kv_cache_dtype)
    except ValueError:
        pytest.skip(f"{family} has no cache in {kv_cache_dtype}")
    memory = HostMemory(cache)
    check_sizes(cache, memory)
    memory.allocate(12, 3)
    blocks = [digests(cache, block, "block") for block in range(12)]
    memory.store([3, 0, 7, 11], [5, 6, 0, 2])
    state = digests(cache, 2, "state")
    if state:
        memory.store_state(2, 1)
    untouched = {number: digests(cache, number, "state") for number in (0, 1, 2)}
    memory.load([1, 2, 9], [5, 2, 0], (1, 3) if state else None)
    for block in range(12):
        source = {1: 3, 2: 11, 9: 7}.get(block, block)
        assert digests(cache, block, "block") == blocks[source], block
    assert digests(cache, 3, "state") == state
    assert {number: digests(cache, number, "state") for number in (0, 1, 2)} == untouched


def check_sizes(cache: Cache, memory: HostMemory) -> None:
    """Check that blocks and states together are all that the plan counts, up to padding of pages."""
    per_block = sum(items.num_bytes for layer in cache.block_items for items in layer)
    per_block += 0 if cache.token_ids is None else 4 * cache.sizes.block_tokens
    assert per_block == cache.sizes.bytes_per_block
    assert sum(items.num_bytes for items in cache.state_items) == cache.sizes.bytes_per_state
    assert memory.block_bytes % PAGE_BYTES == 0
    assert memory.block_bytes >= per_block


@pytest.mark.parametrize("rows_per_block", [1, 16, 64, 128])
def test_entries_in_pages_return(rows_per_block: int) -> None:
    """Blocks of fp8_ds_mla share pages with other blocks, and lie after windows."""
    first_row, num_blocks, head_dim = 128, 12, 512
    num_rows = first_row + num_blocks * rows_per_block
    rows = torch.empty(rows_shape(num_rows, head_dim, torch.uint8), dtype=torch.uint8)
    write_rows(rows, torch.randn(num_rows, head_dim), torch.arange(num_rows))
    before = read_rows(rows, torch.arange(num_rows), head_dim, torch.float32)
    parts = [items.grouped(rows_per_block) for items in row_items(rows, head_dim, first_row).values()]
    source, target = torch.tensor([5, 2]), torch.tensor([0, 11])
    for items in parts:
        content = torch.empty(2, items.num_bytes, dtype=torch.uint8)
        items.read(source, content)
        items.write(target, content)
    after = read_rows(rows, torch.arange(num_rows), head_dim, torch.float32)
    blocks = before[first_row:].unflatten(0, (num_blocks, -1)).clone()
    blocks[target] = blocks[source]
    assert after[:first_row].equal(before[:first_row])
    assert after[first_row:].equal(blocks.flatten(0, 1))


def test_many_moves_keep_their_content() -> None:
    """10^5 blocks are stored and loaded in random order through a tier that is evicted all the time."""
    plan = LatentPlan(num_blocks=256, block_size=1, layers=(LayerMemory(3),) * 2, dtype=torch.float32, dcp_size=1)
    cache, tier, rng = LatentCache(plan, CPU), HostTier(150), Random(0)
    memory = HostMemory(cache)
    memory.allocate(150, 0)
    contents = dict[bytes, bytes]()  # key -> digest of the content on all layers
    num_moves = num_loads = 0
    while num_moves < 100_000:
        blocks = rng.sample(range(256), rng.randint(1, 200))
        known = [key for key in contents if key in tier.blocks]
        contents = {key: contents[key] for key in known}
        if known and rng.random() < 0.5:
            keys = rng.sample(known, min(len(known), len(blocks)))
            tier.blocks.touch(keys)
            memory.load(blocks[: len(keys)], tier.blocks.slots(keys))
            assert [digest_of(cache, block) for block in blocks[: len(keys)]] == [contents[key] for key in keys]
            num_loads += len(keys)
        else:
            randomize(cache)
            for block in blocks:
                tier.remember(block, key := rng.randbytes(8))
                contents[key] = digest_of(cache, block)
            memory.store(*tier.take_pending()[:2])
        num_moves += len(blocks)
    assert num_loads > 20_000


def digest_of(cache: Any, block: int) -> bytes:
    return sha256(b"".join(layer.latents[block].numpy().tobytes() for layer in cache)).digest()


def test_runs_of_slots() -> None:
    slots = [1, 2, 3, 7, 9, 10]
    assert list(runs(slots)) == [
        (slice(0, 3), slice(1, 4)),
        (slice(3, 4), slice(7, 8)),
        (slice(4, 6), slice(9, 11)),
    ]
    assert list(runs([])) == []


def test_slots_evict_the_end_of_the_oldest_sequence_first() -> None:
    table = SlotTable(4)
    for key in (b"a1", b"a2", b"b1", b"b2"):
        table.add(key)
    table.touch([b"a1", b"a2"])
    table.touch([b"b1", b"b2"])
    table.hold([b"a2"])
    table.add(b"c")
    assert b"a1" not in table
    table.release([b"a2"])
    table.add(b"d")
    assert [key in table for key in (b"a2", b"b1", b"b2", b"c", b"d")] == [False, True, True, True, True]
    table.expire(b"c")
    table.add(b"e")
    assert b"c" not in table
    table.touch([b"d", b"e"])
    table.touch([b"b1", b"b2"])
    table.add(b"f")
    assert [key in table for key in (b"d", b"e")] == [True, False]


def test_content_that_comes_twice_leaves_a_slot_free() -> None:
    """It was stored while it was read from the disk."""
    table = SlotTable(2)
    slot = table.take()
    assert slot is not None
    assert table.add(b"key") is not None
    table.put(b"key", slot)
    assert table.take() == slot
    assert b"key" in table


def test_a_count_ends_at_the_first_gap() -> None:
    tier = HostTier(4, disk=Tier(4))
    for table, key in ((tier.blocks, b"first"), (tier.disk.blocks, b"second"), (tier.blocks, b"third")):
        table.add(key)
    keys = [b"first", b"second", b"third", b"fourth"]
    assert [tier.count(keys), tier.count(keys, with_disk=True), tier.count(keys[1:])] == [1, 3, 0]


def test_a_tier_with_all_content_held_takes_nothing() -> None:
    tier = HostTier(2)
    for block in range(3):
        tier.remember(block, bytes([block]))
    assert [len(each) for each in tier.take_pending()] == [2, 2, 2]
    tier.blocks.hold([bytes([1]), bytes([2])])
    tier.remember(5, b"new")
    assert tier.take_pending() == ([], [], [])
    tier.blocks.hold([bytes([2])])
    for is_held in (True, True, False):
        assert (tier.blocks.add(b"newer") is None) == is_held
        if is_held:
            tier.blocks.release([bytes([2])])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_states_return_from_pinned_memory(family: str) -> None:
    """Copies run on streams of their own, into slots in no order; what is computed meanwhile waits for them."""
    device = torch.device("cuda")
    cache = new_cache(family, "auto", num_blocks=40, device=device)
    memory = HostMemory(cache)
    memory.allocate(64, 3)
    blocks = [digests(cache, block, "block") for block in range(40)]
    slots = Random(0).sample(range(64), 40)
    memory.store(list(range(40)), slots).wait()
    state = digests(cache, 2, "state")
    if state:
        memory.store_state(2, 1)
    randomize(cache)
    order = Random(1).sample(range(40), 40)
    copy = memory.load(order, slots, (1, 3) if state else None)
    copy.wait_by_layer(cache.loads)
    for loads in cache.loads:
        while loads:
            loads.pop().wait()
    for source, block in enumerate(order):
        assert digests(cache, block, "block") == blocks[source], block
    assert digests(cache, 3, "state") == state
    assert copy.is_done
    assert copy.num_bytes == 40 * memory.block_bytes + bool(state) * memory.state_bytes
