"""The operations of `direct` as operators of torch: what they check, how they cut their work, their launches."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from dcpmla.comm.kernels.place import place_kernel
from dcpmla.comm.kernels.slots import NUM_PROGRAMS, combine_kernel, gather_kernel
from dcpmla.comm.symmetric import PeerMemory
from dcpmla.parallel.collectives import PeerFault

_OPERATIONS = ("gather_heads", "combine", "gather_context")
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # kernels move rows as integers
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MULTIPLE = 8  # of columns: 16 bytes of bfloat16
_SHAPES = ((64, 1), (128, 1), (256, 2), (512, 4))  # columns of an item, warps of a program
_NARROWEST = _SHAPES[0][0]
_PLACED = 1024  # elements of an item of place_kernel: 16 bytes of bfloat16 for each of its threads
_PLACE_PROGRAMS = 528  # of place_kernel: four a multiprocessor of an H200


def new_state(device: torch.device) -> Tensor:
    """What the device counts of the exchanges over some memory: a counter for each program, and whether one has failed."""
    return torch.zeros(NUM_PROGRAMS + 1, dtype=torch.int32, device=device)


def raise_fault(fault: Tensor, timeout: float, group_name: str) -> None:
    """Raise PeerFault if a kernel has left word that a rank did not come."""
    found = int(fault)
    if found:
        epoch, peer, operation = found >> 32, (found >> 8) & 0xFF, _OPERATIONS[found & 0xFF]
        ranks = dist.get_process_group_ranks(_group(group_name))
        raise PeerFault(
            f"{operation} failed on rank {dist.get_rank()} of the group {ranks}: nothing came from rank {ranks[peer]} "
            f"for {timeout:g} s, in exchange {epoch}"
        )


@dataclass(frozen=True)
class Tiling:
    """How a launch cuts rows: columns of an item, items and warps of a program."""

    columns: int
    items: int
    num_warps: int
    num_programs: int


def choose_tiling(num_rows: int, width: int) -> Tiling:
    """Narrow items of one warp while there are programs for them, so that a thread has two vectors to move; then wider ones."""
    columns, num_warps = next((shape for shape in _SHAPES if num_rows * -(-width // shape[0]) <= NUM_PROGRAMS), _SHAPES[-1])
    num_items = num_rows * -(-width // columns)
    items = -(-num_items // NUM_PROGRAMS)
    return Tiling(columns, items, num_warps, -(-num_items // items))


def gather(q: Tensor, slots: PeerMemory, state: Tensor, fault: Tensor, slot_bytes: int, timeout: float, group: str, is_fp8: bool) -> Tensor:
    """`Exchange.gather_heads` through slots."""
    return _gather(q, slots.mine, slots.addresses, state, fault, slot_bytes, timeout, group, is_fp8)


@torch.library.custom_op("dcpmla::direct_gather", mutates_args=("memory", "state", "fault"))
def _gather(
    q: Tensor, memory: Tensor, addresses: Tensor, state: Tensor, fault: Tensor, slot_bytes: int, timeout: float, group: str, is_fp8: bool
) -> Tensor:
    rank = _enter("q", q, fault, timeout, group)
    num_tokens, num_heads, width = q.shape
    size, row_width = len(addresses), num_heads * width
    gathered = q.new_empty(num_tokens, size * num_heads, width)
    rows = q.reshape(num_tokens, row_width).view(_CARRIERS[q.element_size()])
    words = size * -(-row_width // _NARROWEST)
    for tokens in _turns(num_tokens, size * row_width * q.element_size(), words, slot_bytes):
        tiling = choose_tiling(len(rows[tokens]), row_width)
        gather_kernel[(tiling.num_programs,)](
            rows[tokens],
            gathered[tokens],
            memory,
            addresses,
            state,
            fault,
            len(rows[tokens]),
            rows.stride(0),
            rank,
            tiling.items,
            slot_bytes,
            _nanoseconds(timeout),
            WIDTH=row_width,
            SIZE=size,
            PEERS=triton.next_power_of_2(size),
            COLUMNS=tiling.columns,
            IS_FP8=is_fp8,
            PROGRAMS=NUM_PROGRAMS,
            SHARE=_share(tiling.num_programs),
            REPEAT=32 * tiling.num_warps // triton.next_power_of_2(size),
            num_warps=tiling.num_warps,
        )
    return gathered


@_gather.register_fake
def _(q: Tensor, memory: Tensor, addresses: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], addresses.shape[0] * q.shape[1], q.shape[2])


def combine(
    out: Tensor, lse: Tensor, slots: PeerMemory, state: Tensor, fault: Tensor, slot_bytes: int, timeout: float, group: str, is_fp8: bool
) -> tuple[Tensor, Tensor]:
    """`Exchange.combine` through slots."""
    return _combine(out, lse, slots.mine, slots.addresses, state, fault, slot_bytes, timeout, group, is_fp8)


@torch.library.custom_op("dcpmla::direct_combine", mutates_args=("memory", "state", "fault"))
def _combine(
    out: Tensor,
    lse: Tensor,
    memory: Tensor,
    addresses: Tensor,
    state: Tensor,
    fault: Tensor,
    slot_bytes: int,
    timeout: float,
    group: str,
    is_fp8: bool,
) -> tuple[Tensor, Tensor]:
    rank = _enter("out", out, fault, timeout, group)
    size, (num_tokens, num_heads, width) = len(addresses), out.shape
    num_heads //= size
    merged = out.new_empty(num_tokens, num_heads, width)
    merged_lse = lse.new_empty(num_tokens, num_heads)
    out = (out if out.stride(-1) == 1 else out.contiguous()).view(_CARRIERS[out.element_size()])
    words = size * num_heads * (1 - (-width // _NARROWEST))
    for tokens in _turns(num_tokens, size * num_heads * width * out.element_size(), words, slot_bytes):
        tiling = choose_tiling(len(out[tokens]) * num_heads, width)
        combine_kernel[(tiling.num_programs,)](
            out[tokens],
            lse[tokens],
            merged[tokens],
            merged_lse[tokens],
            memory,
            addresses,
            state,
            fault,
            len(out[tokens]) * num_heads,
            num_heads,
            *out.stride()[:2],
            *lse.stride(),
            rank,
            tiling.items,
            slot_bytes,
            _nanoseconds(timeout),
            WIDTH=width,
            SIZE=size,
            PEERS=triton.next_power_of_2(size),
            COLUMNS=tiling.columns,
            IS_FP8=is_fp8,
            PROGRAMS=NUM_PROGRAMS,
            SHARE=_share(tiling.num_programs),
            REPEAT=32 * tiling.num_warps // triton.next_power_of_2(size),
            num_warps=tiling.num_warps,
        )
    return merged, merged_lse


@_combine.register_fake
def _(out: Tensor, lse: Tensor, memory: Tensor, addresses: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = out.shape[0], out.shape[1] // addresses.shape[0]
    return out.new_empty(*shape, out.shape[2]), lse.new_empty(shape)


def place(
    rows: Tensor,
    places: Tensor | None,
    landing: PeerMemory,
    slot_at: int,
    flags_at: int,
    operation: str,
    state: Tensor,
    fault: Tensor,
    timeout: float,
    group: str,
) -> None:
    """Store rows [N, D] in each rank's memory from slot_at on: row n as row places[n] there, not at all where that is -1.

    Without places, rank r's row n as row n W + r. Returns, in stream order, when the rows of all ranks are there.
    """
    _place(rows, places, landing.mine, landing.addresses, state, fault, slot_at, flags_at, timeout, group, operation)


@torch.library.custom_op("dcpmla::direct_place", mutates_args=("memory", "state", "fault"))
def _place(
    rows: Tensor,
    places: Tensor | None,
    memory: Tensor,
    addresses: Tensor,
    state: Tensor,
    fault: Tensor,
    slot_at: int,
    flags_at: int,
    timeout: float,
    group: str,
    operation: str,
) -> None:
    rank = _enter("rows", rows, fault, timeout, group)
    num_rows, width = rows.shape
    columns = min(_PLACED, width & -width)  # the largest power of two that divides
    num_items = -(-num_rows * columns // _PLACED) * (width // columns)
    num_programs = min(max(1, num_items), _PLACE_PROGRAMS)
    place_kernel[(num_programs,)](
        rows.contiguous().view(_CARRIERS[rows.element_size()]),
        places,
        memory,
        addresses,
        state,
        fault,
        num_rows,
        width,
        rank,
        slot_at,
        flags_at,
        _nanoseconds(timeout),
        OPERATION=_OPERATIONS.index(operation),
        WIDTH=width,
        SIZE=len(addresses),
        PEERS=triton.next_power_of_2(len(addresses)),
        ROWS=_PLACED // columns,
        COLUMNS=columns,
        PROGRAMS=NUM_PROGRAMS,
        SHARE=_share(num_programs),
    )


@_place.register_fake
def _(*_: object) -> None:
    return None


def _enter(name: str, rows: Tensor, fault: Tensor, timeout: float, group_name: str) -> int:
    """This rank in its group, if the exchange is sound and can carry the rows."""
    raise_fault(fault, timeout, group_name)
    if rows.dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {rows.dtype}; direct carries {', '.join(map(str, _DTYPES))}")
    if rows.shape[-1] % _MULTIPLE:
        raise ValueError(f"{name} has rows of {rows.shape[-1]}; direct carries multiples of {_MULTIPLE}")
    return dist.get_rank(_group(group_name))


def _group(group_name: str) -> dist.ProcessGroup:
    return _resolve_process_group(GroupName(group_name))


def _turns(num_tokens: int, token_bytes: int, token_words: int, slot_bytes: int) -> Iterator[slice]:
    """Tokens that a slot has room for at a time.

    Args:
        token_bytes, token_words: what all ranks send of a token, at most.
    """
    at_once = min(slot_bytes // token_bytes, slot_bytes // 64 // token_words)
    if num_tokens and at_once == 0:
        raise ValueError(f"slot_bytes is {slot_bytes}; a token's rows of all ranks take {max(token_bytes, 64 * token_words)}")
    for first in range(0, num_tokens, max(1, at_once)):
        yield slice(first, min(first + at_once, num_tokens))


def _share(num_programs: int) -> int:
    """Of the counters, those of one program of a launch, as a power of two."""
    return triton.next_power_of_2(-(-NUM_PROGRAMS // num_programs))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
