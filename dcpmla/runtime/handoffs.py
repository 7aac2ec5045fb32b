"""Prompts that one job prefills for another: their blocks and states move between the two caches (`Handoffs`)."""

from collections.abc import Callable, Sequence

import torch

from dcpmla.cache.blocks import block_key, salt_key
from dcpmla.cache.layers import Cache
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.progress import Progress
from dcpmla.runtime.request import Request
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.stats import TransferTotals
from dcpmla.transfer.handoff import Handoff
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.transport import Peer


def prompt_digest(token_ids: Sequence[int], cache_salt: str) -> str:
    """Return a digest of a whole prompt and its salt, the same in all jobs, whatever the sizes of their blocks."""
    return block_key(salt_key(cache_salt), token_ids).hex()


class Handoffs:
    """The transfers of an engine. Every rank of a TP group makes the same calls.

    A request that is prefilled here for another job ends with its first token. Its blocks and its state are held until
    all ranks of the other job have read them, or have not asked for a long time.

    A request that another job prefills for this one holds its blocks from its admission on, so that there is room when
    they arrive. If a transfer fails on any rank, the request waits again: for another job, or for its prefill here.

    The ranks of two jobs call a transfer by its handoff and by the digest of its prompt and salt, which each job takes
    from its own request. So a request never gets the rows of another prompt, whatever handoff a client names.

    Args:
        cache: Cache of this rank.
        scheduler: Scheduler over the cache's blocks.
        progress: Transfers that all ranks agree on.
        remember: Function that lets other requests find a request's full blocks.
        outgoing: Transfers to other jobs; None if none are sent.
        incoming: Transfers from other jobs; None if none are received.
    Attributes:
        wanted: Requests that wait for another job's prefill, since the list was last emptied (`pull`).
        sent, received: Totals of transfers that have ended on all ranks, of this rank's bytes.
    """

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        progress: Progress,
        remember: Callable[[Request], None],
        outgoing: Outgoing | None,
        incoming: Incoming | None,
    ) -> None:
        self._cache, self._scheduler, self._progress, self._remember = cache, scheduler, progress, remember
        self._outgoing, self._incoming = outgoing, incoming
        self._sides = [side for side in (outgoing, incoming) if side is not None]
        self._begun: list[Handoff] = []
        scheduler.prefills_elsewhere = incoming is not None
        self.wanted: list[Request] = []
        self._starts: list[torch.cuda.Event] = []
        self.sent, self.received = TransferTotals(), TransferTotals()

    def connect(self, peer: Peer) -> None:
        """Exchange blocks with another job from now on."""
        for side in self._sides:
            side.connect(peer)

    def disconnect(self, engine: str) -> None:
        """Fail the transfers of a job that is gone."""
        for side in self._sides:
            side.disconnect(engine)

    @property
    def readers(self) -> list[str]:
        """Return the names of the jobs that read blocks of this one, or are to read them."""
        return sorted({sending.engine for sending in self._begun if not sending.is_done} - {""})

    def begin(self, request: Request, handoff: str, reader: str) -> None:
        """Begin to send a new request's blocks, as they are computed, under a name that the other job knows.

        Args:
            reader: Name of the other job, which alone may read them; "" is the first one that asks.
        Raises:
            ValueError: This job sends nothing.
        """
        if self._outgoing is None:
            raise ValueError(f"handoff is {handoff!r}, but this job prefills for no other (--role prefill)")
        request.sending = self._outgoing.begin(_name(request, handoff), reader)
        self._begun = [*(sending for sending in self._begun if not sending.is_done), request.sending]

    def await_room(self, request: Request, source: tuple[str, str]) -> None:
        """Note that another job has prefilled a new request, and holds its blocks until there is room here.

        Raises:
            ValueError: This job receives nothing.
        """
        if self._incoming is None:
            raise ValueError(f"source is {source}, but no other job prefills for this one (--role decode)")
        engine, handoff = source
        request.source = engine, _name(request, handoff)

    def start(self, batch: Batch) -> None:
        """Start the transfers of requests that were admitted with a step, before its launch."""
        for request in batch.arrivals:
            if request.source is None:
                self.wanted.append(request)
            else:
                self._open(request, *request.source)
        if self._incoming is not None:
            for request in self._scheduler.waiting:
                if request.source is not None:
                    self._incoming.touch(*request.source)
            for piece in batch.pieces:
                self.decline(piece.request)

    def decline(self, request: Request) -> None:
        """Let another job free the blocks of a request that needs them no more, unless they are being read."""
        if self._incoming is not None and request.source is not None:
            self._incoming.decline(*request.source)
            request.source = None

    def pull(self, request: Request, engine: str, handoff: str) -> None:
        """Read a request's blocks from the job that prefills it, unless it has stopped to wait for them."""
        self._open(request, engine, _name(request, handoff))

    def _open(self, request: Request, engine: str, name: str) -> None:
        loading = request.loading
        if loading is None or loading.can_join or self._incoming is None:
            return
        num_tokens, request.source = len(request.prompt_token_ids), None
        arrival = self._incoming.open(
            engine, name, request.num_computed_tokens, num_tokens, request.block_ids, request.state
        )
        loading.copy = arrival

        def end(has_arrived: bool) -> None:
            self.received.add(arrival, has_arrived)
            if request.loading is not loading or loading.copy is not arrival:
                return  # the request has ended, or waits for another transfer
            if has_arrived:
                request.loading, request.num_computed_tokens = None, num_tokens
                self._remember(request)
            else:
                self._scheduler.put_back(request)

        self._progress.watch(arrival, end)

    def lose(self, request: Request, is_local: bool) -> None:
        """Stop to wait for a job that does not prefill a request.

        Args:
            is_local: Whether this job is to prefill it; else it is wanted again.
        """
        request.is_local = is_local
        if request.loading is not None and not request.loading.can_join:
            self._scheduler.put_back(request)

    def prepare(self, batch: Batch) -> bool:
        """Let the layers of a step record their beginnings, if it computes what other jobs read; return whether."""
        is_sending = any(piece.request.sending is not None for piece in batch.pieces)
        if is_sending and self._cache.tensors[0].is_cuda:
            self._starts = [torch.cuda.Event() for _ in self._cache.starts]
            for starts, event in zip(self._cache.starts, self._starts, strict=True):
                starts.append(event)
        return is_sending

    def advance(self, batch: Batch) -> None:
        """Send what a launched step computes."""
        starts: list[torch.cuda.Event | None] = []
        for unused, event in zip(self._cache.starts, self._starts, strict=False):
            starts.append(None if unused else event)  # layers inside of a graph record nothing
            unused.clear()
        for request, *_ in batch.pieces:
            if request.sending is not None:
                request.sending.computed(request.block_ids, request.num_computed_tokens, starts)

    def finish(self, request: Request) -> None:
        """Take a request that has its token out of the scheduler, and hold its blocks until they are sent."""
        sending = request.sending
        assert sending is not None
        sending.finish(request.num_computed_tokens, request.state)
        self._scheduler.retire(request)

        def end(is_sent: bool) -> None:
            self.sent.add(sending, is_sent)
            request.sending = None
            self._scheduler.free(request)

        self._progress.watch(sending, end)

    def close(self) -> None:
        """End all transfers."""
        for side in self._sides:
            side.close()


def _name(request: Request, handoff: str) -> str:
    """Return the name of a request's transfer between ranks."""
    return f"{handoff}.{prompt_digest(request.prompt_token_ids, request.cache_salt)}"
