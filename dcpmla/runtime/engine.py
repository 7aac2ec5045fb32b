"""The engine: turns a stream of requests into steps of decodes and prefill chunks, then tokens, texts, measurements."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dcpmla.cache.plan import Cache
from dcpmla.config import DCPConfig
from dcpmla.fields import Rule, check_fields, option_label, whole
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.agreement import Agreement, News
from dcpmla.runtime.arrivals import NOW, Arrivals
from dcpmla.runtime.drafts import Drafter, NoDrafter
from dcpmla.runtime.graph import DecodeGraph
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.logprobs import Logprobs, PromptRows
from dcpmla.runtime.mixed_graph import MixedGraph
from dcpmla.runtime.penalties import Penalties
from dcpmla.runtime.request import Prompt, Request, check_arguments, check_prompt, whole_numbers
from dcpmla.runtime.runner import Model, StepRunner, choose_tokens
from dcpmla.runtime.sampling import NOT_FINITE, SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.speculation import Speculation
from dcpmla.runtime.stats import Stats
from dcpmla.runtime.text import TextStream, Tokenizer

_MAX_SLEEP = 1.0  # longest seconds between calls of on_step in an idle engine


class StepEvents(NamedTuple):
    """The outcome of a call of `Engine.step`.

    Attributes:
        tokens: Requests with new tokens, in the order of the batch, and the text that became certain with them, maybe
            empty. A request that failed is among them.
        finished: Requests that ended, by themselves or with an error.
        news: News that all ranks now have (`Engine.post`), to apply before the next step.
    """

    tokens: list[tuple[Request, str]]
    finished: list[Request]
    news: News = News()


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
        tokenizer: Tokenizer of prompts, new tokens and stop strings; None serves token ids only.
        on_step: Function that is called before each step with a line on it.
        graph: Graph of the model's decode step over the cache, for steps of only decodes up to its largest batch.
        drafter: Source of drafts, which steps verify.
        mixed_graph: Graphs of the model's steps with pieces of prompts over the cache.
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
        graph: DecodeGraph | None = None,
        drafter: Drafter | None = None,
        mixed_graph: MixedGraph | None = None,
    ) -> None:
        self.model, self.cache, self.dcp, self.mesh = model, cache, dcp, mesh
        self.max_model_len, self.tokenizer, self.on_step, self.graph = max_model_len, tokenizer, on_step, graph
        check_fields({"max_model_len": whole(2)}, {"max_model_len": max_model_len}, option_label)
        self.scheduler, self.allocator = scheduler, scheduler.allocator
        self.stats = Stats()
        self.speculation = Speculation(drafter or NoDrafter())
        self._runner = StepRunner(model, cache, dcp, mesh.dcp_rank, scheduler.costs.tokens_per_request)
        self.mixed_graph = mixed_graph
        scheduler.max_absorbed_tokens = 0 if mixed_graph is None else mixed_graph.max_absorbed_tokens
        self._penalties = Penalties(model.eos_token_ids)
        self._agreement = Agreement(mesh)
        self.now = 0.0  # seconds on this rank's clock when the last step ended
        self._first_now = 0.0  # seconds on the first rank's, sent to all: requests that arrived by then are served
        self._in_flight: InFlightStep | None = None  # launched, its tokens not yet taken
        self._latest: InFlightStep | None = None  # the last launched step, even after its tokens are taken
        self._last_end = 0.0  # `time.perf_counter` when tokens were last taken
        self._arrivals = Arrivals()
        self._outgoing, self._heard = News(), News()  # this rank's, for the next message; all ranks'
        self._has_met = False  # the ranks have just met, and the caller has applied their news
        self._finished: list[Request] = []  # in this step
        self._unread: deque[Request] = deque()  # finished, not yet read from `run`

    def prompt(self, content: str | Sequence[int], cache_salt: str = "") -> Prompt:
        """Check a prompt, a text or token ids, that several requests may share.

        Args:
            cache_salt: Salt of its blocks: requests with different salts never reuse each other's; "" is no salt.
        Raises:
            ValueError: The model cannot continue the prompt, a text has no tokenizer, or cache_salt is no text.
        """
        check_fields({"cache_salt": Rule("text", lambda value: isinstance(value, str))}, {"cache_salt": cache_salt})
        token_ids = self._tokenize(content) if isinstance(content, str) else whole_numbers(content)
        check_prompt("prompt", token_ids, self.model.vocab_size, self.max_model_len)
        return Prompt(token_ids, cache_salt, [])

    def add(
        self,
        prompt: str | Sequence[int] | Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | int = 0,
        arrival_time: float | None = None,
        keep_logits: bool = False,
        keep_logprobs: bool = True,
    ) -> Request:
        """Queue a prompt: a text, token ids, or what `prompt` returned. Requests are served in the order of their
        arrival, then of the calls.

        Args:
            params: Sampling parameters, by default greedy, 16 tokens; max_model_len bounds max_new_tokens.
            arrival_time: Seconds on the engine's clock before which the request is ignored; default now.
            keep_logits: Whether to keep the logits that each token was chosen from.
            keep_logprobs: Whether this rank keeps the log probabilities that params ask for.
        Raises:
            ValueError: An argument has another type, the model cannot continue the prompt, the whole cache has no room
                for it, a text or a stop string has no tokenizer, or arrival_time is not finite.
        """
        check_arguments(params, request_id, arrival_time, keep_logits, keep_logprobs)
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise ValueError("stop has strings, but the engine has no tokenizer; give stop_token_ids")
        token_ids, cache_salt, keys = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        params.check_vocabulary(self.model.vocab_size)
        text_stream = None if self.tokenizer is None else TextStream.of(self.tokenizer, params, token_ids)
        request = Request(
            prompt_token_ids=token_ids,
            params=params.at_most(self.max_model_len - len(token_ids)),
            request_id=request_id,
            arrival_time=NOW if arrival_time is None else arrival_time,
            cache_salt=cache_salt,
            prompt_keys=keys,
            keep_logits=keep_logits,
            keep_logprobs=keep_logprobs,
            text_stream=text_stream,
        )
        self.scheduler.check_fits(request)
        self.scheduler.reuse.add(request)
        self._arrivals.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request that is not finished: its tokens so far stay, its blocks are freed."""
        if request.finish_reason:
            return
        if self._arrivals.remove(request):
            self.scheduler.reuse.remove(request)
        else:
            self.scheduler.remove(request)
        request.end("abort")
        request.finish_time = self.now

    @property
    def has_requests(self) -> bool:
        """Return whether any request is still to be served, or to be read from `run`."""
        return bool(self._arrivals or self.scheduler.waiting or self.scheduler.running or self._unread)

    def post(self, news: News) -> None:
        """Queue news of this rank, which the next message sends to all ranks (`StepEvents.news`)."""
        self._outgoing = self._outgoing.joined(news)

    def run(self) -> Iterator[Request]:
        """Step until no request is left, and yield each one as it finishes.

        Requests may be added and aborted meanwhile, on every rank alike.
        """
        while self.has_requests:
            if not self._unread:
                self._unread += self.step().finished
            while self._unread:
                yield self._unread.popleft()

    def step(self) -> StepEvents:
        """Take the tokens of one step, and launch the next. Collective over the TP group.

        With news the step may return before it launches anything, so that the caller can apply them first.
        """
        self._finished, self._heard = [], News()
        if self._in_flight is None:
            if not self._meet():
                return StepEvents([], [], self._heard)
            self._in_flight = self._launch()
        if self._in_flight is None:
            self._wait_for_arrival()
            return StepEvents([], [])
        step = self._in_flight
        if self.speculation.waits_for(step, self.scheduler.running, self._can_move):
            self._in_flight = None
            tokens = self._collect(step)
            self._in_flight = self._launch()
        else:
            self._in_flight = self._launch()
            tokens = self._collect(step)
        if self._in_flight is not None and not (self.scheduler.running or self.scheduler.waiting):
            tokens += self._collect(self._in_flight)  # its requests have ended, and no step follows
            self._in_flight = None
        return StepEvents(tokens, self._finished, self._heard)

    def close(self) -> None:
        """Free the graphs. To be called before the process groups are destroyed (see `DecodeGraph.release`)."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        if self.graph is not None:
            self.graph.release()
        if self.mixed_graph is not None:
            self.mixed_graph.release()
        self.speculation.close()

    def reset(self) -> None:
        """Forget all requests that have ended: blocks that others could reuse, counts and times. Collective.

        Raises:
            ValueError: Requests are left.
        """
        if self.has_requests:
            raise ValueError("reset() is for an engine without requests; abort them or run to their end")
        self.allocator.reset()
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

    def _tokenize(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("prompt is a text, but the engine has no tokenizer; give token ids")
        return list(self.tokenizer(prompt)["input_ids"])

    def _meet(self) -> bool:
        """Agree on the clock, which advanced while nothing was computed; return whether a step may be launched now."""
        if not self._has_met:
            self._first_now, self._heard = self._agreement.meet(self._take_outgoing())
            self._has_met = any(self._heard)
            return not self._has_met
        self._has_met = False
        return True

    def _take_outgoing(self) -> News:
        outgoing, self._outgoing = self._outgoing, News()
        return outgoing

    def _wait_for_arrival(self) -> None:
        self.on_step("waiting for the next request")
        if self._arrivals:
            time.sleep(min(_MAX_SLEEP, max(0.0, self._arrivals.next_time - self._first_now)))

    def _can_move(self) -> bool:
        """Return whether the next step's numbers can be moved back on the device, because it has only decodes, for a
        decode graph.
        """
        running, graph, drafter = self.scheduler.running, self.graph, self.speculation.drafter
        if graph is None or self.scheduler.waiting:
            return False
        if self._arrivals and self._arrivals.next_time <= self._first_now:
            return False
        if any(request.num_pending_tokens > 1 for request in running):
            return False
        return all(graph.takes(len(running), query_len) for query_len in (1, 1 + drafter.num_speculative_tokens))

    def _launch(self) -> InFlightStep | None:
        """Schedule a step and start it after the one in flight; return None if there is nothing to compute."""
        self.scheduler.waiting += self._arrivals.take(self._first_now)
        is_ahead = self._in_flight is not None
        num_drafts = self.speculation.num_wanted(self.scheduler.running, is_ahead)
        batch = self.scheduler.schedule(self._agreement.clock(), num_drafts)
        if not batch.pieces:
            return None
        drafts = self.speculation.draft(batch, self._latest)
        self.stats.max_num_running = max(self.stats.max_num_running, len(self.scheduler.running))
        started = time.perf_counter()
        graph = self._runner.graph_of(batch, self.graph, self.mixed_graph)
        as_graph = f"; graph of {graph[1]}" if graph else ""
        self.on_step(
            f"{'prefill' if batch.has_prompts else 'decode'} step {self.stats.num_steps + is_ahead} "
            f"({batch.words}{as_graph})"
        )
        prompts = PromptRows.of(batch)
        inputs, computed, logits = self._runner.run(batch, self._in_flight, drafts, graph, prompts)
        batch.advance()
        for piece in batch.pieces:
            self._remember(piece.request)
        tokens = choose_tokens(inputs.ready, logits, self._in_flight, self._penalties)
        tokens = prompts.reject_not_finite(tokens, logits, inputs.ready)
        num_verified = 0 if drafts is None else len(inputs.ready) + len(drafts)
        step_time = self.speculation.step_time
        message = self._agreement.start(tokens, self.model.faults, self._take_outgoing(), step_time, num_verified)
        verified = self.speculation.verify(drafts, inputs.ready, message)
        logprobs = Logprobs(logits, inputs.ready, message.tokens, prompts)
        self._latest = InFlightStep(batch, inputs.ready, computed, message, drafts, verified, logits, logprobs, started)
        self._latest.begin()
        return self._latest

    def _remember(self, request: Request) -> None:
        copied = self.scheduler.reuse.remember(request)
        if copied is not None:
            self.cache.copy_state(*copied)

    def _collect(self, step: InFlightStep) -> list[tuple[Request, str]]:
        """Wait for a step and take its tokens; return the requests with new tokens, each with the text that became
        certain.
        """
        words = step.wait()
        self.model.check()
        agreed = step.message.read(words)
        self.now, self._first_now = self._agreement.clock(), agreed.now
        content = self._agreement.share(step.message.content, agreed.num_bytes)
        self._heard = self._heard.joined(News(content, agreed.is_told))
        step.logprobs.give()
        texts, num_rejected = [], 0
        for piece, drafts, tokens in step.results(agreed.tokens):
            if piece.request.finish_reason:
                continue
            num_drafts = self.speculation.accept(piece, drafts, len(tokens) - 1)
            num_rejected += len(drafts) + 1 - len(tokens)
            self.stats.count_drafts(num_drafts, len(tokens) - 1)
            texts.append((piece.request, self._append(piece.request, tokens, step)))
        ended = time.perf_counter()
        self.speculation.learn(agreed.step_time)
        self.speculation.end(step, ended - self._last_end)
        num_tokens = sum(piece.num_tokens for piece in step.pieces) - num_rejected
        self.stats.count_step(step.is_prefill, num_tokens, ended - max(step.started, self._last_end))
        self._last_end = ended
        return texts

    def _append(self, request: Request, tokens: Sequence[int], step: InFlightStep) -> str:
        """Append a request's tokens, finish it at one that ends it, and return the text that became certain."""
        text = ""
        if request.first_token_time is None:
            request.first_token_time = self.now
        for index, token_id in enumerate(tokens):
            if token_id == NOT_FINITE:
                self._fail(request, self._not_finite(len(request.token_ids)))
                return text
            if request.keep_logits:
                request.logits.append(step.logits[request][index])
            text += request.append(token_id, self.model.eos_token_ids)
            self.stats.num_new_tokens += 1
            if request.finish_reason:
                self._finish(request)
                return text
        self._remember(request)  # these tokens may complete a block that the step in flight fills
        return text

    def _finish(self, request: Request) -> None:
        request.finish_time = self.now
        self.scheduler.remove(request)
        self._finished.append(request)
        self.stats.count_finished(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = request.error or error
        request.end("error")
        self._finish(request)

    def _not_finite(self, num_tokens: int) -> FloatingPointError:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return FloatingPointError(
            f"logits are NaN or infinite after {num_tokens} new tokens; the model's numbers exceed the range of "
            f"{dtype} (try another --dtype), or its weights are damaged"
        )
