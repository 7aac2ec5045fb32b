"""Windows in rows that several layers share: each layer's windows are a ring of their own, before the entries.

Data of each ring starts at multiples of 16 bytes, because Triton would compile another kernel for other addresses.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dcpmla.attention.layers.compressed.calls import VisibleTokens
from dcpmla.attention.layers.compressed.visible import visible_rows
from dcpmla.attention.select.step import SelectedTokens

_ALIGNMENT = 4  # int32 of 16 bytes


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
        return cls(functional.pad(windows, (0, num_slots - windows.shape[2])), is_window)

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
    padded = functional.pad(states, (0, -len(states) % _ALIGNMENT), value=-1)
    return torch.where(padded < 0, padded, padded + first)[:, : len(states)]


def visible_in_rings(call: VisibleTokens) -> tuple[Tensor, Tensor]:
    """List `visible_rows` for each ring.

    Args:
        call: Tokens, with the states of `ring_states`.
    Returns:
        Rows [rings, n, N] int32; their number [rings, n] int32.
    """
    (num_rings, num_reqs), num_tokens = call.states.shape, len(call.positions)
    positions, request = (functional.pad(column, (0, -num_tokens % _ALIGNMENT)) for column in call[:2])
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
