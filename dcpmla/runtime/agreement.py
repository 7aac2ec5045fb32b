"""Agreement of all ranks on a step: the first rank's tokens, clock and news, and whether an exchange failed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.parallel.collectives import PeerFault, named
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.acceptance import StepTime
from dcpmla.runtime.progress import NUM_WORDS, Progress, Watched
from dcpmla.upload import upload

_MICROSECOND = 1e-6
_OPERATION = "agreeing on new tokens"
# Words before the faults: clock, bytes of news, number of stopping ranks, a step's time, compiled grammars, progress of
# transfers.
_HEAD = 5 + NUM_WORDS
# There is one for each TP group, never destroyed: torch reuses a destroyed group's name for a second group of the same
# ranks, and with it the stale addresses in the job's store.
_groups_of_hosts: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


class News(NamedTuple):
    """News from outside the job, which one step's message sends to all ranks.

    Attributes:
        content: Bytes of the first rank; empty on other ranks.
        is_told: Whether a rank must stop.
    """

    content: bytes = b""
    is_told: bool = False

    def joined(self, other: "News") -> "News":
        """Return this news followed by other news."""
        return News(self.content + other.content, self.is_told or other.is_told)


@dataclass(frozen=True)
class Agreed:
    """The values that are the same on every rank.

    Attributes:
        now: Seconds on the first rank's clock when the step was launched.
        news: The first rank's news, and whether any rank must stop.
        step_time: Time of an earlier step, on the first rank's clock.
        num_compiled: Number of grammars that the first rank has compiled (`Grammars.num_compiled`).
        tokens: Tokens of the first rank.
    """

    now: float
    news: News
    step_time: StepTime | None
    num_compiled: int
    tokens: list[int]


@dataclass(frozen=True)
class Message:
    """A step's one message, summed over the ranks.

    Attributes:
        words: [_HEAD + num_faults + n] int64 on the device: the first rank's clock, bytes of news, number of ranks that
            must stop, the first rank's time of a step and number of compiled grammars, progress of transfers, faults,
            and the first rank's tokens.
        tokens: Tokens [n] int64 on the device, for the next step; 0 in place of NOT_FINITE.
        memory: [len(words) + room] int64: the words, and other data copied to the host with them.
        content: News of this rank.
        step_time: Time of a step on this rank.
        reported: Transfers whose progress it has.
    """

    words: Tensor
    tokens: Tensor
    memory: Tensor
    content: bytes
    num_faults: int
    step_time: StepTime | None
    reported: Sequence[Watched]


class Agreement:
    """The engine's clock, and its only collective besides the model's: a message a step, in the order of the device's
    work, so that hosts wait neither for each other nor for the device.

    Attributes:
        progress: Transfers between tiers of memory.
        posted: News of this rank for the next message.
    """

    def __init__(self, mesh: DCPMesh) -> None:
        self._mesh = mesh
        self._hosts: ProcessGroup | None = None if mesh.tp_size == 1 else _group_of_hosts(mesh.tp_group)
        self.posted = News()
        self.progress = Progress(mesh.tp_size)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Reset the clock to 0."""
        self._started = time.monotonic()

    def clock(self) -> float:
        """Return seconds on this rank's clock."""
        return time.monotonic() - self._started

    def post(self, news: News) -> None:
        """Queue news of this rank for the next message."""
        self.posted = self.posted.joined(news)

    def start(
        self,
        tokens: Tensor,
        faults: Sequence[Tensor],
        step_time: StepTime | None = None,
        room: int = 0,
        num_compiled: int = 0,
    ) -> Message:
        """Send a step's message. Collective over the TP group; all ranks pass the same numbers of tokens and faults.

        Args:
            tokens: Tokens [n] int64, chosen on this rank; NOT_FINITE ends a request.
            faults: [1] int64 each, in pinned memory, nonzero once a kernel of this rank has timed out; read in the
                order of the device's work.
            step_time: Time of the last step as measured on this rank, for the same step on all ranks.
            room: Number of words of memory past the message.
            num_compiled: Number of grammars that this rank has compiled.
        """
        news, head, reported = self._take_head(num_compiled, step_time)
        num_words = len(head) + len(faults) + len(tokens)
        numbers = np.zeros(num_words + room, dtype=np.int64)
        numbers[: len(head)] = head
        (memory,) = upload([numbers], tokens.device)
        words = memory[:num_words]
        for index, fault in enumerate(faults, len(head)):
            words[index : index + 1].copy_(fault, non_blocking=True)
        agreed = words[len(head) + len(faults) :]
        if self._mesh.tp_rank == 0:
            agreed.copy_(tokens)
        if self._mesh.tp_size > 1:
            with named(_OPERATION, self._mesh.tp_group):
                dist.all_reduce(words, group=self._mesh.tp_group)
        safe = agreed.clamp(min=0)  # The next step is launched before a request with NOT_FINITE ends.
        return Message(words, safe, memory, news.content, len(faults), step_time, reported)

    def meet(self, num_compiled: int = 0) -> Agreed:
        """Exchange messages without tokens between two steps, and return what the ranks agree on. Collective over the
        TP group's hosts, which wait for each other, but not for the device.
        """
        news, head, reported = self._take_head(num_compiled)
        words = torch.tensor(head)
        if self._hosts is not None:
            with named("agreeing on the time", self._hosts):
                dist.all_reduce(words, group=self._hosts)
        return self.read(Message(words, words[_HEAD:], words, news.content, 0, None, reported), words.tolist())

    def read(self, message: Message, words: Sequence[int]) -> Agreed:
        """Return what a message has brought, once its words are on the host, and end transfers that have ended on all
        ranks. Collective like `meet` if it has news.

        Raises:
            PeerFault: An exchange of this step, or of an earlier one, failed on some rank.
        """
        tokens_at = _HEAD + message.num_faults
        if any(words[_HEAD:tokens_at]):
            raise PeerFault("an exchange of this step failed on another rank, which says what it waited for")
        step_time = message.step_time and message.step_time._replace(seconds=words[3] * _MICROSECOND)
        now, num_bytes, is_told = words[0] * _MICROSECOND, words[1], words[2] > 0
        self.progress.apply(words[5:_HEAD], message.reported)
        news = News(self._share(message.content, num_bytes), is_told)
        return Agreed(now, news, step_time, words[4], list(words[tokens_at:]))

    def _share(self, content: bytes, num_bytes: int) -> bytes:
        """Return the first rank's content on every rank."""
        if self._hosts is None or not num_bytes:
            return content
        shared = torch.empty(num_bytes, dtype=torch.uint8)
        if content:
            shared.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
        with named("sharing new requests", self._hosts):
            dist.broadcast(shared, group=self._hosts, group_src=0)
        return shared.numpy().tobytes()

    def _take_head(
        self, num_compiled: int, step_time: StepTime | None = None
    ) -> tuple[News, list[int], Sequence[Watched]]:
        """Return the news for a message, which begins with the returned words, and the transfers that it reports."""
        news, self.posted = self.posted, News()
        times = self.clock(), 0.0 if step_time is None else step_time.seconds
        now, taken = (int(seconds / _MICROSECOND) for seconds in times)
        own = (now, taken, num_compiled) if self._mesh.tp_rank == 0 else (0, 0, 0)
        progress, reported = self.progress.report()
        return news, [own[0], len(news.content), int(news.is_told), *own[1:], *progress], reported


def _group_of_hosts(group: ProcessGroup) -> ProcessGroup:
    """Return a group of the same ranks whose collectives take tensors of the CPU: the group itself, if it does."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _groups_of_hosts:
        ranks = dist.get_process_group_ranks(group)
        _groups_of_hosts[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _groups_of_hosts[group]
