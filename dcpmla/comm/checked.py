"""An exchange for debugging: ranks compare their calls before they make them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.comm.exchange import Exchange, Mailbox
from dcpmla.parallel.collectives import gather_values, name_ranks

_ERROR = 2  # value of torch.cuda.get_sync_debug_mode that makes a sync an error; rehearsals of captures set it


class CheckedExchange:
    """An exchange whose calls are compared over its group first: unequal calls would hang, or mix up rows.

    Slow: the host waits for all ranks before each call, by a collective of its own, which `torch.compile` cannot
    trace and a CUDA graph cannot hold. So calls are not compared during a capture or its rehearsal.

    Args:
        exchange: Exchange over `group` that makes the calls.
    Raises:
        RuntimeError: Ranks differ in operation, shapes, dtypes or the number of the call; raised on every rank, by
            every call but `check`.
    """

    def __init__(self, exchange: Exchange, group: ProcessGroup) -> None:
        self.name, self.fault, self._exchange, self._group = exchange.name, exchange.fault, exchange, group
        self._num_calls = 0

    def gather_heads(self, q: Tensor) -> Tensor:
        self._compare("gather_heads", q=q)
        return self._exchange.gather_heads(q)

    def gather_candidates(self, candidates: Tensor) -> Tensor:
        self._compare("gather_candidates", candidates=candidates)
        return self._exchange.gather_candidates(candidates)

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        self._compare("combine", out=out, lse=lse)
        return self._exchange.combine(out, lse)

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> Mailbox | None:
        self._compare("mailbox", out=torch.empty(num_tokens, num_heads, width, dtype=dtype, device="meta"))
        return self._exchange.mailbox(num_tokens, num_heads, width, dtype)

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        self._compare("start_context", rows=rows, order=order, tokens=tokens)
        return self._exchange.start_context(rows, order, tokens)

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._compare("reserve_context", rows=torch.empty(num_tokens, width, dtype=dtype, device="meta"))
        self._exchange.reserve_context(num_tokens, width, dtype, device)

    def check(self) -> None:
        self._exchange.check()

    def _compare(self, operation: str, **tensors: Tensor) -> None:
        if torch.cuda.is_initialized() and (
            torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == _ERROR
        ):
            return
        self._num_calls += 1
        arguments = (f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
        own = f"makes call {self._num_calls}, {operation}({', '.join(arguments)})"
        calls = gather_values(own, self._group, "comparing calls of the exchange")
        if len(set(calls)) > 1:
            raise RuntimeError(
                "unequal calls of the exchange: " + _describe(calls, dist.get_process_group_ranks(self._group))
            )


def _describe(calls: list[str], ranks: list[int]) -> str:
    """Describe the ranks that make each call, the call of the fewest ranks first."""
    callers = {call: [rank for rank, other in zip(ranks, calls, strict=True) if other == call] for call in calls}
    return "; ".join(
        f"{name_ranks(callers[call])} {call}" for call in sorted(callers, key=lambda call: len(callers[call]))
    )
