"""The engine: turns requests into steps of decodes and prefill chunks, then tokens, texts, measurements."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from dcpmla.cache.host import HostMemory
from dcpmla.cache.plan import Cache
from dcpmla.config import DCPConfig
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.admission import Admission
from dcpmla.runtime.agreement import Agreement, News
from dcpmla.runtime.drafts import Drafter, NoDrafter
from dcpmla.runtime.failures import failure
from dcpmla.runtime.graph import DecodeGraph
from dcpmla.runtime.in_flight import InFlightStep, StepEvents
from dcpmla.runtime.mixed_graph import MixedGraph
from dcpmla.runtime.offload import Offload
from dcpmla.runtime.request import Request
from dcpmla.runtime.runner import Model, StepRunner, reads_between_graphs
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.speculation import Speculation
from dcpmla.runtime.stats import Stats
from dcpmla.runtime.text import Tokenizer

_MAX_SLEEP = 1.0  # longest seconds between calls of on_step in an idle engine
_POLL_SECONDS = 2e-4  # between two looks whether blocks have come from the disk


class Engine(Admission):
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
        graph: DecodeGraph | None = None,
        drafter: Drafter | None = None,
        mixed_graph: MixedGraph | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        super().__init__(model, scheduler, max_model_len, tokenizer, is_first=mesh.tp_rank == 0)
        self.cache, self.dcp, self.mesh, self.on_step = cache, dcp, mesh, on_step
        self.graph, self.mixed_graph = graph, mixed_graph
        self.stats, self.speculation = Stats(), Speculation(drafter or NoDrafter())
        scheduler.max_absorbed_tokens = 0 if mixed_graph is None else mixed_graph.max_absorbed_tokens
        self._agreement = Agreement(mesh)
        self.offload = None if memory is None else Offload(memory, cache, scheduler, self._agreement.progress)
        self._runner = StepRunner(model, cache, dcp, mesh.dcp_rank, scheduler.costs, self.grammars)
        self._first_now = 0.0  # seconds on the first rank's, sent to all: requests that arrived by then are served
        self._in_flight: InFlightStep | None = None  # launched, its tokens not yet taken
        self._latest: InFlightStep | None = None  # the last launched step, even after its tokens are taken
        self._last_end = 0.0  # `time.perf_counter` when tokens were last taken
        self._heard = News()  # news of all ranks in this step
        self._has_met = False  # the ranks have just met, and the caller has applied their news
        self._finished: list[Request] = []  # in this step
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

    def step(self) -> StepEvents:
        """Take the tokens of one step, and launch the next. Collective over the TP group.

        With news the step may return before it launches anything, so that the caller can apply them first.
        """
        self._finished, self._heard = [], News()
        if self._in_flight is None:
            if not self._has_met:  # the clock advanced while nothing was computed
                self._first_now, self._heard, num_compiled = self._agreement.meet(self.grammars.num_compiled)
                self.admit_compiled(num_compiled)
            self._has_met = any(self._heard)
            if self._has_met:
                return StepEvents([], [], self._heard)
            self._in_flight = self._launch([])
        if self._in_flight is None:
            self._pause()
            return StepEvents([], [])
        step, tokens = self._in_flight, list[tuple[Request, str]]()
        if self.speculation.waits_for(step, self.scheduler.running, self._can_move):
            self._in_flight = None
            tokens += self._collect(step)
        self._in_flight = self._launch(tokens)
        if step.is_under_way:
            tokens += self._collect(step)
        if self._in_flight is not None and not (self.scheduler.running or self.scheduler.waiting):
            tokens += self._collect(self._in_flight)  # its requests have ended, and no step follows
            self._in_flight = None
        return StepEvents(tokens, self._finished, self._heard)

    def _pause(self) -> None:
        """Sleep until there may be something to compute: requests that wait are waiting for the disk."""
        is_reading = bool(self.scheduler.waiting)
        self.on_step("reading blocks from the disk" if is_reading else "waiting for the next request")
        seconds = min([_MAX_SLEEP, *(max(0.0, each.arrival_time - self._first_now) for each in self._coming[:1])])
        if is_reading:
            time.sleep(_POLL_SECONDS)
        elif self.grammars.is_pending:
            self.grammars.wait(seconds)
        elif self._coming:
            time.sleep(seconds)

    def close(self) -> None:
        """Write blocks to the disk, and free the graphs. To be called before the process groups are destroyed (see
        `DecodeGraph.release`).
        """
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
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

    def cache_use(self) -> float:
        """Return the part of the cache's blocks that running requests hold, in [0, 1]."""
        return 1 - self.allocator.num_free / self.allocator.num_blocks

    def _can_move(self) -> bool:
        """Return whether the next step's numbers can be moved back on the device, because it has only decodes, for a
        decode graph.
        """
        running, graph, drafter = self.scheduler.running, self.graph, self.speculation.drafter
        is_due = bool(self._coming) and self._coming[0].arrival_time <= self._first_now
        if graph is None or self.scheduler.waiting or is_due or any(each.num_pending_tokens > 1 for each in running):
            return False
        return all(graph.takes(len(running), query_len) for query_len in (1, 1 + drafter.num_speculative_tokens))

    def _launch(self, tokens: list[tuple[Request, str]]) -> InFlightStep | None:
        """Start a step after the one in flight, whose tokens are added if masks need them; None if there is no work."""
        self.admit_due(self._first_now)
        is_ahead = self._in_flight is not None
        num_drafts = self.speculation.num_wanted(self.scheduler.running, is_ahead)
        batch = self.scheduler.schedule(self._agreement.clock(), num_drafts, self._first_now)
        if self.offload is not None:
            self.offload.begin(batch)
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
        computed = self._runner.start(batch, previous, drafts, graph, started)
        if self.offload is not None:
            self.offload.finish()
        if previous is not None and computed.needs_tokens:
            tokens += self._collect(previous)
            previous = None
        self._latest = self._runner.finish(computed, previous, self.speculation, self._agreement)
        for piece in batch.pieces:
            self._remember(piece.request)
        return self._latest

    def _remember(self, request: Request) -> None:
        state = self.scheduler.reuse.remember(request)
        if state is not None and state.target is not None:
            self.cache.copy_state(state.source, state.target)
        if state is not None and self.offload is not None:
            self.offload.store_state(state)

    def _collect(self, step: InFlightStep) -> list[tuple[Request, str]]:
        """Wait for a step; return its requests with new tokens, each with the text that became certain."""
        words = step.wait()
        self.model.check()
        agreed = step.message.read(words)
        self.now, self._first_now = self._agreement.clock(), agreed.now
        self._agreement.progress.apply(agreed.progress, step.message.reported)
        content = self._agreement.share(step.message.content, agreed.num_bytes)
        self._heard = self._heard.joined(News(content, agreed.is_told))
        self.admit_compiled(agreed.num_compiled)
        step.logprobs.give()
        texts, num_rejected = [], 0
        for piece, drafts, tokens in step.results(agreed.tokens):
            if piece.request.finish_reason:
                continue
            num_drafts = self.speculation.accept(piece, drafts, len(tokens) - 1)
            num_rejected += len(drafts) + 1 - len(tokens)
            self.stats.count_drafts(num_drafts, len(tokens) - 1)
            texts.append((piece.request, self._append(piece.request, tokens, step)))
        ended, num_tokens = time.perf_counter(), sum(piece.num_tokens for piece in step.pieces)
        self.speculation.learn(agreed.step_time)
        self.speculation.end(step, ended - self._last_end)
        self.stats.count_step(step.is_prefill, num_tokens - num_rejected, ended - max(step.started, self._last_end))
        self._last_end = ended
        return texts

    def _append(self, request: Request, tokens: Sequence[int], step: InFlightStep) -> str:
        """Append a request's tokens, finish it at one that ends it, and return the text that became certain."""
        text = ""
        request.first_token_time = self.now if request.first_token_time is None else request.first_token_time
        for index, token_id in enumerate(tokens):
            if token_id < 0:
                request.error = failure(token_id, request, self.grammars, self.model.dtype)
                request.end("error")
            else:
                if request.keep_logits:
                    request.logits.append(step.logits[request][index])
                text += request.append(token_id, self.model.eos_token_ids)
                self.stats.num_new_tokens += 1
            if request.finish_reason:
                request.finish_time = self.now
                self.scheduler.remove(request)
                self._finished.append(request)
                self.stats.count_finished(request)
                return text
        self._remember(request)  # these tokens may complete a block that the step in flight fills
        return text
