"""Faults of `direct`: the words that kernels record, and their sum over all ranks after a step."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig
from dcpmla.parallel.collectives import PeerFault, named

OPERATIONS = ("gather_heads", "combine", "gather_context", "gather_candidates", "all_reduce", "add_norm")


def peer_fault(word: int, timeout: float, rank: int, ranks: Sequence[int]) -> PeerFault:
    """Return the error for a fault word (`kernels.landings.give_up`) that a kernel on a rank of group `ranks` wrote."""
    epoch, peer, operation = word >> 32, (word >> 8) & 0xFF, OPERATIONS[word & 0xFF]
    return PeerFault(
        f"{operation} failed on rank {rank} of the group {list(ranks)}: nothing came from rank {ranks[peer]} "
        f"for {timeout:g} s, in exchange {epoch}"
    )


class StepFaults:
    """A check of all ranks' exchanges after each step, for engines other than this package's own.

    A rank whose wait timed out continues with wrong values. Sums over the TP group spread these values to ranks without
    a fault, and an engine may take its tokens from such a rank. So the fault words of all ranks are
    summed, too, in the order of the device's work: whichever kernel of the step failed, its word is on every rank's
    host before the step's tokens are used. This costs one small collective a step, or none if no rank has a fault word.

    Collective over the TP group.

    Args:
        exchange: Exchange of this rank.
        dcp: Configuration of the exchange.
        tp_group: Ranks whose results depend on each other; DCP groups are blocks of neighbouring ranks of it.
        device: Device of this rank.
    """

    def __init__(self, exchange: Exchange, dcp: DCPConfig, tp_group: ProcessGroup, device: torch.device) -> None:
        self._fault, self._timeout, self._group, self._device = exchange.fault, dcp.exchange_timeout, tp_group, device
        self._rank, self._ranks = dist.get_rank(tp_group), dist.get_process_group_ranks(tp_group)
        self._dcp_size = dcp.decode_context_parallel_size
        num_words = torch.tensor([self._fault is not None], dtype=torch.int64, device=device)
        with named("comparing exchanges", tp_group):
            dist.all_reduce(num_words, group=tp_group)
        self._has_words = bool(num_words)

    def start(self) -> Callable[[], None]:
        """Sum the fault words, after a step's last layer is launched and in the same stream. Collective.

        Returns:
            A function to call before the step's tokens are used. It waits for the words, and raises PeerFault if
            an exchange of this step, or of an earlier one, failed on any rank.
        """
        if not self._has_words:
            return lambda: None
        words = torch.zeros(len(self._ranks), dtype=torch.int64, device=self._device)
        if self._fault is not None:
            words[self._rank : self._rank + 1].copy_(self._fault, non_blocking=True)
        with named("sharing faults", self._group):
            dist.all_reduce(words, group=self._group)
        on_host = words.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if words.is_cuda else None
        if copied is not None:
            copied.record()

        def check() -> None:
            if copied is not None:
                copied.synchronize()
            for rank, word in enumerate(on_host.tolist()):
                if word:
                    first = rank - rank % self._dcp_size
                    group = self._ranks[first : first + self._dcp_size]
                    raise peer_fault(word, self._timeout, self._ranks[rank], group)

        return check
