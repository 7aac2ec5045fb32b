"""The outcomes of an engine's steps: new tokens, requests that end, blocks that others can reuse (`Outcomes`)."""

import time
from collections.abc import Sequence

from torch import Tensor

from dcpmla.cache.layers import Cache
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.admission import Admission
from dcpmla.runtime.agreement import Agreement, News
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.failures import failure
from dcpmla.runtime.in_flight import InFlightStep, StepEvents
from dcpmla.runtime.offload import Offload
from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.runtime.runner import Model
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.speculation import Speculation
from dcpmla.runtime.stats import Stats
from dcpmla.text.token_bytes import Tokenizer


class Outcomes(Admission):
    """The part of an engine that takes the tokens of its steps.

    Args:
        cache: Cache of all layers.
        mesh: Groups of the ranks that agree on each step.
        scheduler, max_model_len, tokenizer: Arguments of `Admission`.
        drafter: Source of drafts.
    Attributes:
        offload: Tiers of memory below the cache; None without.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        mesh: DCPMesh,
        scheduler: Scheduler,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        drafter: Drafter,
    ) -> None:
        super().__init__(model, scheduler, max_model_len, tokenizer, is_first=mesh.tp_rank == 0)
        self.cache, self.mesh = cache, mesh
        self.stats, self.speculation = Stats(), Speculation(drafter)
        self.offload: Offload | None = None
        self._agreement = Agreement(mesh)
        self._first_now = 0.0  # seconds on the first rank's, sent to all: requests that arrived by then are served
        self._last_end = 0.0  # `time.perf_counter` when tokens were last taken
        # Since the last events:
        self._heard = News()
        self._changed: list[Request] = []
        self._finished: list[Request] = []

    def take_events(self) -> StepEvents:
        """Return what has happened since the last call."""
        requests = [] if self.handoffs is None else self.handoffs.wanted
        events = StepEvents([*self._changed], [*self._finished], self._heard, tuple(requests))
        for taken in (self._changed, self._finished, requests):
            taken.clear()
        self._heard = News()
        return events

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
        """End a request at a stop string, which a front has found to end with its new token number num_tokens. Tokens
        after that one are dropped. All ranks make the same call.
        """
        if request.finish_reason:  # by a later token, whose report the front does not read
            return
        self.stats.num_new_tokens -= len(request.token_ids) - num_tokens
        request.num_seen_tokens = num_tokens
        request.cut(num_tokens)
        self._remember(request)
        self._finish(request)

    def cache_use(self) -> float:
        """Return the part of the cache's blocks that running requests hold, in [0, 1]."""
        return 1 - self.allocator.num_free / self.allocator.num_blocks

    def collect(self, step: InFlightStep) -> None:
        """Wait for a step, and take its tokens."""
        words = step.wait()
        self.model.check()
        agreed = step.message.read(words)
        self.now, self._first_now = self._agreement.clock(), agreed.now
        self._agreement.progress.apply(agreed.progress, step.message.reported)
        content = self._agreement.share(step.message.content, agreed.num_bytes)
        self._heard = self._heard.joined(News(content, agreed.is_told))
        self.admit_compiled(agreed.num_compiled)
        step.logprobs.give()
        num_rejected = 0
        for piece, drafts, tokens in step.results(agreed.tokens):
            if piece.request.finish_reason:
                continue
            num_drafts = self.speculation.accept(piece, drafts, len(tokens) - 1)
            num_rejected += len(drafts) + 1 - len(tokens)
            self.stats.count_drafts(num_drafts, len(tokens) - 1)
            self._append(piece.request, tokens, step.logits.get(piece.request))
        ended, num_tokens = time.perf_counter(), sum(piece.num_tokens for piece in step.pieces)
        self.speculation.learn(agreed.step_time)
        self.speculation.end(step, ended - self._last_end)
        self.stats.count_step(step.is_prefill, num_tokens - num_rejected, ended - max(step.started, self._last_end))
        self._last_end = ended

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
            self.withdraw(request)
        self._finished.append(request)
        self.stats.count_finished(request)

    def _remember(self, request: Request) -> None:
        """Let other requests find a request's full blocks, and its state."""
        state = self.scheduler.reuse.remember(request)
        if state is not None and state.target is not None:
            self.cache.copy_state(state.source, state.target)
        if state is not None and self.offload is not None:
            self.offload.store_state(state)
