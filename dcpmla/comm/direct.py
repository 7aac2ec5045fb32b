"""The exchange `direct`: one-sided stores between GPUs that reach each other over NVLink, one kernel an operation."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from dcpmla.comm.direct_ops import MAX_SIZE, combine, combine_room, gather, new_state, open_mailbox, raise_fault
from dcpmla.comm.exchange import Mailbox, pairs
from dcpmla.comm.kernels.landings import NUM_PROGRAMS
from dcpmla.comm.nccl import AllToAll
from dcpmla.comm.place import Window, place
from dcpmla.comm.symmetric import Allocate, PeerMemory, allocate, wait_for_all

_MAX_LANDING_BYTES = 1 << 29  # kernels count the bytes of all landings in 32 bits
_FLAG_BYTES = 2 * MAX_SIZE * NUM_PROGRAMS * 4  # after the windows: flags of all ranks' programs, in two phases
# Queries of this total size or more are stored at their final position. Measured on H200s: equal at 18 MB.
_WINDOW_BYTES = 16 << 20


class DirectExchange:
    """An exchange over memory that all ranks of a group can write to. One object serves all layers of a step, on one
    stream.

    Two micro-batches on two streams need an object each, and every rank must launch their work in the same order.
    The results of `gather_heads` and `gather_candidates` may be in that memory: they are valid until the next of
    either.

    Args:
        group: Group of 2 to 8 ranks, each with a GPU of its own on one host. Collective over the group.
        landing_bytes: Maximum bytes of rows that a rank receives at a time; larger batches are exchanged in turns.
        timeout: Seconds to wait for a peer.
        is_fp8: Whether queries and partial rows are sent as e4m3, with a float32 scale for each 64 to 256
            columns; one-byte queries are sent unchanged.
        allocate: Function that allocates the memory.
    Raises:
        ValueError: The group has another size, or landings are too large or not a multiple of 128.
    """

    name = "direct"

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        landing_bytes: int = 64 << 20,
        timeout: float = 60.0,
        is_fp8: bool = False,
        allocate: Allocate = allocate,
    ) -> None:
        if landing_bytes % 128 or not 0 < landing_bytes <= _MAX_LANDING_BYTES:
            raise ValueError(
                f"landing_bytes is {landing_bytes}; it must be a multiple of 128, {_MAX_LANDING_BYTES} at most"
            )
        self.size, self.group, self.device, self.is_fp8 = dist.get_world_size(group), group, device, is_fp8
        self._mailbox, self._landings = open_mailbox(
            group, device, landing_bytes, landing_bytes // 4, timeout, allocate
        )
        self.fault, self._allocate = self._mailbox.fault, allocate
        self._heads = self._new_windows(1, landing_bytes)
        self._context: _Windows | None = None
        self._collective = AllToAll(group)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        wait_for_all(group, device)

    def gather_heads(self, q: Tensor) -> Tensor:
        is_fp8 = self.is_fp8 and q.element_size() > 1  # e4m3 queries have been rounded once
        return self._gather(pairs(q), is_fp8, "gather_heads").view(q.dtype)

    def _gather(self, q: Tensor, is_fp8: bool, operation: str) -> Tensor:
        num_tokens, num_heads, width = q.shape
        fits = _WINDOW_BYTES <= self.size * q.numel() * q.element_size() <= self._mailbox.landing_bytes
        # A compiler does not see peers' stores to this rank's memory, so a custom op has to copy the rows from there.
        if fits and not is_fp8 and not torch.compiler.is_compiling():
            rows = self._heads.place(q.reshape(num_tokens, -1), None, operation)
            return rows[: self.size * num_tokens].view(num_tokens, self.size * num_heads, width)
        return gather(q, self._mailbox, is_fp8, operation)

    def gather_candidates(self, candidates: Tensor) -> Tensor:
        # Candidates are sent as words of four bytes, unchanged; two candidates fill a thread's store.
        num = candidates.shape[1]
        words = (F.pad(candidates, (0, 1)) if num % 2 else candidates).view(torch.float32)
        gathered = self._gather(words[:, None], False, "gather_candidates")
        return gathered.view(torch.int64)[..., :num]

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return combine(out, lse, self._mailbox, self.is_fp8)

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> Mailbox | None:
        token_bytes, token_words = combine_room(num_heads, width, dtype.itemsize)
        fits = (
            num_heads % self.size == 0
            and num_tokens * max(token_bytes, 64 * token_words) <= self._mailbox.landing_bytes
        )
        return self._mailbox if fits and not self.is_fp8 else None

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        if torch.compiler.is_compiling():  # see gather_heads
            return self._collective.start_context(rows, order, tokens)
        self.reserve_context(self.size * rows.shape[0], rows.shape[1], rows.dtype, rows.device)
        assert self._context is not None
        dtype, rows = rows.dtype, pairs(rows)
        if self._stream is None:  # the kernels run in Triton's interpreter
            placed = self._context.place(rows, tokens, "gather_context")
            return lambda: placed[: len(order)].view(dtype)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            placed = self._context.place(rows, tokens, "gather_context")
        for used in (rows, tokens):
            used.record_stream(stream)

        def finish() -> Tensor:
            torch.cuda.current_stream().wait_stream(stream)
            return placed[: len(order)].view(dtype)

        return finish

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        num_bytes = num_tokens * width * dtype.itemsize
        if self._context is None or self._context.window_bytes < num_bytes:
            wait_for_all(self.group, self.device)  # peers may still store into the previous window
            self._context = self._new_windows(2, -(-num_bytes // 256) * 256)
            wait_for_all(self.group, self.device)

    def check(self) -> None:
        """Raise the fault that a kernel has recorded. Call this when results are on the host, before they are used.

        Raises:
            PeerFault: A rank did not send its part in time.
        """
        raise_fault(self.fault, self._mailbox.timeout, self.group.group_name)

    def _new_windows(self, num_windows: int, window_bytes: int) -> "_Windows":
        memory = self._allocate(num_windows * window_bytes + _FLAG_BYTES, self.group, self.device)
        memory.mine[num_windows * window_bytes :].zero_()
        mailbox = self._mailbox._replace(
            addresses=memory.addresses, state=new_state(self.device), landing_bytes=window_bytes
        )
        return _Windows(num_windows, memory, mailbox)


class _Windows:
    """Windows to which peers store rows in final order, used in turn; a window keeps its rows until its next turn.

    Args:
        mailbox: Addresses of the memory, its counters, and the bytes of a window.
    """

    def __init__(self, num_windows: int, memory: PeerMemory, mailbox: Mailbox) -> None:
        self.window_bytes = mailbox.landing_bytes
        self._num_windows, self._memory, self._mailbox, self._next = num_windows, memory, mailbox, 0

    def place(self, rows: Tensor, targets: Tensor | None, operation: str) -> Tensor:
        """Send rows [N, D] to their target rows (`comm.place.place`).

        Returns the window [.., D], in stream order with all ranks' rows.
        """
        window_at = self._next * self.window_bytes
        self._next = (self._next + 1) % self._num_windows
        place(rows, targets, Window(self._mailbox, window_at, self._num_windows * self.window_bytes), operation)
        window = self._memory.mine[window_at : window_at + self.window_bytes].view(rows.dtype)
        return window[: window.numel() // rows.shape[1] * rows.shape[1]].view(-1, rows.shape[1])
