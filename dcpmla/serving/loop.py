"""The serving loop that every rank runs: commands in, one step of the engine after the other, reports out.

The first rank's step carries the HTTP process's commands to all ranks (`Feed`), so that they add and abort alike.
"""

import threading
from collections.abc import Callable

from dcpmla.runtime.agreement import News
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.serving.frontend import Frontend
from dcpmla.serving.messages import Abort, Close, Drain, Output, Report, Started, Stopped, Submit, unpack

_IDLE = 1.0  # seconds between two steps of an idle engine, in which the ranks show that they are there


class ServingLoop:
    """The engine of a server.

    Args:
        frontend: the HTTP process; None on every rank but the first.
    """

    def __init__(self, engine: Engine, frontend: Frontend | None) -> None:
        self._engine, self._frontend = engine, frontend
        self._requests: dict[int, Request] = {}
        self._outputs: list[Output] = []
        self._num_told = dict[int, int]()  # new tokens of each request that the HTTP process knows of
        self._told = threading.Event()  # by a signal to this rank
        self._is_draining = self._is_closed = False

    def stop(self) -> None:
        """Ask for the end of the job: take no more requests, finish those there are. May be called on any rank, from
        any thread.
        """
        self._told.set()

    def run(self) -> None:
        """Serve until the HTTP process says, once the job is told to stop, that no request comes. Collective."""
        self._engine.feed = self
        while not self._is_closed or self._engine.has_requests:
            if self._frontend is not None and not self._engine.has_requests:
                self._frontend.wait(_IDLE)
            try:
                finished = self._engine.step()
            except ValueError as error:  # every request has been checked by then, so the traceback is wanted
                raise RuntimeError("serving failed") from error
            for request in finished:
                self._requests.pop(int(request.request_id), None)
            self._report()
        if self._frontend is not None:
            self._frontend.send(Stopped())
            self._frontend.close()

    def give(self) -> News:
        """Return the commands that have come, if this is the first rank, and whether this rank is told to stop."""
        return News(b"" if self._frontend is None else self._frontend.take(), self._told.is_set())

    def take(self, news: News) -> None:
        """Follow the first rank's commands."""
        if news.is_told and not self._is_draining:
            self._is_draining = True
            if self._frontend is not None:
                self._frontend.send(Drain())
        for command in unpack(news.content):
            match command:
                case Submit():
                    self._submit(command)
                case Abort():
                    self._abort(command.request_id)
                case Close():
                    self._is_closed = True

    def _submit(self, command: Submit) -> None:
        try:
            request = self._engine.add(
                command.prompt_token_ids, command.params, request_id=command.request_id, on_token=self._on_token()
            )
        except ValueError as error:  # on every rank alike
            self._outputs.append(Output(command.request_id, error=str(error)))
            return
        self._requests[command.request_id] = request

    def _abort(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        self._num_told.pop(request_id, None)
        if request is not None:  # else it has just finished
            self._engine.abort(request)

    def _on_token(self) -> Callable[[Request, str], None] | None:
        return None if self._frontend is None else self._collect

    def _collect(self, request: Request, text: str) -> None:
        request_id, num_tokens = int(request.request_id), len(request.token_ids)
        num_told = self._num_told.pop(request_id, 0)
        if not request.finish_reason:
            self._num_told[request_id] = num_tokens
        self._outputs.append(
            Output(
                request_id,
                text,
                token_ids=tuple(request.token_ids[num_told:]),
                logprobs=tuple(request.logprobs[num_told:]),
                finish_reason=request.finish_reason,
                num_cached_tokens=request.num_cached_tokens,
                prompt_logprobs=() if num_told else tuple(request.prompt_logprobs),
            )
        )

    def _report(self) -> None:
        outputs, self._outputs = self._outputs, []
        if self._frontend is None:
            return
        scheduler, stats = self._engine.scheduler, self._engine.stats
        totals = {
            "preemptions": stats.num_preemptions,
            "draft_tokens": stats.num_draft_tokens,
            "accepted_draft_tokens": stats.num_accepted_tokens,
        }
        num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
        self._frontend.send(Report(outputs, num_running, num_waiting, self._engine.cache_use(), totals))


def started(engine: Engine, tokenizer: object, no_tokenizer: str) -> Started:
    """Return what the HTTP process must know of an engine."""
    sizes = engine.cache.sizes
    return Started(
        tokenizer,
        no_tokenizer,
        engine.model.vocab_size,
        min(engine.max_model_len, sizes.num_blocks * sizes.block_tokens),
        engine.scheduler.max_num_seqs,
    )
