"""Sums over a TP group whose GPUs reach each other over NVLink: all-reduce, residual and RMSNorm in one kernel."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.comm.calls import NormedSum
from dcpmla.comm.direct_ops import CARRIERS, enter, milliseconds, open_mailbox, raise_fault, sizes
from dcpmla.comm.exchange import Mailbox
from dcpmla.comm.faults import OPERATIONS
from dcpmla.comm.kernels.landings import NUM_PROGRAMS
from dcpmla.comm.kernels.reduce import one_shot_kernel, two_shot_kernel
from dcpmla.comm.norm import checked, norm_rows
from dcpmla.comm.symmetric import Allocate, allocate, wait_for_all
from dcpmla.comm.terms import Partial, Terms
from dcpmla.operators import operator
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.quantized import NormedRows, PlainRows

_LANDING_BYTES = 16 << 20
# Bytes of partial rows, times (W - 1.8), up to which one trip takes less time than two. Measured on two H200s: the
# second trip costs 1.3 us and saves 0.6 us a MB. Computed from the rates of links and memory: 3.2 more for each rank.
_ONE_SHOT_BYTES = 420_000
# Elements of partial rows up to which items are narrow, and past which they are wide. Measured on two H200s.
_NARROW_ELEMENTS, _WIDE_ELEMENTS = 1 << 13, 1 << 20
_FEWEST_ITEM_BYTES = 256  # bytes per item in a landing: 64 columns of 16 bits, from two ranks or with their sum


class SumMemory(NamedTuple):
    """The memory of sums.

    Attributes:
        squares: Sums of squares of items, int64, zeros between calls.
        mailbox: Memory of the exchange.
    """

    squares: Tensor
    mailbox: Mailbox


class DirectReduce:
    """Sums in float32, through memory that all ranks of a group can write to. One object serves all layers of a step,
    on one stream. It uses two landings and 1/32 of one of a GPU's memory.

    Args:
        group: Group of 2 to 8 ranks, each with a GPU of its own on one host. Collective over the group.
        timeout: Seconds to wait for a peer.
        landing_bytes: Maximum bytes of rows that a rank receives at a time; more are summed in turns.
        allocate: Function that allocates the memory.
        is_deterministic: Whether an element's bits depend on its terms alone: sums in rank order.
    Raises:
        ValueError: The group has another size.
    """

    name = "direct"

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        timeout: float = 60.0,
        landing_bytes: int = _LANDING_BYTES,
        allocate: Allocate = allocate,
        is_deterministic: bool = False,
    ) -> None:
        mailbox, self._landings = open_mailbox(group, device, landing_bytes, 0, timeout, allocate)
        self.fault = mailbox.fault
        squares = torch.zeros(landing_bytes // _FEWEST_ITEM_BYTES, dtype=torch.int64, device=device)
        self._memory, self._is_deterministic = SumMemory(squares, mailbox), is_deterministic
        wait_for_all(group, device)

    def all_reduce(self, partial: Partial) -> Tensor:
        terms = partial if isinstance(partial, Terms) else Terms(partial)
        return all_reduce(terms, None, self._is_deterministic, self._memory)

    def add_norm(
        self, partial: Partial, residual: Tensor, weight: Tensor, eps: float, quantizes: bool = False
    ) -> tuple[PlainRows, Tensor]:
        call = checked(partial, residual, weight, eps, quantizes)
        if self._is_deterministic:  # items' squares add up in an order that depends on the number of rows
            new_residual = all_reduce(call.rows, residual, True, self._memory)
            return NormedRows.join(*norm_rows(new_residual, weight, eps, quantizes)), new_residual
        normed, new_residual, *codes = add_norm(call, self._memory)
        return NormedRows.join(normed, *codes), new_residual

    def check(self) -> None:
        mailbox = self._memory.mailbox
        raise_fault(mailbox.fault, mailbox.timeout, mailbox.group_name)


@operator(
    "direct_all_reduce", fake=lambda terms, *_: terms.rows.new_empty(terms.shape), mutates_args=("state", "squares")
)
def all_reduce(terms: Terms, residual: Tensor | None, is_in_order: bool, memory: SumMemory) -> Tensor:
    """Compute `Reduce.all_reduce` through landings, or the sum with a residual, in rank order if is_in_order."""
    sums, operation = terms.rows.new_empty(terms.shape), "all_reduce" if residual is None else "add_norm"
    residual = None if residual is None else residual.contiguous()
    _reduce(operation, terms, residual, None, 0.0, (None, sums, None, None), memory, is_in_order)
    return sums


@operator("direct_add_norm", fake=lambda call, _: call.new_results(), mutates_args=("state", "squares"))
def add_norm(call: NormedSum, memory: SumMemory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `Reduce.add_norm` through landings; return the results of `comm.norm.add_norm`."""
    results = call.new_results()
    wanted = results if call.quantizes else (*results[:2], None, None)
    _reduce("add_norm", call.rows, call.residual.contiguous(), call.weight, call.eps, wanted, memory)
    return results


def is_one_shot(num_bytes: int, size: int) -> bool:
    """Return whether sending partial rows to all ranks takes less time than sending 2 / W of the bytes in two trips."""
    return num_bytes * (size - 1.8) <= _ONE_SHOT_BYTES


def choose_columns(num_tokens: int, width: int, size: int, quantizes: bool) -> int:
    """Choose the columns of an item: few for a single row, so that many programs share it; many for large batches."""
    if num_tokens * width <= _NARROW_ELEMENTS:
        return BLOCK if quantizes else 64  # items consist of whole groups
    # 512 columns of the rows of 8 ranks would fill all registers.
    return 512 if num_tokens * width > _WIDE_ELEMENTS and size <= 4 else 256


def _reduce(
    operation: str,
    terms: Terms,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    results: tuple[Tensor | None, Tensor, Tensor | None, Tensor | None],
    sum_memory: SumMemory,
    is_in_order: bool = False,
) -> None:
    """Sum partial rows [T, N] of all ranks into results (`NormedSum.new_results`, None for unwanted ones), in chunks
    that fit into a landing.
    """
    (normed, sums, codes, scales), (squares, memory) = results, sum_memory
    partial, ids, num_ids = terms
    rank, size = enter("partial", partial, memory), len(memory.addresses)
    partial = partial.contiguous().view(CARRIERS[partial.element_size()])
    (num_tokens, width), num_terms = sums.shape, 0 if ids is None else ids.shape[1]
    # A landing holds, one-shot, the items of all ranks; two-shot, parts of the items that this rank owns, and the sums.
    kernel, copies, group = (one_shot_kernel, size, 1) if is_one_shot(sums.nbytes, size) else (two_shot_kernel, 2, size)
    columns = choose_columns(num_tokens, width, size, codes is not None)
    tiles = -(-width // columns)
    num_fitting = memory.landing_bytes // (copies * columns * partial.element_size()) // group * group  # items
    at_once = num_fitting // tiles
    if not at_once:
        raise ValueError(
            f"landing_bytes is {memory.landing_bytes}; {size} ranks' rows of {width} columns take more at a time"
        )
    for first in range(0, num_tokens, at_once):
        tokens = slice(first, min(first + at_once, num_tokens))
        num_items = (tokens.stop - tokens.start) * tiles
        num_units = -(-num_items // group)
        units = -(-num_units // NUM_PROGRAMS)  # per program
        num_programs = -(-num_units // units)
        kernel[(num_programs,)](
            partial[tokens] if ids is None else partial[tokens.start * num_terms :],
            None if ids is None else ids[tokens],
            num_ids,
            None if residual is None else residual[tokens],
            weight,
            None if normed is None else normed[tokens],
            None if codes is None else codes[tokens],
            None if scales is None else scales[tokens],
            0 if scales is None else scales.stride(1),
            sums[tokens],
            squares,
            *memory[:3],  # addresses, state, fault
            num_items,
            rank,
            units * group,
            memory.landing_bytes,
            milliseconds(memory.timeout),
            OPERATIONS.index(operation),
            eps,
            WIDTH=width,
            COLUMNS=columns,
            TILES=triton.next_power_of_2(tiles),
            num_warps=1,
            **sizes(size),
            IN_ORDER=is_in_order and size > 2,  # two parts have one order
            TERMS=num_terms,
        )
