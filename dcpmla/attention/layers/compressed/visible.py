"""Lists of the rows that tokens attend to: rows of windows, then rows of entries.

In rows that several layers share, each layer's windows are a ring of their own, before the entries. Data of each ring
starts at multiples of 16 bytes, because Triton would compile another kernel for other addresses.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dcpmla.attention.layers.compressed.calls import ChunkEntries, VisibleTokens
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.operators import is_on_gpu, operator

_ALIGNMENT = 4  # int32 of 16 bytes


@operator(
    "visible_rows",
    kernel="dcpmla.attention.layers.compressed.kernels.visible:visible_rows",
    fake=VisibleTokens.new_lists,
    runs=is_on_gpu,
)
def visible_rows(call: VisibleTokens) -> tuple[Tensor, Tensor]:
    """List this rank's rows of each token's window, and of all entries that the token sees.

    A window's token is read on the rank that would own it in MLA.

    Returns:
        Rows [n, N] int32, of any value after the last; their number [n] int32. N is the largest number possible.
    """
    positions, request, states, entry_table, ratio, entries_per_block, *_ = call
    state = states[request]
    rows, num = _window_rows(call, state)
    if not ratio:
        return rows, num
    counts = ((positions + 1) // ratio).where(state >= 0, 0)
    entries = (entry_table * entries_per_block)[..., None] + torch.arange(entries_per_block, dtype=torch.int32)
    local = call.owner.local_seq_lens(counts)
    return append_rows(rows, num, entries.flatten(1)[request.long()], local)


def _window_rows(call: VisibleTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `visible_rows` of windows alone, by the states [n] of tokens."""
    positions, window, ring_rows, owner = call.positions, call.window, call.ring_rows, call.owner
    first = owner.local_seq_lens((positions + 1 - window).clamp(min=0))
    count = owner.local_seq_lens(positions + 1) - first
    width = owner.window_bound(window)
    index = first[:, None] + torch.arange(width, dtype=torch.int32, device=positions.device)
    rows = owner.global_position(index) % ring_rows + state[:, None] * ring_rows
    return rows.to(torch.int32), count.where(state >= 0, 0).to(torch.int32)


def append_rows(rows: Tensor, num: Tensor, more: Tensor, num_more: Tensor) -> tuple[Tensor, Tensor]:
    """Join each token's two lists of rows, [n, N] and [n, M] int32, of num and num_more rows [n]: return one list
    [n, N + M], and its number of rows.
    """
    index = torch.arange(rows.shape[1] + more.shape[1], device=rows.device) - num[:, None]
    after = more.gather(1, index.clamp(0, max(0, more.shape[1] - 1))) if more.shape[1] else rows
    return pad(rows, (0, more.shape[1])).where(index < 0, after), num + num_more


@operator(
    "append_entries",
    kernel="dcpmla.attention.layers.compressed.kernels.visible:append_entries",
    fake=lambda rows, num, entries, _: (
        rows.new_empty(rows.shape[0], rows.shape[1] + entries.shape[1]),
        torch.empty_like(num),
    ),
    runs=is_on_gpu,
)
def append_entries(rows: Tensor, num: Tensor, entries: Tensor, chunk: ChunkEntries) -> tuple[Tensor, Tensor]:
    """Append the rows of the entries in a chunk to each token's list.

    Args:
        rows: Rows of each token so far [n, N], int32.
        num: Number of each token's rows [n], int32.
        entries: Entries of its request that each token attends to [n, k], int32; -1 for none.
        chunk: Entries that are appended.
    Returns:
        Rows [n, N + k] int32, of any value after the last; their number [n] int32.
    """
    (first, end, base), width = chunk, rows.shape[1] + entries.shape[1]
    is_here = (entries >= first[:, None]) & (entries < end[:, None])
    # Other entries go to an additional last column.
    column = (num[:, None] + is_here.cumsum(1) - 1).where(is_here, width)
    listed = pad(rows, (0, entries.shape[1] + 1))
    listed.scatter_(1, column, entries + (base - first)[:, None])
    return listed[:, :width].contiguous(), num + is_here.sum(1, dtype=torch.int32)


class RingWindows(NamedTuple):
    """The windows of n decode tokens in each layer's ring, as the first of the N slots of a selection.

    Attributes:
        slots: Slots by ring [rings, n, N] int32, zeros after the last.
        is_window: Whether a slot is a window's [n, N].
    """

    slots: Tensor
    is_window: Tensor

    @classmethod
    def of(cls, windows: Tensor, selection: SelectedTokens) -> "RingWindows":
        """Return the windows [rings, n, width] int32 as the first slots of a selection."""
        assert selection.num_first is not None
        num_slots = selection.slots.shape[1]
        column = torch.arange(num_slots, device=windows.device)
        is_window = column < selection.num_first[: windows.shape[1], None]
        return cls(pad(windows, (0, num_slots - windows.shape[2])), is_window)

    def slots_in(self, ring: int, selection: SelectedTokens) -> Tensor:
        """Return the slots of a selection in a layer's rows [n, N]."""
        return torch.where(self.is_window, self.slots[ring], selection.slots[: len(self.is_window)])


def ring_states(states: Tensor, num_rings: int, num_states: int) -> Tensor:
    """Return the numbers of requests' windows in rows that begin with num_rings rings [num_rings, num_reqs] int32.

    Args:
        states: State of each request [num_reqs] int32, which stay where they are negative (padding).
        num_states: Windows of a ring.
    """
    first = num_states * torch.arange(num_rings, dtype=states.dtype, device=states.device)[:, None]
    padded = pad(states, (0, -len(states) % _ALIGNMENT), value=-1)
    return torch.where(padded < 0, padded, padded + first)[:, : len(states)]


def visible_in_rings(call: VisibleTokens) -> tuple[Tensor, Tensor]:
    """List `visible_rows` for each ring.

    Args:
        call: Tokens, with the states of `ring_states`.
    Returns:
        Rows [rings, n, N] int32; their number [rings, n] int32.
    """
    (num_rings, num_reqs), num_tokens = call.states.shape, len(call.positions)
    positions, request = (pad(column, (0, -num_tokens % _ALIGNMENT)) for column in call[:2])
    first = num_reqs * torch.arange(num_rings, dtype=request.dtype, device=request.device)[:, None]
    in_turn = call._replace(
        positions=positions.repeat(num_rings),
        request=(request + first).flatten(),
        states=call.states.contiguous().view(-1),  # flatten() copies nothing for one request: elements would stay apart
        entry_table=call.entry_table.repeat(num_rings, 1),
    )
    rows, num = visible_rows(in_turn)
    by_ring = rows.view(num_rings, len(positions), rows.shape[1]), num.view(num_rings, len(positions))
    return by_ring[0][:, :num_tokens], by_ring[1][:, :num_tokens]
