"""The operation of `direct` that stores rows at their final position in each rank's memory, as a custom op."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.comm.direct_ops import CARRIERS, check_carried, milliseconds, sizes
from dcpmla.comm.exchange import Mailbox
from dcpmla.comm.faults import OPERATIONS
from dcpmla.comm.kernels.window import place_kernel
from dcpmla.operators import nothing, operator

_THREADS = 128
_PLACED = 8 * _THREADS  # elements of an item of place_kernel: 16 bytes of bfloat16 a thread
_PROGRAMS = 528  # place_kernel has four a multiprocessor of an H200


class Window(NamedTuple):
    """The memory that takes rows on each rank.

    Attributes:
        mailbox: Addresses of the memory, and its counters.
        window_at, flags_at: First byte of the window and of the flags of arrival.
    """

    mailbox: Mailbox
    window_at: int
    flags_at: int


@operator("direct_place", fake=nothing, mutates_args=("state",))
def place(rows: Tensor, targets: Tensor | None, window: Window, operation: str) -> None:
    """Store rows [N, D] in each rank's window: row n becomes row targets[n], or is skipped if that is -1; without
    targets, rank r's row n becomes row n W + r.

    Finishes, in stream order, when the rows of all ranks have arrived. D may be any size: rows of fp8_ds_mla are not a
    multiple of 16 bytes for every latent.
    """
    mailbox, window_at, flags_at = window
    rank = check_carried("rows", rows, mailbox)
    num_rows, width = rows.shape
    columns = min(_PLACED, width & -width)  # the largest power of two that divides the width
    num_items = -(-num_rows * columns // _PLACED) * (width // columns)
    num_programs = min(max(1, num_items), _PROGRAMS)
    place_kernel[(num_programs,)](
        rows.contiguous().view(CARRIERS[rows.element_size()]),
        targets,
        *mailbox[:3],  # addresses, state, fault
        num_rows,
        rank,
        window_at,
        flags_at,
        milliseconds(mailbox.timeout),
        OPERATION=OPERATIONS.index(operation),
        WIDTH=width,
        ROWS=_PLACED // columns,
        COLUMNS=columns,
        THREADS=_THREADS,
        num_warps=_THREADS // 32,
        **sizes(len(mailbox.addresses)),
    )
