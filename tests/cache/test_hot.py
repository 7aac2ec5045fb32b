"""Hot rows: the torch code against a plain table of ages, the kernels against the torch code. Kernels run on a GPU, in
Triton's interpreter without one, and are compiled for Hopper.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.select.step import check_selection, with_selection
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache import hot as spec
from dcpmla.cache import hot_set
from dcpmla.cache.host_rows import host_tensor
from dcpmla.cache.hot_set import HotSet, HotSizes
from dcpmla.cache.latent import LatentCache
from dcpmla.cache.layers import LayerCache
from dcpmla.indexer_config import IndexerConfig
from tests.attention.test_compile import SMALL
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import on_both, run_kernels
from tests.support.layouts import dcp_config

WIDTH, BLOCK, TOPK = 6, 4, 8
# Slots that each token of a call selects.
Selection = Sequence[Sequence[int]]


class PlainSet:
    """The hot slots of one layer and the call that selected each last, by a search through all rows."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[tuple[int, int | None]] = [(0, None)] * num_rows  # call, slot
        self.now = 0

    def fetch(self, selection: Selection) -> tuple[int, int]:
        """Select slots; return how many are hot, and how many distinct ones are not."""
        self.now += 1
        chosen = [slot for row in selection for slot in row]
        hot = {slot for _, slot in self.rows}
        missed = list(dict.fromkeys(slot for slot in chosen if slot not in hot))
        self.rows = [(self.now if slot in chosen else used, slot) for used, slot in self.rows]
        by_age = sorted(range(len(self.rows)), key=lambda row: -min(self.now - self.rows[row][0], hot_set.MAX_AGE))
        old = [row for row in by_age if self.rows[row][0] < self.now][: len(missed)]
        for row, slot in zip(sorted(old), missed, strict=False):
            self.rows[row] = self.now, slot
        return sum(slot in hot for slot in chosen), len(missed)

    def forget(self, slots: Sequence[int]) -> None:
        self.rows = [(0, None) if slot in slots else (used, slot) for used, slot in self.rows]


def new_sets(
    num_rows: int, num_slots: int, max_tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[HotSet]:
    """Return the sets of two layers with scratch rows for max_tokens, which hold NaN."""
    row_bytes = WIDTH * dtype.itemsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot_set, "SCRATCH_BYTES", max_tokens * TOPK * row_bytes)
        sizes = HotSizes(2, num_rows, TOPK, WIDTH, dtype)
        tensors = [torch.zeros(shape, dtype=kind, device=device) for shape, kind in sizes.tensors(num_slots)]
        tensors[0].view(torch.uint8).fill_(0xFF)
        return HotSet.of(sizes, tensors)


def new_latents(num_slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return latents whose first column is their slot."""
    latents = torch.randn(num_slots // BLOCK, BLOCK, WIDTH)
    latents.flatten(0, 1)[:, 0] = torch.arange(num_slots)
    return latents.to(dtype)


def columns(selection: Selection, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return slots and their numbers as a selection has them, with nonsense after the last slot."""
    slots = torch.full((len(selection), TOPK), 10**9, dtype=torch.int32)
    for row, chosen in zip(slots, selection, strict=True):
        row[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return slots.to(device), torch.tensor([len(row) for row in selection], dtype=torch.int32, device=device)


def check_rows(hot: HotSet, latents: Tensor, selection: Selection, table: Tensor) -> None:
    """Assert that the pool has the selected rows, bit for bit, where the table says."""
    rows, expected = hot.pool[:, 0].view(torch.uint8).cpu(), latents.flatten(0, 1).view(torch.uint8).cpu()
    for at, chosen in zip(table.tolist(), selection, strict=True):
        assert torch.equal(rows[at[: len(chosen)]], expected[list(chosen)])


def check_maps(hot: HotSet) -> None:
    """Assert that both maps of a set say the same."""
    num_rows = len(hot.slot_of)
    by_slot = {slot: row - 1 for slot, row in enumerate(hot.row_of.tolist()) if 0 < row <= num_rows}
    by_row = {slot - 1: row for row, slot in enumerate(hot.slot_of.tolist()) if slot}
    assert by_slot == by_row


def draw_selection(rng: random.Random, num_slots: int, max_tokens: int) -> Selection:
    num_tokens, span = rng.randint(1, max_tokens), rng.choice([num_slots, num_slots // 2])
    return [rng.sample(range(num_slots - span, num_slots), rng.randint(0, TOPK)) for _ in range(num_tokens)]


@given(
    seed=st.integers(0, 10**6), num_rows=st.sampled_from([1, 3, TOPK, 20, 90]), max_tokens=st.sampled_from([1, 2, 5])
)
def test_rows_are_there_and_the_oldest_leave(seed: int, num_rows: int, max_tokens: int) -> None:
    rng, num_slots = random.Random(seed), 48
    first, second = new_sets(num_rows, num_slots, max_tokens)
    max_tokens = first.max_tokens
    plain, latents, totals = PlainSet(num_rows), new_latents(num_slots), [0, 0]
    for _ in range(12):
        written = rng.sample(range(num_slots), 3)
        latents.flatten(0, 1)[written, 1:] += 1
        spec.forget_hot_rows(second, torch.tensor([-1, *written, -1]))
        plain.forget(written)
        selection = draw_selection(rng, num_slots, max_tokens)
        table = spec.fetch_hot_rows(second, latents, *columns(selection))
        totals = [total + number for total, number in zip(totals, plain.fetch(selection), strict=True)]
        check_rows(second, latents, selection, table)
        check_maps(second)
        assert second.slot_of.tolist() == [0 if slot is None else slot + 1 for _, slot in plain.rows]
        assert second.counts.tolist() == [plain.now, *totals, totals[1]]
    assert not any(memory.any() for memory in (first.row_of, first.slot_of, first.last_used, first.counts))
    assert first.pool[:num_rows].isnan().all()  # the other layer's


def test_scratch_rows_hold_what_the_set_has_no_room_for() -> None:
    """A set of one selection, and steps of many tokens whose selections are disjoint, then all the same."""
    num_slots = 5 * TOPK
    hot, _ = new_sets(TOPK, num_slots, 5)
    latents = new_latents(num_slots)
    disjoint = [range(token * TOPK, (token + 1) * TOPK) for token in range(5)]
    for selection in (disjoint, [range(TOPK)] * 5, disjoint[::-1], disjoint[:1]):
        hot.pool[hot.first_scratch :] = torch.nan
        table = spec.fetch_hot_rows(hot, latents, *columns(selection))
        check_rows(hot, latents, selection, table)
        check_maps(hot)
    assert hot.counts.tolist()[:1] == [4]


def test_old_rows_leave_in_the_order_of_their_last_use() -> None:
    hot, _ = new_sets(4, 12, 1)
    for slot in (0, 1, 2, 3, 1, 0, 5, 6):
        spec.fetch_hot_rows(hot, new_latents(12), *columns([[slot]]))
    assert sorted(hot.slot_of.tolist()) == [1, 2, 6, 7]


def test_sizes_hold_any_selection() -> None:
    """DeepSeek-V3.2's rows: the pool has room for what the tokens of a call select, all on one rank."""
    for num_rows in (2048, 32768, 1 << 20):
        sizes = HotSizes(61, num_rows, 2048, 656, torch.uint8)
        (num_pool_rows, _, _), _ = sizes.tensors(64)[0]
        assert num_pool_rows - 60 * num_rows >= sizes.max_tokens * 2048
        assert sizes.max_tokens == max(199, num_rows // 2048)


INDEXER = IndexerConfig(num_heads=8, head_dim=16, topk=TOPK, rope_interleaved=False)
SPARSE = replace(SMALL, indexer=INDEXER)


def test_a_cache_has_latents_in_host_memory_and_empty_sets() -> None:
    dcp = dcp_config(4, 4, kv_hot_tokens=30, block_size=BLOCK)
    plan = LatentCache.plan(SPARSE, dcp, 3, [100], torch.float32, index_layers=[0, 2])
    cache = LatentCache(plan, torch.device("cpu"))
    assert plan.bytes_per_rank == sum(memory.numel() * memory.itemsize for memory in cache.tensors)
    assert plan.host_bytes_per_block * plan.num_blocks == 3 * cache[0].latents.numel() * 4
    for number, layer in enumerate(cache):
        assert layer.latents.shape == (7, BLOCK, 24)
        assert (layer.index_keys is None) == (number == 1)
        assert all(layer.latents is not memory for memory in cache.tensors)
        assert layer.hot is not None
        assert (layer.hot.first_row, layer.hot.first_scratch, len(layer.hot.slot_of)) == (8 * number, 24, 8)
        layer.hot.counts[1] = 5 + number
    assert cache.hot_counts is not None
    assert cache.hot_counts[:, 1].tolist() == [5, 6, 7]


def test_mistakes() -> None:
    dcp = dcp_config(1, 1, kv_hot_tokens=30)
    with pytest.raises(
        ValueError, match=r"kv_hot_tokens \(--kv-hot-tokens\) is 30; it goes with layers that have latents"
    ):
        LatentCache.plan(replace(SPARSE, indexer=None), dcp, 1, [9], torch.float32)
    with pytest.raises(ValueError, match=r"kv_hot_tokens \(--kv-hot-tokens\) is 0; it must be a whole number"):
        dcp_config(1, 1, kv_hot_tokens=0)
    step = StepBuilder(dcp, 0).build(StepRequests([1], [1], [[0]]))
    with pytest.raises(ValueError, match=r"is 30, but cache.hot is None; plan the LatentCache with the same layout"):
        check_selection(TOPK, LayerCache(torch.zeros(1, 64, 24)), with_selection(step, TOPK))


def check_kernels(device: str) -> None:
    """Compare the kernels with the torch code over random steps. In the interpreter programs run in order."""
    from dcpmla.cache import hot_kernels as kernels

    kernels._ROWS, kernels._SLOTS, kernels._COPIED_ROWS, kernels._COPY_PROGRAMS = 8, 4, 2, 3
    rng, num_slots = random.Random(0), 64
    cases = [(1, 1, torch.float32), (TOPK, 3, torch.uint8), (21, 2, torch.bfloat16), (300, 3, torch.float32)]
    for num_rows, max_tokens, dtype in cases:
        mine, theirs = (
            new_sets(num_rows, num_slots, max_tokens, dtype)[1],
            new_sets(num_rows, num_slots, max_tokens, dtype, device)[1],
        )
        latents = new_latents(num_slots, dtype)
        there = latents.to(device)
        for _ in range(6):
            for kept, held in zip(mine[1:5], theirs[1:5], strict=True):
                kept.copy_(held)  # Programs list misses in any order on a GPU, so other slots may stay.
            written = torch.tensor([-1, *rng.sample(range(num_slots), 6)])
            spec.forget_hot_rows.reference(mine, written)
            kernels.forget_hot_rows(theirs, written.to(device))
            selection = draw_selection(rng, num_slots, max_tokens)
            table = spec.fetch_hot_rows.reference(mine, latents, *columns(selection))
            got = kernels.fetch_hot_rows(theirs, there, *columns(selection, device))
            check_rows(theirs, latents, selection, got)
            check_maps(theirs)
            assert theirs.counts.tolist() == mine.counts.tolist()
            assert (theirs.slot_of > 0).sum() == (mine.slot_of > 0).sum()
            if device == "cpu":
                assert torch.equal(got, table)
                for name in ("slot_of", "last_used"):
                    assert torch.equal(getattr(mine, name), getattr(theirs, name))


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_a_graph_reads_and_writes_pinned_memory(dtype: torch.dtype) -> None:
    """A graph writes rows to host memory, drops their copies and fetches them; nothing else moves bytes."""
    device, num_slots = torch.device("cuda"), 4096
    hot = new_sets(64, num_slots, 16, dtype, "cuda")[1]
    latents = host_tensor((num_slots // BLOCK, BLOCK, WIDTH), dtype, device)
    latents.copy_(new_latents(num_slots, dtype))
    rows, written = latents.flatten(0, 1), torch.arange(16, device=device)
    slots = torch.zeros(16, TOPK, dtype=torch.int32, device=device)
    numbers = torch.full((16,), TOPK, dtype=torch.int32, device=device)

    def step() -> Tensor:
        rows.index_copy_(0, written, rows[written] + 1)
        spec.forget_hot_rows(hot, written)
        return spec.fetch_hot_rows(hot, latents, slots, numbers)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table = step()
    rng = random.Random(0)
    for _ in range(20):
        selection = [rng.sample(range(64), TOPK - 2) + rng.sample(range(64, num_slots), 2) for _ in range(16)]
        slots.copy_(torch.tensor(selection, dtype=torch.int32))
        written.copy_(torch.tensor(rng.sample(range(64), 16)))
        graph.replay()
        check_rows(hot, latents, selection, table)
        check_maps(hot)


@pytest.mark.parametrize("row_bytes", [656, 1152])
def test_kernels_compile_for_hopper(row_bytes: int) -> None:
    """Rows are read from host memory in words of 16 bytes."""
    from dcpmla.cache import hot_kernels as kernels

    numbers = ("num_tokens", "num_columns", "num_rows", "first_row", "first_scratch", "num_slots")
    wide = {"last_used_ptr": "*i64", "counts_ptr": "*i64"}
    copied = {"LANES": row_bytes // 8, "COLUMNS": 128 if row_bytes == 656 else 256, "ROWS": 8, "SLOTS": 1024}
    for kernel, constants, types in (
        (kernels.mark_kernel, {"SLOTS": 1024}, wide),
        (kernels.count_kernel, {"ROWS": 4096}, wide),
        (kernels.place_kernel, {"ROWS": 4096}, wide),
        (kernels.forget_kernel, {"SLOTS": 1024}, {**wide, "slots_ptr": "*i64"}),
        (kernels.copy_kernel, copied, {**wide, "latents_ptr": "*i64", "pool_ptr": "*i64"}),
    ):
        scalars = {name: "i32" for name in numbers if name in kernel.arg_names}
        ptx = ptx_for_hopper(kernel, "i32", constants, "", **types, **scalars)
    assert "ld.global.v2.b64" in ptx


@on_both
def test_operators(device: str) -> None:
    """Check the schemas, and the shapes for tracing."""
    hot, _ = new_sets(TOPK, 16, 2, device=device)
    selection = columns([[1, 5, 2], [5]], device)
    torch.library.opcheck(spec.fetch_hot_rows.op, (*hot, new_latents(16).to(device), *selection))
    torch.library.opcheck(spec.forget_hot_rows.op, (*hot, torch.tensor([3, -1], device=device)))
