"""The operations of `direct` as custom ops: their checks, tilings and launches."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from dcpmla.comm.exchange import Mailbox
from dcpmla.comm.faults import OPERATIONS, peer_fault
from dcpmla.comm.kernels.exchange import combine_kernel, gather_kernel
from dcpmla.comm.kernels.landings import NUM_PROGRAMS
from dcpmla.comm.symmetric import Allocate, PeerMemory
from dcpmla.operators import operator

MAX_SIZE = 8  # maximum ranks of a group, the GPUs that the NVLink of one host connects
CARRIERS = {2: torch.int16, 4: torch.int32}  # kernels move rows as integers
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes that a thread stores
# Columns of an item, and how many items there may be; measured on H200s.
_SHAPES = ((64, 512), (128, NUM_PROGRAMS), (256, NUM_PROGRAMS), (512, NUM_PROGRAMS))
_NARROWEST = _SHAPES[0][0]


def open_mailbox(
    group: ProcessGroup, device: torch.device, landing_bytes: int, word_bytes: int, timeout: float, allocate: Allocate
) -> tuple[Mailbox, PeerMemory]:
    """Allocate two landings of landing_bytes, then words; return them as a mailbox. Collective over the group.

    Returns:
        The mailbox, and its memory, which must stay alive.
    Raises:
        ValueError: The group has another size than 2 to MAX_SIZE.
    """
    size = dist.get_world_size(group)
    if not 2 <= size <= MAX_SIZE:
        raise ValueError(f"group has {size} ranks; direct takes 2 to {MAX_SIZE}")
    memory = allocate(2 * landing_bytes + word_bytes, group, device)
    memory.mine[: 2 * landing_bytes].fill_(0xFF)
    memory.mine[2 * landing_bytes :].zero_()
    fault = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
    mailbox = Mailbox(memory.addresses, new_state(device), fault, landing_bytes, timeout, group.group_name)
    return mailbox, memory


def new_state(device: torch.device) -> Tensor:
    """Allocate the counters of the exchanges over one memory: one for each program, and one for a failure."""
    return torch.zeros(NUM_PROGRAMS + 1, dtype=torch.int32, device=device)


def raise_fault(fault: Tensor, timeout: float, group_name: str) -> None:
    """Raise PeerFault if a kernel has recorded that a rank did not come."""
    if word := int(fault):
        raise peer_fault(word, timeout, dist.get_rank(), dist.get_process_group_ranks(_group(group_name)))


@dataclass(frozen=True)
class Tiling:
    """A launch's cut of rows: columns of an item, items of a program."""

    columns: int
    items: int
    num_programs: int


def choose_tiling(num_rows: int, width: int, size: int, is_fp8: bool) -> Tiling:
    """Choose narrow items while there are programs for them, so that a thread moves few vectors; then wider items, and
    several for each program.
    """
    # 512 columns of the rows of 8 ranks would fill all registers.
    widest = min(max(width, _NARROWEST), 256 if is_fp8 or size > 4 else 512)
    shapes = [shape for shape in _SHAPES if shape[0] <= widest]
    fitting = (shape for shape in shapes if num_rows * -(-width // shape[0]) <= shape[1])
    columns, _ = next(fitting, shapes[-1])
    num_items = num_rows * -(-width // columns)
    items = -(-num_items // NUM_PROGRAMS)
    return Tiling(columns, items, -(-num_items // items))


@operator(
    "direct_gather",
    fake=lambda q, mailbox, *_: q.new_empty(q.shape[0], mailbox.addresses.shape[0] * q.shape[1], q.shape[2]),
    mutates_args=("state",),
)
def gather(q: Tensor, mailbox: Mailbox, is_fp8: bool, operation: str) -> Tensor:
    """Compute `Exchange.gather_heads` or `gather_candidates` through landings."""
    rank = enter("q", q, mailbox)
    num_tokens, num_heads, width = q.shape
    size, row_width = len(mailbox.addresses), num_heads * width
    gathered = q.new_empty(num_tokens, size * num_heads, width)
    rows = q.reshape(num_tokens, row_width)
    rows = (rows if rows.stride(-1) == 1 else rows.contiguous()).view(CARRIERS[q.element_size()])
    words = size * -(-row_width // _NARROWEST)
    for tokens in _turns(num_tokens, size * row_width * q.element_size(), words, mailbox.landing_bytes):
        tiling = choose_tiling(len(rows[tokens]), row_width, size, is_fp8)
        gather_kernel[(tiling.num_programs,)](
            rows[tokens],
            gathered[tokens],
            *mailbox[:3],  # addresses, state, fault
            len(rows[tokens]),
            rows.stride(0),
            rank,
            tiling.items,
            mailbox.landing_bytes,
            milliseconds(mailbox.timeout),
            OPERATIONS.index(operation),
            WIDTH=row_width,
            COLUMNS=tiling.columns,
            IS_FP8=is_fp8,
            num_warps=1,
            **sizes(size),
        )
    return gathered


def _empty_merged(out: Tensor, lse: Tensor, mailbox: Mailbox, *_: object) -> tuple[Tensor, Tensor]:
    shape = out.shape[0], out.shape[1] // mailbox.addresses.shape[0]
    return out.new_empty(*shape, out.shape[2]), lse.new_empty(shape)


@operator("direct_combine", fake=_empty_merged, mutates_args=("state",))
def combine(out: Tensor, lse: Tensor, mailbox: Mailbox, is_fp8: bool) -> tuple[Tensor, Tensor]:
    """Compute `Exchange.combine` through landings."""
    enter("out", out, mailbox)
    size, (num_tokens, num_heads, width) = len(mailbox.addresses), out.shape
    if num_heads % size:
        raise ValueError(f"out has {num_heads} heads; the {size} ranks of the group must divide them")
    if lse.dtype != torch.float32 or lse.shape != out.shape[:2]:
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}; expected torch.float32 {tuple(out.shape[:2])}")
    merged, merged_lse = _empty_merged(out, lse, mailbox)
    out = out if out.stride(-1) == 1 else out.contiguous()
    token_bytes, token_words = combine_room(num_heads, width, out.element_size())
    for tokens in _turns(num_tokens, token_bytes, token_words, mailbox.landing_bytes):
        results = merged[tokens], merged_lse[tokens]
        _launch_combine(out[tokens], lse[tokens], *results, mailbox, is_fp8, is_sent=False)
    return merged, merged_lse


def combine_room(num_heads: int, width: int, element_size: int) -> tuple[int, int]:
    """Return the part of a landing that `combine` needs for a token: bytes of rows, and words."""
    return num_heads * width * element_size, num_heads * (1 - (-width // _NARROWEST))


def collect(merged: Tensor, merged_lse: Tensor, mailbox: Mailbox) -> tuple[Tensor, Tensor]:
    """Finish a `combine` whose rows kernels of all ranks have sent into one landing; write merged [T, h, D]."""
    _launch_combine(merged, merged_lse, merged, merged_lse, mailbox, is_fp8=False, is_sent=True)
    return merged, merged_lse


def _launch_combine(
    out: Tensor, lse: Tensor, merged: Tensor, merged_lse: Tensor, mailbox: Mailbox, is_fp8: bool, is_sent: bool
) -> None:
    size, (num_tokens, num_heads, width) = len(mailbox.addresses), merged.shape
    tiling = choose_tiling(num_tokens * num_heads, width, size, is_fp8)
    combine_kernel[(tiling.num_programs,)](
        out.view(CARRIERS[out.element_size()]),
        lse,
        merged,
        merged_lse,
        *mailbox[:3],  # addresses, state, fault
        num_tokens * num_heads,
        num_heads,
        *out.stride()[:2],
        *lse.stride(),
        dist.get_rank(_group(mailbox.group_name)),
        tiling.items,
        mailbox.landing_bytes,
        milliseconds(mailbox.timeout),
        WIDTH=width,
        COLUMNS=tiling.columns,
        IS_FP8=is_fp8,
        IS_SENT=is_sent,
        num_warps=1,
        **sizes(size),
    )


def enter(name: str, rows: Tensor, mailbox: Mailbox) -> int:
    """Return this rank in its group, after checking that exchanges work and support the rows.

    Raises:
        PeerFault: An earlier exchange has failed.
        ValueError: Direct does not support the dtype or the width.
    """
    rank = check_carried(name, rows, mailbox)
    if rows.shape[-1] * rows.element_size() % _ALIGNMENT:
        raise ValueError(
            f"{name} has rows of {rows.shape[-1]} {rows.dtype}; direct carries multiples of {_ALIGNMENT} bytes"
        )
    return rank


def check_carried(name: str, rows: Tensor, mailbox: Mailbox) -> int:
    """Make the checks of `enter` for rows of any width, and return this rank in its group."""
    raise_fault(mailbox.fault, mailbox.timeout, mailbox.group_name)
    if rows.dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {rows.dtype}; direct carries {', '.join(map(str, _DTYPES))}")
    return dist.get_rank(_group(mailbox.group_name))


def _group(group_name: str) -> dist.ProcessGroup:
    return _resolve_process_group(GroupName(group_name))


def _turns(num_tokens: int, token_bytes: int, token_words: int, landing_bytes: int) -> Iterator[slice]:
    """Yield slices of tokens that fit into a landing.

    Args:
        token_bytes, token_words: Maximum bytes and words that all ranks send per token.
    """
    at_once = min(landing_bytes // token_bytes, landing_bytes // 64 // token_words)
    if num_tokens and at_once == 0:
        raise ValueError(
            f"landing_bytes is {landing_bytes}; a token's rows of all ranks take {max(token_bytes, 64 * token_words)}"
        )
    for first in range(0, num_tokens, max(1, at_once)):
        yield slice(first, min(first + at_once, num_tokens))


def sizes(size: int) -> dict[str, int]:
    """Return the constants of all kernels: the ranks of the group, also rounded up to a power of two, and the
    counters of programs.
    """
    return {"SIZE": size, "PEERS": triton.next_power_of_2(size), "PROGRAMS": NUM_PROGRAMS}


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, in the range of int32."""
    return min(int(seconds * 1e3), 2**31 - 1)  # 24 days
