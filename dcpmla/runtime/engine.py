"""The engine: turns requests into steps of decodes and prefill chunks, then tokens, texts, measurements."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from torch import Tensor

from dcpmla.cache.host import HostMemory
from dcpmla.cache.layers import Cache
from dcpmla.config import DCPConfig
from dcpmla.fields import Flag, Rule, check_fields, is_number, is_whole, option_label, optional, rules_of, whole
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.admission import NOW, Arrivals
from dcpmla.runtime.agreement import Agreed, Agreement, News
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.endings import StopStrings, failure
from dcpmla.runtime.grammars import Grammars
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.handoffs import Handoffs
from dcpmla.runtime.hot_counts import HotCounts
from dcpmla.runtime.in_flight import InFlightStep, StepEvents
from dcpmla.runtime.model import Model
from dcpmla.runtime.offload import Offload
from dcpmla.runtime.prompts import check_prompt, whole_numbers
from dcpmla.runtime.request import Prompt, Request, TokenLogprobs
from dcpmla.runtime.runner import StepRunner, reads_between_graphs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.speculation import Speculation
from dcpmla.runtime.stats import Stats
from dcpmla.text.token_bytes import Tokenizer
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.outgoing import Outgoing

_MAX_SLEEP = 1.0  # longest seconds between calls of on_step in an idle engine
_POLL_SECONDS = 2e-4  # between two looks whether blocks have come from the disk
_Params = Annotated[
    SamplingParams | None, optional(Rule("SamplingParams", lambda value: isinstance(value, SamplingParams)))
]
_Name = Annotated[str | int, Rule("text or a whole number", lambda value: isinstance(value, str) or is_whole(value))]
_Seconds = Annotated[float | None, optional(Rule("a finite number of seconds", is_number))]
_Handoff = Annotated[str, Rule("a name", lambda value: isinstance(value, str))]
_Source = Annotated[
    tuple[str, str] | None,
    optional(Rule("two names", lambda value: isinstance(value, tuple) and [*map(type, value)] == [str, str])),
]
_Salt = Annotated[str, Rule("text", lambda value: isinstance(value, str))]


class Engine:
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
        scheduler: Scheduler over the cache's blocks.
        max_model_len: Longest sequence, prompt and new tokens.
        tokenizer: Tokenizer of prompts, texts and stop strings; None serves token ids only.
        on_step: Function that is called before each step with a line on it.
        graph: Graph of the model's decode step over the cache, for steps of only decodes up to its largest batch.
        drafter: Source of drafts, which steps verify.
        mixed_graph: Graphs of the model's steps with pieces of prompts over the cache.
        memory: Host memory that keeps blocks which leave the cache; None without.
    Attributes:
        grammars: Grammars of requests.
        compilations: Names of kernels that were compiled since the warm-up (`runtime.compilations`).
        handoffs: Transfers with other jobs; None without.
        offload: Tiers of memory below the cache; None without.
        hot_counts: Counts of hot rows; None where all latents are on the device.
        stops: Search for stop strings; None where another process makes the texts and searches them (`stop`).
        has_forms: Whether the tokens of requests have forms (`Request.has_forms`).
        now: Seconds on this rank's clock when the last step ended.
    Raises:
        ValueError: max_model_len is below 2.
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
        check_fields({"max_model_len": whole(2)}, {"max_model_len": max_model_len}, option_label)
        self.model, self.cache, self.dcp, self.mesh = model, cache, dcp, mesh
        self.scheduler, self.allocator = scheduler, scheduler.allocator
        self.max_model_len, self.tokenizer = max_model_len, tokenizer
        self.on_step, self.has_forms = on_step, dcp.deterministic
        self.graph, self.mixed_graph = graph, mixed_graph
        self.stats, self.speculation = Stats(), Speculation(drafter or Drafter())
        self.grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids, is_first=mesh.tp_rank == 0)
        self.stops = None if tokenizer is None else StopStrings(tokenizer)
        self.compilations: Sequence[str] = ()
        self.handoffs: Handoffs | None = None
        self.offload: Offload | None = None
        self.hot_counts = None if cache.hot_counts is None else HotCounts(cache.hot_counts)
        self.now = 0.0
        self._arrivals, self._agreement = Arrivals(self.grammars), Agreement(mesh)
        self._first_now = 0.0  # seconds on the first rank's, sent to all: requests that arrived by then are served
        self._last_end = 0.0  # `time.perf_counter` when tokens were last taken
        # Since the last events:
        self._heard = News()
        self._changed: list[Request] = []
        self._finished: list[Request] = []
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
        return not self._arrivals.is_empty or bool(self.scheduler.waiting or self.scheduler.running or self._unread)

    @property
    def is_idle(self) -> bool:
        """Return whether no request is to be served, and neither a step is under way nor posted news wait for one."""
        return not (self.has_requests or self._in_flight or any(self._agreement.posted))

    def prompt(self, content: str | Sequence[int], cache_salt: _Salt = "") -> Prompt:
        """Check a prompt, a text or token ids, that several requests may share.

        Args:
            cache_salt: Salt of its blocks: requests with different salts never reuse each other's; "" is no salt.
        Raises:
            ValueError: The model cannot continue the prompt, a text has no tokenizer, or cache_salt is no text.
        """
        check_fields(rules_of(Engine.prompt), locals())
        if not isinstance(content, str):
            token_ids = whole_numbers(content)
        elif self.tokenizer is None:
            raise ValueError("prompt is a text, but the engine has no tokenizer; give token ids")
        else:
            token_ids = list(self.tokenizer(content)["input_ids"])
        check_prompt("prompt", token_ids, self.model.vocab_size, self.max_model_len)
        return Prompt(token_ids, cache_salt, [])

    def add(
        self,
        prompt: str | Sequence[int] | Prompt,
        params: _Params = None,
        *,
        request_id: _Name = 0,
        arrival_time: _Seconds = None,
        keep_logits: Flag = False,
        keep_logprobs: Flag = True,
        handoff: _Handoff = "",
        reader: _Handoff = "",
        source: _Source = None,
    ) -> Request:
        """Queue a prompt: a text, token ids, or what `prompt` returned. Requests are served in the order of their
        arrival, then of the calls.

        Args:
            params: Sampling parameters, by default greedy, 16 tokens; max_model_len bounds max_new_tokens.
            arrival_time: Seconds on the engine's clock before which the request is ignored; default now.
            keep_logits: Whether to keep the logits that each token was chosen from.
            keep_logprobs: Whether this rank keeps the log probabilities that params ask for.
            handoff: Name under which another job reads its blocks; it ends with its first token. Empty for none.
            reader: Name of that job, which alone may read them; empty for the first one that asks.
            source: Name of a job that has prefilled it, and its handoff there; None if it is prefilled here, or a
                job that `StepEvents.wanted` asks for prefills it.
        Raises:
            ValueError: An argument has another type, the model cannot continue the prompt, the whole cache has no room
                for it, a text, a stop string or a grammar has no tokenizer, the extra of grammars is not installed,
                arrival_time is not finite, or this job sends or receives no blocks. A grammar that cannot be compiled
                ends the request with an error.
        """
        check_fields(rules_of(Engine.add), locals())
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise ValueError("stop has strings, but the engine has no tokenizer; give stop_token_ids")
        token_ids, cache_salt, keys = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        params.check_vocabulary(self.model.vocab_size)
        if params.grammar is not None:
            self.grammars.check()
        if handoff:
            params = replace(params, max_new_tokens=1, min_tokens=min(1, params.min_tokens), stop=())
        request = Request(
            prompt_token_ids=token_ids,
            params=params.at_most(self.max_model_len - len(token_ids)),
            request_id=request_id,
            arrival_time=NOW if arrival_time is None else arrival_time,
            cache_salt=cache_salt,
            prompt_keys=keys,
            has_forms=self.has_forms,
            keep_logits=keep_logits,
            keep_logprobs=keep_logprobs,
            tokenizer=self.tokenizer,
            num_seen_tokens=0 if params.stop and self.stops is None else None,
        )
        self.scheduler.check_fits(request)
        if handoff or source is not None:
            self._exchange(request, handoff, reader, source)
        self._arrivals.add(request)
        self.scheduler.reuse.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request that is not finished: its tokens so far stay, its blocks are freed."""
        if request.finish_reason:
            return
        self._withdraw(request)
        request.finish_reason, request.finish_time = "abort", self.now

    def take_first(self, request: Request, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Append a request's first token, which the job that prefills its prompt has sampled, unless there is one
        here. All ranks make the same call; the next step's events have the token.

        Args:
            logprobs: Its log probabilities, if they are asked for.
        """
        if request.finish_reason or request.num_new_tokens:
            return
        if request.params.temperature:
            request.draw(1)  # the number that the other job has drawn
        if logprobs is not None and request.keep_logprobs:
            request.logprobs.append(logprobs)
        self._append(request, [token_id])

    def stop(self, request: Request, num_tokens: int) -> None:
        """End a request at a stop string that the process which makes its text has found, and drop later tokens. All
        ranks make the same call.

        Args:
            num_tokens: Number of new tokens up to the end of the stop string.
        """
        if request.finish_reason:  # A later token has ended it, and that process reads no more of it.
            return
        self.stats.num_new_tokens -= len(request.token_ids) - num_tokens
        request.num_seen_tokens = num_tokens
        request.cut(num_tokens)
        self._remember(request)
        self._finish(request)

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

    def take_events(self) -> StepEvents:
        """Return what has happened since the last call."""
        wanted: Sequence[Request] = ()
        if self.handoffs is not None:
            wanted, self.handoffs.wanted = self.handoffs.wanted, []
        events = StepEvents(self._changed, self._finished, self._heard, wanted)
        self._changed, self._finished, self._heard = [], [], News()
        return events

    def cache_use(self) -> float:
        """Return the part of the cache's blocks that running requests hold, in [0, 1]."""
        return 1 - self.allocator.num_free / self.allocator.num_blocks

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
                self._hear(self._agreement.meet(self.grammars.num_compiled))
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
            self._collect(step)
        self._in_flight = self._launch()
        if step.is_under_way:
            self._collect(step)
        if self._in_flight is not None and not (self.scheduler.running or self.scheduler.waiting):
            self._collect(self._in_flight)  # its requests have ended, and no step follows
            self._in_flight = None

    def _pause(self) -> None:
        """Sleep until there may be something to compute: all requests wait for the disk, or for other jobs."""
        is_reading = bool(self.scheduler.waiting or self.scheduler.running)
        self.on_step("waiting for blocks of requests" if is_reading else "waiting for the next request")
        next_time = self._arrivals.next_time
        seconds = _MAX_SLEEP if next_time is None else min(_MAX_SLEEP, max(0.0, next_time - self._first_now))
        if is_reading:
            time.sleep(_POLL_SECONDS)
        elif self.grammars.is_pending:
            self.grammars.wait(seconds)
        elif next_time is not None:
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
        self.speculation.drafter.close()
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
        self.scheduler.restart_clock()
        self.now = self._first_now = 0.0

    def _can_move(self) -> bool:
        """Return whether the next step's numbers can be moved back on the device, because it has only decodes, for a
        decode graph.
        """
        running, graph, drafter = self.scheduler.running, self.graph, self.speculation.drafter
        next_time = self._arrivals.next_time
        is_due = next_time is not None and next_time <= self._first_now
        if graph is None or self.scheduler.waiting or is_due or any(each.is_prefill for each in running):
            return False
        return all(graph.decode_size(len(running), width) for width in (1, 1 + drafter.num_speculative_tokens))

    def _launch(self) -> InFlightStep | None:
        """Start a step after the one in flight, whose tokens are taken if masks need them; None if there is no work."""
        for request in self._arrivals.take_due(self._first_now):
            self.scheduler.add(request)
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
        batch.advance()
        if self.offload is not None:
            self.offload.finish()
        if previous is not None and computed.needs_tokens:
            self._collect(previous)
            previous = None
        self._latest = self._runner.finish(computed, previous, self.speculation, self._agreement)
        for piece in batch.pieces:
            self._remember(piece.request)
        if self.handoffs is not None and is_sent:
            self.speculation.drafter.complete(self._latest)
            self.handoffs.advance(batch)
        return self._latest

    def _collect(self, step: InFlightStep) -> None:
        """Wait for a step, and take its tokens."""
        words = step.wait()
        self.model.check()
        self.now = self._agreement.clock()
        agreed = self._agreement.read(step.message, words)
        self._hear(agreed)
        step.logprobs.give()
        num_rejected = 0
        for piece, drafts, tokens in step.results(agreed.tokens):
            if piece.request.finish_reason:
                continue
            if drafts:
                num_drafts = self.speculation.accept(piece, drafts, len(tokens) - 1)
                num_rejected += len(drafts) + 1 - len(tokens)
                self.stats.count_drafts(num_drafts, len(tokens) - 1)
            self._append(piece.request, tokens, step.logits.get(piece.request))
        ended, num_tokens = time.perf_counter(), step.num_tokens - num_rejected
        self.speculation.end(step, ended - self._last_end, agreed.step_time)
        self.stats.count_step(step.is_prefill, num_tokens, ended - max(step.started, self._last_end))
        self._last_end = ended

    def _hear(self, agreed: Agreed) -> None:
        """Take the first rank's clock, the ranks' news and the requests whose grammars are compiled."""
        self._first_now, self._heard = agreed.now, self._heard.joined(agreed.news)
        self._arrivals.take_compiled(agreed.num_compiled)

    def _append(self, request: Request, tokens: Sequence[int], logits: Tensor | None = None) -> None:
        """Append a request's tokens, and finish it at one that ends it.

        Args:
            logits: Logits of the tokens [n, vocab], if the request keeps them.
        """
        request.first_token_time = self.now if request.first_token_time is None else request.first_token_time
        for index, token_id in enumerate(tokens):
            if token_id < 0:
                request.error = failure(token_id, request, self.grammars, self.model.dtype)
                request.finish_reason = "error"
            else:
                if logits is not None:
                    request.logits.append(logits[index])
                request.append(token_id, self.model.eos_token_ids)
                self.stats.num_new_tokens += 1
                if request.params.stop and self._is_stopped(request):
                    request.cut(len(request.token_ids))
            if request.finish_reason:
                self._finish(request)
                break
        else:
            self._remember(request)  # these tokens may complete a block that the step in flight fills
        self._changed.append(request)

    def _is_stopped(self, request: Request) -> bool:
        """Return whether a stop string ends with the last token, which does not end the request by itself."""
        return self.stops is not None and not request.has_stop_token and self.stops.is_complete(request)

    def _finish(self, request: Request) -> None:
        request.finish_time = self.now
        if request.sending is not None and request.error is None:
            assert self.handoffs is not None
            self.handoffs.finish(request)
        else:
            self._withdraw(request)
        self._finished.append(request)
        self.stats.count_finished(request)

    def _remember(self, request: Request) -> None:
        """Let other requests find a request's full blocks, and its state."""
        state = self.scheduler.reuse.remember(request)
        if state is not None and state.target is not None:
            self.cache.copy_state(state.source, state.target)
        if state is not None and self.offload is not None:
            self.offload.store_state(state)

    def _withdraw(self, request: Request) -> None:
        """Forget a request, whatever it waits for, and free its blocks."""
        if request.sending is not None:
            request.sending.cancel()
        if self.handoffs is not None:
            self.handoffs.decline(request)
        if self._arrivals.remove(request):
            self.scheduler.reuse.remove(request)
        else:
            self.scheduler.remove(request)

    def _exchange(self, request: Request, handoff: str, reader: str, source: tuple[str, str] | None) -> None:
        if self.handoffs is None:
            raise ValueError(f"handoff is {handoff!r} and source {source}, but this job exchanges no blocks (--role)")
        if handoff:
            self.handoffs.begin(request, handoff, reader)
        if source is not None:
            self.handoffs.await_room(request, source)
