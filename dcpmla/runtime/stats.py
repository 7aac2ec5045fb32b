"""Totals of what an engine has served."""

from dataclasses import dataclass, field
from typing import Protocol

from dcpmla.runtime.request import Request


class Moved(Protocol):
    """A copy or a file's transfer that has ended on this rank."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...


@dataclass
class CopyTotals:
    """Totals of the copies between two tiers of memory, in one direction on this rank.

    Attributes:
        seconds: Times of copies that have ended: the GPU's between the cache and host memory, else from a transfer's
            beginning to its end.
    """

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, copy: Moved, num_blocks: int) -> None:
        """Add a copy that has ended."""
        self.blocks += num_blocks
        self.bytes += copy.num_bytes
        self.seconds += copy.seconds


@dataclass
class TransferTotals:
    """Totals of transfers from or to other jobs.

    Attributes:
        num_done, num_failed: Numbers of transfers that have ended.
        bytes, seconds: This rank's bytes, and times from their beginnings to their ends.
    """

    num_done: int = 0
    num_failed: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, transfer: Moved, is_done: bool) -> None:
        """Add a transfer that has ended on all ranks."""
        self.num_done += is_done
        self.num_failed += not is_done
        self.bytes += transfer.num_bytes
        self.seconds += transfer.seconds


@dataclass
class Stats:
    """Totals of a run. A step with tokens of a prompt counts as prefill, any other as decode, with all its tokens
    except rejected drafts.

    Attributes:
        num_preemptions: Number of preemptions of finished requests.
        num_cached_tokens: Number of prompt tokens of finished requests that earlier requests had computed.
        num_drafts: Number of times that a request had drafts in a step.
        num_draft_tokens, num_accepted_tokens: Numbers of drafts computed and accepted.
        num_accepted_at: Number of drafts accepted at each position after the step's token.
        max_num_running: Largest number of requests that held blocks at the same time.
    """

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_steps: int = 0
    num_finished: int = 0
    num_new_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: list[int] = field(default_factory=list)
    max_num_running: int = 0

    def count_step(self, is_prefill: bool, num_tokens: int, seconds: float) -> None:
        """Add a step's tokens and the seconds that it took."""
        self.num_steps += 1
        if is_prefill:
            self.num_prefill_tokens += num_tokens
            self.prefill_seconds += seconds
        else:
            self.num_decode_tokens += num_tokens
            self.decode_seconds += seconds

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Add a request's drafts in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_accepted_at += [0] * (num_accepted - len(self.num_accepted_at))
        for position in range(num_accepted):
            self.num_accepted_at[position] += 1

    def count_finished(self, request: Request) -> None:
        """Add the counts of a finished request."""
        self.num_finished += 1
        self.num_preemptions += request.num_preemptions
        self.num_cached_tokens += request.num_cached_tokens
