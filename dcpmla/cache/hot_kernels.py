"""Triton kernels of hot rows with their launchers; `cache/hot.py` specifies them.

A fetch is four kernels: selected rows that are hot are marked, and the others listed; the set's rows are counted by
their age; the oldest ones get the listed slots; then rows are copied. Rows are listed in any order across programs, so
two runs may place a row differently. What attention reads stays the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.cache import hot_set
from dcpmla.cache.hot_set import HotSet
from dcpmla.cache.items import Items

MAX_AGE = tl.constexpr(hot_set.MAX_AGE)
_AGES = tl.constexpr(hot_set.MAX_AGE + 1)
_COUNTED = tl.constexpr(32)  # blocks of counts per load
_ROWS = 4096  # of a set, per program
_SLOTS = 1024  # per program
_COPIED_ROWS = 8  # per program and round
_COPY_PROGRAMS = 512  # enough reads in flight for the rate of PCIe


@triton.jit
def mark_kernel(
    slots_ptr,
    num_slots_ptr,
    row_of_ptr,
    last_used_ptr,
    counts_ptr,
    missed_ptr,
    num_columns,
    num_rows,
    SLOTS: tl.constexpr,
):
    """Mark the hot rows among some slots of a token as used, and list the slots of the others, each once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    is_chosen = column < tl.load(num_slots_ptr + token)
    slot = tl.load(slots_ptr + token * num_columns + column, mask=is_chosen, other=0)
    row = tl.load(row_of_ptr + slot, mask=is_chosen, other=0)
    is_hot = is_chosen & (row > 0) & (row <= num_rows)
    tl.store(last_used_ptr + row - 1, tl.zeros_like(row).to(tl.int64) + tl.load(counts_ptr) + 1, mask=is_hot)
    # The slot stays marked by -1 until it gets a row, so only one program lists it.
    is_missed = is_chosen & ((row <= 0) | (row > num_rows))
    before = tl.atomic_min(row_of_ptr + slot, tl.full([SLOTS], -1, tl.int32), mask=is_missed, sem="relaxed")
    is_listed = (is_missed & (before != -1)).to(tl.int64)
    tl.atomic_add(counts_ptr + 1, tl.sum(is_hot.to(tl.int64), 0), sem="relaxed")
    first = tl.atomic_add(counts_ptr + 3, tl.sum(is_listed, 0), sem="relaxed") - tl.load(counts_ptr + 2)
    tl.store(missed_ptr + first + tl.cumsum(is_listed, 0) - is_listed, slot, mask=is_listed > 0)


@triton.jit
def _ages(last_used_ptr, row, num_rows, now):
    """Return the ages of rows; rows that this fetch has selected, and rows after the last, have age 0."""
    used = tl.load(last_used_ptr + row, mask=row < num_rows, other=now)
    return tl.minimum(now - used, MAX_AGE).to(tl.int32)


@triton.jit
def count_kernel(last_used_ptr, counts_ptr, num_missed_ptr, ages_ptr, num_rows, ROWS: tl.constexpr):
    """Count the rows of each age among ROWS rows."""
    program = tl.program_id(0)
    age = _ages(last_used_ptr, program * ROWS + tl.arange(0, ROWS), num_rows, tl.load(counts_ptr) + 1)
    ages = tl.arange(0, _AGES)
    # Rows that are in use are not counted.
    tl.store(ages_ptr + program * _AGES + ages, tl.where(ages > 0, tl.histogram(age, _AGES), 0))
    if program == 0:
        tl.store(num_missed_ptr, (tl.load(counts_ptr + 3) - tl.load(counts_ptr + 2)).to(tl.int32))


@triton.jit
def place_kernel(
    row_of_ptr,
    slot_of_ptr,
    last_used_ptr,
    counts_ptr,
    missed_ptr,
    rows_ptr,
    num_missed_ptr,
    ages_ptr,
    num_rows,
    ROWS: tl.constexpr,
):
    """Give the listed slots the oldest among ROWS rows, and scratch rows where all programs together have too few."""
    program, num_programs, ages = tl.program_id(0), tl.num_programs(0), tl.arange(0, _AGES)
    total = tl.zeros([_AGES], tl.int32)
    before = tl.zeros([_AGES], tl.int32)
    for start in range(0, num_programs, _COUNTED):
        block = start + tl.arange(0, _COUNTED)[:, None]
        counted = tl.load(ages_ptr + block * _AGES + ages[None, :], mask=block < num_programs, other=0)
        total += tl.sum(counted, 0)
        before += tl.sum(tl.where(block < program, counted, 0), 0)
    num_missed, num_old = tl.load(num_missed_ptr), tl.sum(total, 0)
    num_taken = tl.minimum(num_missed, num_old)
    at_least = num_old - tl.cumsum(total, 0) + total
    threshold = tl.max(tl.where(at_least >= num_taken, ages, 0), 0)
    num_equal = num_taken - tl.sum(tl.where(ages > threshold, total, 0), 0)
    equal_before = tl.sum(tl.where(ages == threshold, before, 0), 0)
    first = tl.sum(tl.where(ages > threshold, before, 0), 0) + tl.minimum(equal_before, num_equal)

    now = tl.load(counts_ptr) + 1
    row = program * ROWS + tl.arange(0, ROWS)
    age = _ages(last_used_ptr, row, num_rows, now)
    is_equal = ((age == threshold) & (age > 0)).to(tl.int32)
    is_first = (is_equal > 0) & (equal_before + tl.cumsum(is_equal, 0) - is_equal < num_equal)
    is_taken = (age > threshold) | is_first
    taken = is_taken.to(tl.int32)
    index = first + tl.cumsum(taken, 0) - taken
    slot = tl.load(missed_ptr + index, mask=is_taken, other=0)
    left = tl.load(slot_of_ptr + row, mask=is_taken, other=0)
    tl.store(row_of_ptr + left - 1, tl.zeros_like(left), mask=left > 0)
    tl.store(slot_of_ptr + row, slot + 1, mask=is_taken)
    tl.store(last_used_ptr + row, tl.zeros_like(row).to(tl.int64) + now, mask=is_taken)
    tl.store(row_of_ptr + slot, row + 1, mask=is_taken)
    tl.store(rows_ptr + index, row, mask=is_taken)
    for start in range(num_taken + program * ROWS, num_missed, num_programs * ROWS):
        index = start + tl.arange(0, ROWS)
        scratch, is_left = num_rows + index - num_taken, index < num_missed
        slot = tl.load(missed_ptr + index, mask=is_left, other=0)
        tl.store(row_of_ptr + slot, scratch + 1, mask=is_left)
        tl.store(rows_ptr + index, scratch, mask=is_left)


@triton.jit
def _places(row, num_rows, first_row, first_scratch):
    """Compute `HotSet.indices`."""
    return tl.where(row < num_rows, row + first_row, row - num_rows + first_scratch)


@triton.jit(do_not_specialize=["num_tokens"])
def copy_kernel(
    latents_ptr,
    pool_ptr,
    missed_ptr,
    rows_ptr,
    num_missed_ptr,
    slots_ptr,
    num_slots_ptr,
    row_of_ptr,
    table_ptr,
    counts_ptr,
    num_tokens,
    num_columns,
    num_rows,
    first_row,
    first_scratch,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Copy this program's share of the listed rows, and write its share of the table."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, COLUMNS)[None, :]
    for start in range(program * ROWS, tl.load(num_missed_ptr), num_programs * ROWS):
        index = start + tl.arange(0, ROWS)
        is_listed = index < tl.load(num_missed_ptr)
        slot = tl.load(missed_ptr + index, mask=is_listed, other=0).to(tl.int64)
        row = tl.load(rows_ptr + index, mask=is_listed, other=0)
        place = _places(row, num_rows, first_row, first_scratch).to(tl.int64)
        mask = is_listed[:, None] & (lane < LANES)
        content = tl.load(latents_ptr + slot[:, None] * LANES + lane, mask=mask)
        tl.store(pool_ptr + place[:, None] * LANES + lane, content, mask=mask)
    for start in range(program * SLOTS, num_tokens * num_columns, num_programs * SLOTS):
        entry = start + tl.arange(0, SLOTS)
        is_entry = entry < num_tokens * num_columns
        num_slots = tl.load(num_slots_ptr + entry // num_columns, mask=is_entry, other=0)
        is_chosen = is_entry & (entry % num_columns < num_slots)
        slot = tl.load(slots_ptr + entry, mask=is_chosen, other=0)
        row = tl.load(row_of_ptr + slot, mask=is_chosen, other=1) - 1
        place = _places(row, num_rows, first_row, first_scratch)
        tl.store(table_ptr + entry, tl.where(is_chosen, place, 0), mask=is_entry)
    if program == 0:
        tl.store(counts_ptr, tl.load(counts_ptr) + 1)
        tl.store(counts_ptr + 2, tl.load(counts_ptr + 3))


def fetch_hot_rows(hot: HotSet, latents: Tensor, slots: Tensor, num_slots: Tensor) -> Tensor:
    """Compute `fetch_hot_rows` in four kernels."""
    (num_tokens, num_columns), num_rows = slots.shape, len(hot.slot_of)
    num_blocks, device = triton.cdiv(num_rows, _ROWS), slots.device
    missed, rows = (torch.empty(slots.numel(), dtype=torch.int32, device=device) for _ in range(2))
    num_missed = torch.empty(1, dtype=torch.int32, device=device)
    ages, table = torch.empty(num_blocks, _AGES.value, dtype=torch.int32, device=device), torch.empty_like(slots)
    of_set = hot.row_of, hot.slot_of, hot.last_used, hot.counts
    mark_kernel[(num_tokens, triton.cdiv(num_columns, _SLOTS))](
        slots, num_slots, hot.row_of, hot.last_used, hot.counts, missed, num_columns, num_rows, SLOTS=_SLOTS
    )
    count_kernel[(num_blocks,)](hot.last_used, hot.counts, num_missed, ages, num_rows, ROWS=_ROWS)
    place_kernel[(num_blocks,)](*of_set, missed, rows, num_missed, ages, num_rows, ROWS=_ROWS)
    content, pool = (Items.of(each.flatten(0, 1)).pages for each in (latents, hot.pool))
    lanes = content.shape[-1]
    copy_kernel[(_COPY_PROGRAMS,)](
        content,
        pool,
        missed,
        rows,
        num_missed,
        slots,
        num_slots,
        hot.row_of,
        table,
        hot.counts,
        num_tokens,
        num_columns,
        num_rows,
        hot.first_row,
        hot.first_scratch,
        LANES=lanes,
        COLUMNS=triton.next_power_of_2(lanes),
        ROWS=_COPIED_ROWS,
        SLOTS=_SLOTS,
    )
    return table


@triton.jit(do_not_specialize=["num_slots"])
def forget_kernel(slots_ptr, row_of_ptr, slot_of_ptr, last_used_ptr, num_slots, num_rows, SLOTS: tl.constexpr):
    """Drop the copies of SLOTS slots."""
    index = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(slots_ptr + index, mask=index < num_slots, other=-1)
    row = tl.load(row_of_ptr + slot, mask=slot >= 0, other=0)
    is_hot = (row > 0) & (row <= num_rows)
    tl.store(slot_of_ptr + row - 1, tl.zeros_like(row), mask=is_hot)
    tl.store(last_used_ptr + row - 1, tl.zeros_like(row).to(tl.int64), mask=is_hot)
    tl.store(row_of_ptr + slot, tl.zeros_like(row), mask=slot >= 0)


def forget_hot_rows(hot: HotSet, slots: Tensor) -> None:
    """Compute `forget_hot_rows` in one kernel."""
    forget_kernel[(triton.cdiv(len(slots), _SLOTS),)](
        slots, hot.row_of, hot.slot_of, hot.last_used, len(slots), len(hot.slot_of), SLOTS=_SLOTS
    )
