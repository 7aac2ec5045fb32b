"""The engine: turns requests into steps of decodes and prefill chunks, then tokens, texts, measurements."""

import time
from collections import deque
from collections.abc import Callable, Iterator

from dcpmla.cache.host import HostMemory
from dcpmla.cache.layers import Cache
from dcpmla.config import DCPConfig
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.agreement import News
from dcpmla.runtime.drafts import Drafter, NoDrafter
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.handoffs import Handoffs
from dcpmla.runtime.in_flight import InFlightStep, StepEvents
from dcpmla.runtime.offload import Offload
from dcpmla.runtime.outcomes import Outcomes
from dcpmla.runtime.request import Request
from dcpmla.runtime.runner import Model, StepRunner, reads_between_graphs
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.speculation import Speculation
from dcpmla.runtime.stats import Stats
from dcpmla.text.token_bytes import Tokenizer
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.outgoing import Outgoing

_MAX_SLEEP = 1.0  # longest seconds between calls of on_step in an idle engine
_POLL_SECONDS = 2e-4  # between two looks whether blocks have come from the disk


class Engine(Outcomes):
    """Continuous batching over one sharded cache. Every rank of the TP group makes the same calls, in the same order.

    All ranks make the same decisions from one message per step: the first rank's choice of tokens and its clock, and
    whether an exchange failed (`Agreement`). It also carries a server's commands (`post`).

    A step is launched before the tokens of the previous step are on the host. So a new request joins the next step but
    one, and a request that ends before its last possible token is computed once too often; the extra token is
    discarded. After a step with drafts, the next step is laid out as if all drafts were accepted, then moved back on
    the device by the number of rejected ones. If it cannot be moved (`_can_move`), or the drafter reads tokens on the
    host, the engine waits for the step.

    Args:
        cache: Cache of all layers.
        scheduler, max_model_len, tokenizer: Arguments of `Admission`.
        on_step: Function that is called before each step with a line on it.
        graph: Graph of the model's decode step over the cache, for steps of only decodes up to its largest batch.
        drafter: Source of drafts, which steps verify.
        mixed_graph: Graphs of the model's steps with pieces of prompts over the cache.
        memory: Host memory that keeps blocks which leave the cache; None without.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        dcp: DCPConfig,
        mesh: DCPMesh,
        scheduler: Scheduler,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        on_step: Callable[[str], object] = lambda line: None,
        graph: StepGraph | None = None,
        drafter: Drafter | None = None,
        mixed_graph: StepGraph | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        super().__init__(model, cache, mesh, scheduler, max_model_len, tokenizer, drafter or NoDrafter())
        self.dcp, self.on_step, self.has_forms = dcp, on_step, dcp.deterministic
        self.graph, self.mixed_graph = graph, mixed_graph
        scheduler.max_absorbed_tokens = 0 if mixed_graph is None else mixed_graph.max_whole_tokens
        if memory is not None:
            self.offload = Offload(memory, cache, scheduler, self._agreement.progress)
        self._runner = StepRunner(model, cache, dcp, mesh.dcp_rank, scheduler.costs, self.grammars)
        self._in_flight: InFlightStep | None = None  # launched, its tokens not yet taken
        self._latest: InFlightStep | None = None  # the last launched step, even after its tokens are taken
        self._has_met = False  # the ranks have just met, and the caller has applied their news
        self._unread: deque[Request] = deque()  # finished, not yet read from `run`

    @property
    def has_requests(self) -> bool:
        """Return whether any request is still to be served, or to be read from `run`."""
        is_coming = bool(self._coming) or self.grammars.is_pending
        return is_coming or bool(self.scheduler.waiting or self.scheduler.running or self._unread)

    def post(self, news: News) -> None:
        """Queue news of this rank, which the next message sends to all ranks (`StepEvents.news`)."""
        self._agreement.post(news)

    def run(self) -> Iterator[Request]:
        """Step until no request is left, and yield each one as it finishes.

        Requests may be added and aborted meanwhile, on every rank alike.
        """
        while self.has_requests:
            if self._unread:
                yield self._unread.popleft()
            else:
                self._unread += self.step().finished

    def link(self, outgoing: Outgoing | None, incoming: Incoming | None) -> None:
        """Take part in transfers with other jobs, from (`add` with handoff) or to this one (`StepEvents.wanted`)."""
        self.handoffs = Handoffs(
            self.cache, self.scheduler, self._agreement.progress, self._remember, outgoing, incoming
        )

    @property
    def has_transfers(self) -> bool:
        """Return whether transfers with tiers of memory or with other jobs are under way."""
        return not self._agreement.progress.is_empty

    def step(self) -> StepEvents:
        """Take the tokens of one step, and launch the next. Collective over the TP group.

        With news the step may return before it launches anything, so that the caller can apply them first.
        """
        self._advance()
        return self.take_events()

    def _advance(self) -> None:
        if self._in_flight is None:
            if not self._has_met:  # the clock advanced while nothing was computed
                self._first_now, self._heard, num_compiled = self._agreement.meet(self.grammars.num_compiled)
                self.admit_compiled(num_compiled)
            self._has_met = any(self._heard)
            if self._has_met:
                return
            self._in_flight = self._launch()
        if self._in_flight is None:
            self._pause()
            return
        step = self._in_flight
        if self.speculation.waits_for(step, self.scheduler.running, self._can_move):
            self._in_flight = None
            self.collect(step)
        self._in_flight = self._launch()
        if step.is_under_way:
            self.collect(step)
        if self._in_flight is not None and not (self.scheduler.running or self.scheduler.waiting):
            self.collect(self._in_flight)  # its requests have ended, and no step follows
            self._in_flight = None

    def _pause(self) -> None:
        """Sleep until there may be something to compute: all requests wait for the disk, or for other jobs."""
        is_reading = bool(self.scheduler.waiting or self.scheduler.running)
        self.on_step("waiting for blocks of requests" if is_reading else "waiting for the next request")
        seconds = min([_MAX_SLEEP, *(max(0.0, each.arrival_time - self._first_now) for each in self._coming[:1])])
        if is_reading:
            time.sleep(_POLL_SECONDS)
        elif self.grammars.is_pending:
            self.grammars.wait(seconds)
        elif self._coming:
            time.sleep(seconds)

    def close(self) -> None:
        """Write blocks to the disk, and free the graphs. To be called before the process groups are destroyed (see
        `StepGraph.release`).
        """
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        if self.handoffs is not None:
            self.handoffs.close()
        if self.offload is not None:
            self.offload.close()
        for graph in (self.graph, self.mixed_graph):
            if graph is not None:
                graph.release()
        self.speculation.close()
        self.grammars.close()

    def reset(self) -> None:
        """Forget all requests that have ended: blocks that others could reuse, counts and times. Collective.

        Raises:
            ValueError: Requests are left.
        """
        if self.has_requests:
            raise ValueError("reset() is for an engine without requests; abort them or run to their end")
        if self.handoffs is not None and self.has_transfers:
            raise ValueError("reset() is for an engine without transfers to other jobs; step until they have ended")
        self.allocator.reset()
        if self.offload is not None:
            self.offload.reset()
        self.stats, self.speculation = Stats(), Speculation(self.speculation.drafter)
        self._latest = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Set the engine's clock to 0: arrival times count from here."""
        self._agreement.restart_clock()
        self.now = self._first_now = 0.0

    def _can_move(self) -> bool:
        """Return whether the next step's numbers can be moved back on the device, because it has only decodes, for a
        decode graph.
        """
        running, graph, drafter = self.scheduler.running, self.graph, self.speculation.drafter
        is_due = bool(self._coming) and self._coming[0].arrival_time <= self._first_now
        if graph is None or self.scheduler.waiting or is_due or any(each.is_prefill for each in running):
            return False
        return all(graph.decode_size(len(running), width) for width in (1, 1 + drafter.num_speculative_tokens))

    def _launch(self) -> InFlightStep | None:
        """Start a step after the one in flight, whose tokens are taken if masks need them; None if there is no work."""
        self.admit_due(self._first_now)
        is_ahead = self._in_flight is not None
        num_drafts = self.speculation.num_wanted(self.scheduler.running, is_ahead)
        batch = self.scheduler.schedule(self._agreement.clock(), num_drafts, self._first_now)
        if self.offload is not None:
            self.offload.begin(batch)
        if self.handoffs is not None:
            self.handoffs.start(batch)
        if not batch.pieces:
            return None
        drafts = self.speculation.draft(batch, self._latest)
        self.stats.max_num_running = max(self.stats.max_num_running, len(self.scheduler.running))
        started = time.perf_counter()
        graph = self._runner.graph_of(batch, self.graph, self.mixed_graph)
        self.on_step(batch.describe(self.stats.num_steps + is_ahead, graph and graph[1]))
        if self.offload is not None:
            self.offload.prepare(batch, reads_between_graphs(batch, graph))
        previous = self._in_flight
        is_sent = self.handoffs is not None and self.handoffs.prepare(batch)
        computed = self._runner.start(batch, previous, drafts, graph, started)
        if self.offload is not None:
            self.offload.finish()
        if previous is not None and computed.needs_tokens:
            self.collect(previous)
            previous = None
        self._latest = self._runner.finish(computed, previous, self.speculation, self._agreement)
        for piece in batch.pieces:
            self._remember(piece.request)
        if self.handoffs is not None and is_sent:
            self.speculation.drafter.draft([], self._latest)  # an MTP module's rows are sent, too
            self.handoffs.advance(batch)
        return self._latest
