"""The exchange `direct`: one-sided stores into the memory of GPUs that reach each other over NVLink, one kernel an operation."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dcpmla.comm import direct_kernels as kernels
from dcpmla.comm.symmetric import Allocate, allocate, wait_for_all
from dcpmla.parallel.collectives import PeerFault

MAX_SIZE = 8  # ranks of a group: what one host's NVLink connects
_OPERATIONS = {1: "gather_heads", 2: "combine", 3: "gather_context"}
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MULTIPLE = 8  # of elements: 16 bytes of bfloat16
_NARROWEST = 64  # columns of an item
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tiling:
    """How a launch cuts rows: columns of an item, items and warps of a program."""

    columns: int
    items: int
    num_warps: int
    num_programs: int


def choose_tiling(num_rows: int, width: int) -> Tiling:
    """Narrow items of one warp while there are programs for them, so that a thread has two vectors to move; then wider ones."""
    for columns, num_warps in ((64, 1), (128, 1), (256, 2), (512, 4)):
        num_items = num_rows * -(-width // columns)
        if num_items <= kernels.NUM_PROGRAMS or columns >= width:
            break
    items = -(-num_items // kernels.NUM_PROGRAMS)
    return Tiling(columns, items, num_warps, -(-num_items // items))


class DirectExchange:
    """Exchange over memory that all ranks of the group can write to. One object serves all layers, on one stream.

    What runs at the same time (two micro-batches on two streams) needs an object each; each is a collective of all ranks to make.

    Args:
        group: up to 8 ranks, each with a GPU of its own.
        slot_bytes: rows that one exchange brings to a rank; batches of more are exchanged in turns. Each rank holds 2.25 times as much.
        timeout: seconds to wait for a peer.
        is_fp8: rows travel as e4m3 with a float32 scale for each 64 to 512 columns: half the bytes, two digits.
        allocate: gives the memory.
    """

    name = "direct"

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        slot_bytes: int = 64 << 20,
        timeout: float = 60.0,
        is_fp8: bool = False,
        allocate: Allocate = allocate,
    ) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        if not 2 <= self.size <= MAX_SIZE:
            raise ValueError(f"group has {self.size} ranks; direct takes 2 to {MAX_SIZE}")
        self.device, self.slot_bytes, self.timeout, self.is_fp8 = device, slot_bytes, timeout, is_fp8
        self.memory = allocate(2 * slot_bytes + slot_bytes // 4, group, device)
        self.memory.mine[: 2 * slot_bytes].fill_(0xFF)
        self.memory.mine[2 * slot_bytes :].zero_()
        self.state = torch.zeros(kernels.NUM_PROGRAMS + 1, dtype=torch.int32, device=device)
        self.fault = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        wait_for_all(group, device)

    def gather_heads(self, q: Tensor) -> Tensor:
        return _gather(q, *self._slots())

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return _combine(out, lse, *self._slots())

    def check(self) -> None:
        """Raise what a kernel found; for when results have come to the host.

        Raises:
            PeerFault: a rank did not send its part in time.
        """
        _raise_fault(self.fault, self.timeout, self.group)

    def _slots(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int, float, bool, str]:
        memory = self.memory
        return memory.mine, memory.addresses, self.state, self.fault, self.slot_bytes, self.timeout, self.is_fp8, self.group.group_name


def _raise_fault(fault: Tensor, timeout: float, group: ProcessGroup) -> None:
    found = int(fault)
    if found:
        epoch, peer, operation = found >> 32, (found >> 8) & 0xFF, _OPERATIONS[found & 0xFF]
        ranks = dist.get_process_group_ranks(group)
        raise PeerFault(
            f"{operation} failed on rank {dist.get_rank()} of the group {ranks}: nothing came from rank {ranks[peer]} "
            f"for {timeout:g} s, in exchange {epoch}"
        )


@torch.library.custom_op("dcpmla::direct_gather", mutates_args=("memory", "state", "fault"))
def _gather(
    q: Tensor, memory: Tensor, addresses: Tensor, state: Tensor, fault: Tensor, slot_bytes: int, timeout: float, is_fp8: bool, group: str
) -> Tensor:
    rank = _enter(group, fault, timeout, "q", q)
    num_tokens, num_heads, width = q.shape
    size, row_width = len(addresses), num_heads * width
    gathered = q.new_empty(num_tokens, size * num_heads, width)
    rows = q.reshape(num_tokens, row_width).view(_CARRIERS[q.element_size()])
    for tokens in _turns(num_tokens, size * row_width * q.element_size(), size * -(-row_width // _NARROWEST), slot_bytes):
        tiling = choose_tiling(len(rows[tokens]), row_width)
        kernels.gather_kernel[(tiling.num_programs,)](
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
            int(timeout * 1e9),
            WIDTH=row_width,
            SIZE=size,
            PEERS=triton.next_power_of_2(size),
            COLUMNS=tiling.columns,
            IS_FP8=is_fp8,
            PROGRAMS=kernels.NUM_PROGRAMS,
            num_warps=tiling.num_warps,
        )
    return gathered


@_gather.register_fake
def _(q: Tensor, memory: Tensor, addresses: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], addresses.shape[0] * q.shape[1], q.shape[2])


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
    is_fp8: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    rank = _enter(group, fault, timeout, "out", out)
    size, (num_tokens, num_heads, width) = len(addresses), out.shape
    num_heads //= size
    merged = out.new_empty(num_tokens, num_heads, width)
    merged_lse = lse.new_empty(num_tokens, num_heads)
    out = (out if out.stride(-1) == 1 else out.contiguous()).view(_CARRIERS[out.element_size()])
    words = size * num_heads * (1 - (-width // _NARROWEST))
    for tokens in _turns(num_tokens, size * num_heads * width * out.element_size(), words, slot_bytes):
        tiling = choose_tiling(len(out[tokens]) * num_heads, width)
        kernels.combine_kernel[(tiling.num_programs,)](
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
            int(timeout * 1e9),
            WIDTH=width,
            SIZE=size,
            PEERS=triton.next_power_of_2(size),
            COLUMNS=tiling.columns,
            IS_FP8=is_fp8,
            PROGRAMS=kernels.NUM_PROGRAMS,
            num_warps=tiling.num_warps,
        )
    return merged, merged_lse


@_combine.register_fake
def _(out: Tensor, lse: Tensor, memory: Tensor, addresses: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = out.shape[0], out.shape[1] // addresses.shape[0]
    return out.new_empty(*shape, out.shape[2]), lse.new_empty(shape)


def _enter(group_name: str, fault: Tensor, timeout: float, name: str, rows: Tensor) -> int:
    """This rank in its group, if the exchange is sound and can carry the rows."""
    group = _resolve_process_group(group_name)
    _raise_fault(fault, timeout, group)
    if rows.dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {rows.dtype}; direct carries {', '.join(map(str, _DTYPES))}")
    if rows.shape[-1] % _MULTIPLE:
        raise ValueError(f"{name} has rows of {rows.shape[-1]}; direct carries multiples of {_MULTIPLE}")
    return dist.get_rank(group)


def _turns(num_tokens: int, token_bytes: int, token_words: int, slot_bytes: int) -> Iterator[slice]:
    """Tokens that a slot has room for at a time.

    Args:
        token_bytes, token_words: what all ranks send of a token, at most.
    """
    at_once = min(slot_bytes // token_bytes, slot_bytes // 64 // max(1, token_words))
    if num_tokens and at_once == 0:
        raise ValueError(f"slot_bytes is {slot_bytes}; a token's rows of all ranks take {max(token_bytes, 64 * token_words)}")
    for first in range(0, num_tokens, max(1, at_once)):
        yield slice(first, min(first + at_once, num_tokens))
