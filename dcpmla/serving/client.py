"""The HTTP process's end of the engine: submitted requests and their outputs."""

import asyncio
import logging
import time
from asyncio import StreamReader
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from dcpmla.integrations.tokenizer import load_tokenizer
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.background import Prepared
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import (
    LENGTH,
    STAYS,
    Close,
    Connect,
    Drain,
    Move,
    Opened,
    Output,
    RanksMessage,
    Report,
    Seen,
    Started,
    Stop,
    Stopped,
    Submit,
    Wanted,
    joined,
    merged,
    pack_tokens,
    unpack,
)
from dcpmla.serving.metrics import Metrics, Timings
from dcpmla.serving.outbox import Outbox
from dcpmla.serving.reading import RequestText

_SILENCE = 10.0  # seconds without a step after which the ranks count as stuck
_MOMENT = 0.1  # seconds in which the work for clients that have just left ends, and between two looks at the rest
_RETRY_AFTER = {"Retry-After": "1"}  # seconds
_logger = logging.getLogger(__name__)
WAITING_TOKENS = 1 << 23  # Limit of open requests' prompt tokens beyond the cache's capacity.


@dataclass
class Engine:
    """The ranks, as the HTTP process knows them.

    Args:
        reader: Stream of the first rank's messages.
        outbox: Commands for the ranks.
        max_waiting: Limit of requests beyond the running ones.
        prepared: The model and its tokenizer; None until the ranks are ready.
        readers: Names of the jobs that read blocks of this one, or are to read them.
        on_ready: Function that runs once requests are taken.
        on_wanted: Function of a request that another server is to prefill.
        on_end: Function of the id of a request that has ended, in any way.
    """

    reader: StreamReader
    outbox: Outbox
    max_waiting: int
    metrics: Metrics
    prepared: Prepared | None = None
    has_failed: bool = False
    drain: asyncio.Event = field(default_factory=asyncio.Event)
    readers: Sequence[str] = ()
    on_ready: Callable[[], object] = lambda: None
    on_wanted: Callable[[Wanted], object] = lambda request: None
    on_end: Callable[[int], object] = lambda request_id: None
    _ids: Any = field(default_factory=count)
    _open: "dict[int, Generation]" = field(default_factory=dict)
    _num_prepared: int = 0  # HTTP requests that are not submitted yet
    _num_tokens: int = 0  # prompt tokens of all generations that are not abandoned
    _last: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """Return whether every rank has taken part in a step, just now, and new requests are taken."""
        is_open = self.prepared is not None and not self.drain.is_set() and not self.has_failed
        return is_open and time.monotonic() - self._last < _SILENCE

    @property
    def link(self) -> Connect | None:
        """This job, for others that exchange blocks with it; None if it exchanges none, or is not ready."""
        return None if self.prepared is None else self.prepared.model.link

    def ready(self) -> Prepared:
        """Return the model and its tokenizer.

        Raises:
            ApiError: The model is not loaded yet, or the server is about to end.
        """
        if self.drain.is_set() or self.has_failed:
            raise ApiError(503, "the server is stopping", code="stopping", headers=_RETRY_AFTER)
        if self.prepared is None:
            raise ApiError(503, "the model is being loaded", code="loading", headers=_RETRY_AFTER)
        return self.prepared

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Count an HTTP request as open in an `async with` block, which ends right before its submission.

        Raises:
            ApiError: The queue is full, or the ranks are not ready.
        """
        limit = self.ready().model.max_num_seqs + self.max_waiting
        if self._num_prepared and len(self._open) + self._num_prepared >= limit:
            await asyncio.sleep(_MOMENT)
        self.check_room(1)
        self._num_prepared += 1
        try:
            yield
        finally:
            self._num_prepared -= 1

    def check_room(self, num_requests: int, num_tokens: int = 0, num_counted: int = 0) -> None:
        """Raise ApiError unless the queue has room for so many requests more, with prompts of so many tokens.

        Args:
            num_counted: Number of the requests that `preparing` counts already.
        """
        model = self.ready().model
        limit, token_limit = model.max_num_seqs + self.max_waiting, model.num_cache_tokens + WAITING_TOKENS
        if num_requests > limit:
            raise ApiError(400, f"{num_requests} answers are asked for at once; at most {limit} are served", param="n")
        if num_tokens > token_limit:
            words = f"the prompts have {num_tokens:,} tokens; at most {token_limit:,} are served at once"
            raise ApiError(400, words, param="prompt")
        num_open = len(self._open) + self._num_prepared - num_counted
        if num_requests > limit - num_open:
            words = f"{num_open} requests are open, and {limit} is the most there may be; try again later"
            raise ApiError(429, words, code="queue_full", headers=_RETRY_AFTER)
        if num_tokens > token_limit - self._num_tokens:
            words = f"open prompts have {self._num_tokens:,} tokens, of {token_limit:,} at most; try again later"
            raise ApiError(429, words, code="queue_full", headers=_RETRY_AFTER)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seconds: float,
        *,
        num_choices: int = 1,
        cache_salt: str = "",
        num_characters: int = 0,
        move: Move = STAYS,
    ) -> "Generation":
        """Send prompts to the engine, which abandons them at the end of the generation's `with` block.

        Args:
            params: Parameters of all choices. Each draws from a stream of its own, and ends where the model does.
            seconds: Time until the generation's deadline.
            num_choices: Number of requests for each prompt.
            cache_salt: Salt of the keys of the prompts' blocks.
            num_characters: Characters and log probabilities that are kept for the answer; they count as tokens do.
            move: Part in a transfer of the only prompt, which has one choice.
        Raises:
            ApiError: The queue is full.
        """
        num_prompt_tokens, prepared = sum(map(len, prompts)), self.ready()
        num_tokens = num_prompt_tokens + num_characters
        self.check_room(len(prompts) * num_choices, num_tokens)
        generation = Generation(self, time.monotonic() + seconds, num_tokens, num_prompt_tokens)
        self._num_tokens += num_tokens
        for number, prompt in enumerate(prompts):
            request_ids = list(islice(self._ids, num_choices))
            first = number * num_choices
            self._open |= dict.fromkeys(request_ids, generation)
            generation.indices |= {request_id: index for index, request_id in enumerate(request_ids, first)}
            seeds = [params.for_prompt(index).seed for index in range(first, first + num_choices)]
            own = params.at_most(prepared.model.max_model_len - len(prompt))
            if move.handoff:  # The other job looks for stop strings, and draws from the same stream.
                own, seeds = replace(own, stop=()), [params.seed]
            if prepared.tokenizer is not None:
                generation.texts |= {each: RequestText(prepared.tokenizer, own, prompt) for each in request_ids}
            self.outbox.submit(Submit(request_ids, seeds, pack_tokens(prompt), own, cache_salt, move))
            generation.timings.num_prompt_tokens |= dict.fromkeys(request_ids, len(prompt))
        return generation

    def abandon(self, generation: "Generation") -> None:
        """Abort the unfinished requests of a generation."""
        unfinished = [request_id for request_id in generation.indices if request_id in self._open]
        for request_id in unfinished:
            self._end(request_id)
            self.metrics.count("requests", "abort")
        self.outbox.abort(unfinished)
        self._num_tokens -= generation.num_tokens
        generation.num_tokens = 0

    def is_open(self, request_id: int) -> bool:
        """Return whether a request is not finished."""
        return request_id in self._open

    def refuse(self, request_id: int, reason: str) -> None:
        """End an open request as one that the engine refuses."""
        self.outbox.abort([request_id])
        self._end(request_id).take(Output(request_id, error=reason))

    async def finish(self, seconds: float) -> None:
        """Once the job is to stop, leave open requests some seconds, then abort them, and let the ranks end."""
        await self.drain.wait()
        _logger.info("stopping: %d open requests have %g s (--drain-seconds)", len(self._open), seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._open:
                    await asyncio.sleep(_MOMENT)
        if self._open:
            _logger.info("%d requests end with 503", len(self._open))
        self.outbox.abort(self._open)
        self._end_all("abort")
        self.outbox.send(Close())

    async def listen(self) -> None:
        """Follow the ranks until they end. The tokenizer is loaded while they read the weights."""
        tokenizer: asyncio.Future[tuple[Any, str]] | None = None
        async for message in self._messages():
            match message:
                case Report():
                    self._last, self.readers = time.monotonic(), message.readers
                    self.outbox.take(message.num_bytes)
                    self._hand_out(message)
                case Opened():
                    tokenizer = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, Path(message.directory)))
                case Started():
                    assert tokenizer is not None, "the ranks send Opened first"
                    self.prepared, self._last = Prepared(message, *await tokenizer), time.monotonic()
                    self.metrics.describe(message)
                    self.on_ready()
                case Wanted():
                    self.on_wanted(message)
                case Drain():
                    self.drain.set()
                case Stopped():
                    return
        self.has_failed = True
        self._end_all("error")

    def _end(self, request_id: int) -> "Generation":
        """Close an open request; return its generation."""
        self.on_end(request_id)
        return self._open.pop(request_id)

    def _end_all(self, reason: str) -> None:
        for request_id in [*self._open]:
            self._end(request_id).queue.put_nowait(Output(request_id, finish_reason=reason))

    async def _messages(self) -> AsyncIterator[RanksMessage]:
        while True:
            try:
                head = await self.reader.readexactly(LENGTH.size)
                body = await self.reader.readexactly(LENGTH.unpack(head)[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield unpack(body)

    def _hand_out(self, report: Report) -> None:
        self.metrics.state(report)
        seen: dict[int, int] = {}
        for output in report.outputs:
            request_id, has_ended = output.request_id, bool(output.finish_reason or output.error)
            generation = self._open.get(request_id)
            if generation is None:  # abandoned, or ended by a stop string
                continue
            text = generation.texts.get(request_id)
            if text is not None and not output.error:
                output = text.read(output)
                if output.finish_reason and not has_ended:
                    self.outbox.send(Stop(request_id, text.stream.num_tokens))
                elif num_tokens := text.news():
                    seen[request_id] = num_tokens
            if output.finish_reason or output.error:
                self._end(request_id)
            generation.take(output)
        if seen:
            self.outbox.send(Seen(seen))


class Generation(AbstractContextManager["Generation"]):
    """The answers to the prompts of one HTTP request.

    Attributes:
        num_tokens: Tokens that count towards the engine's limit.
        num_prompt_tokens: Tokens of the prompts, each once.
        indices: Index of each request's answer, by id.
        queue: Outputs that are not read yet.
        texts: Text of each request, by id; empty without a tokenizer.
        timings: Times of the requests.
        failure: Status of the error that ended a stream; None for none.
    """

    def __init__(self, engine: Engine, deadline: float, num_tokens: int, num_prompt_tokens: int) -> None:
        self._engine, self._deadline, self.num_tokens = engine, deadline, num_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.failure: int | None = None
        self.indices: dict[int, int] = {}
        self.queue: asyncio.Queue[Output] = asyncio.Queue()
        self.timings = Timings(time.monotonic())
        self._scores: dict[int, list[Output]] = {}  # pieces of prompts' log probabilities, by id
        self.texts: dict[int, RequestText] = {}

    def __exit__(self, *exception: object) -> None:
        self._engine.abandon(self)

    @property
    def num_new_tokens(self) -> int:
        """Return the number of new tokens so far, of all requests."""
        return sum(each.num_tokens for each in self.timings.progress.values())

    @property
    def first_token_time(self) -> float | None:
        """Return the time of the first new token of any request; None without one."""
        return min((each.first for each in self.timings.progress.values()), default=None)

    def take(self, output: Output) -> None:
        """Take an output with its text. Log probabilities of a prompt wait for the first new token."""
        if not (output.token_ids or output.finish_reason or output.error):
            self._scores.setdefault(output.request_id, []).append(output)
            return
        if pieces := self._scores.pop(output.request_id, None):
            output = joined([*pieces, output])
        self._engine.metrics.observe(output, self.timings, time.monotonic())
        self.queue.put_nowait(output)

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Yield the index of an answer and its new output, several that wait as one, until all are finished.

        Raises:
            ApiError: The engine refuses a request, or fails; the time is over.
        """
        num_left = len(self.indices)
        while num_left:
            for output in merged(await self._next()):
                _check(output)
                num_left -= output.finish_reason is not None
                yield self.indices[output.request_id], output

    async def _next(self) -> list[Output]:
        """Wait for an output, and return all queued outputs."""
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                outputs = [await self.queue.get()]
        except TimeoutError:
            raise ApiError(504, "the request took longer than --request-timeout allows", code="timeout") from None
        while not self.queue.empty():
            outputs.append(self.queue.get_nowait())
        return outputs


def _check(output: Output) -> None:
    """Raise ApiError for an output that ends a request too early."""
    if output.error:
        has_failed = output.finish_reason == "error"
        raise ApiError(500 if has_failed else 400, output.error, code="model_error" if has_failed else None)
    if output.finish_reason == "abort":
        raise ApiError(503, "the server is stopping, and --drain-seconds are over", code="stopping")
    if output.finish_reason == "error":
        raise ApiError(500, "a rank of the server has failed; the request is lost, try again", code="rank_failed")
