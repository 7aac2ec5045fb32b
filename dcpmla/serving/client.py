"""The HTTP process's end of the engine: what is submitted, and how its outputs come back."""

import asyncio
import itertools
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import LENGTH, Abort, Close, Drain, Output, Report, Started, Stopped, Submit, pack, unpack
from dcpmla.serving.metrics import Metrics, Timings

_SILENCE = 10.0  # seconds without a step after which the ranks count as stuck
_RETRY_AFTER = {"Retry-After": "1"}  # seconds


@dataclass
class Engine:
    """The ranks, as the HTTP process knows them.

    Args:
        max_waiting: most requests beyond those that run.
    """

    reader: StreamReader
    writer: StreamWriter
    max_waiting: int
    metrics: Metrics
    model: Started | None = None
    has_failed: bool = False
    drain: asyncio.Event = field(default_factory=asyncio.Event)
    _ids: Any = field(default_factory=itertools.count)
    _open: "dict[int, Generation]" = field(default_factory=dict)
    _last: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """Return whether every rank has taken part in a step, just now, and new requests are taken."""
        is_open = self.model is not None and not self.drain.is_set() and not self.has_failed
        return is_open and time.monotonic() - self._last < _SILENCE

    @property
    def num_open(self) -> int:
        """Requests that are not finished."""
        return len(self._open)

    def ready(self) -> Started:
        """Return the model.

        Raises:
            ApiError: it is not loaded yet, or the server is about to end.
        """
        if self.drain.is_set() or self.has_failed:
            raise ApiError(503, "the server is stopping", code="stopping", headers=_RETRY_AFTER)
        if self.model is None:
            raise ApiError(503, "the model is being loaded", code="loading", headers=_RETRY_AFTER)
        return self.model

    def check_room(self, num_requests: int) -> None:
        """Raise ApiError unless the queue has room for so many requests more."""
        most = self.ready().max_num_seqs + self.max_waiting
        if num_requests > most:
            raise ApiError(400, f"{num_requests} answers are asked for at once; at most {most} are served", param="n")
        if num_requests > most - len(self._open):
            words = f"{len(self._open)} requests are open, and {most} is the most there may be; try again later"
            raise ApiError(429, words, code="queue_full", headers=_RETRY_AFTER)

    def submit(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seconds: float) -> "Generation":
        """Send requests to the engine, which abandons them at the end of the generation's `with` block.

        Raises:
            ApiError: the queue is full.
        """
        self.check_room(len(prompts))
        generation = Generation(self, time.monotonic() + seconds)
        for prompt, own in zip(prompts, params, strict=True):
            request_id = next(self._ids)
            self._open[request_id] = generation
            generation.indices[request_id] = len(generation.indices)
            self._send(Submit(request_id, prompt, own))
            self.metrics.submitted(len(prompt))
        return generation

    def abandon(self, generation: "Generation") -> None:
        """Abort what is left of a generation."""
        for request_id in generation.indices:
            if self._open.pop(request_id, None) is not None:
                self._send(Abort(request_id))
                self.metrics.finished("abort")

    def close(self) -> None:
        """Abort all requests, and let the ranks end."""
        for request_id, generation in list(self._open.items()):
            generation.queue.put_nowait(Output(request_id, finish_reason="abort"))
            self._send(Abort(request_id))
        self._open.clear()
        self._send(Close())

    async def listen(self) -> None:
        """Follow the ranks until they end."""
        async for message in self._messages():
            match message:
                case Report():
                    self._last = time.monotonic()
                    self._hand_out(message)
                case Started():
                    self.model, self._last = message, time.monotonic()
                case Drain():
                    self.drain.set()
                case Stopped():
                    return
        self.has_failed = True
        for request_id, generation in self._open.items():
            generation.queue.put_nowait(Output(request_id, finish_reason="error"))
        self._open.clear()

    def _send(self, message: object) -> None:
        self.writer.write(pack(message))

    async def _messages(self) -> AsyncIterator[Any]:
        while True:
            try:
                head = await self.reader.readexactly(LENGTH.size)
                body = await self.reader.readexactly(LENGTH.unpack(head)[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            for message in unpack(head + body):
                yield message

    def _hand_out(self, report: Report) -> None:
        self.metrics.state(report)
        for output in report.outputs:
            generation = self._open.get(output.request_id)
            if generation is None:  # abandoned
                continue
            if output.finish_reason or output.error:
                del self._open[output.request_id]
            generation.take(output)


class Generation:
    """The answers to the prompts of one HTTP request.

    Attributes:
        indices: of the requests' answers among all, by id.
        queue: outputs that nobody has looked at.
    """

    def __init__(self, engine: Engine, deadline: float) -> None:
        self._engine, self._deadline = engine, deadline
        self.indices: dict[int, int] = {}
        self.queue: asyncio.Queue[Output] = asyncio.Queue()
        self._timings = Timings(time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.abandon(self)

    def take(self, output: Output) -> None:
        """Take an output from the engine."""
        self._engine.metrics.observe(output, self._timings, time.monotonic())
        self.queue.put_nowait(output)

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Yield the index of an answer and what is new of it, all that has come since in one, until all are finished.

        Raises:
            ApiError: the engine does not take a request, or fails; the time is over.
        """
        num_left = len(self.indices)
        while num_left:
            for output in merged(await self._next()):
                _check(output)
                num_left -= output.finish_reason is not None
                yield self.indices[output.request_id], output

    async def _next(self) -> list[Output]:
        """Wait for an output, and return all there are."""
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                outputs = [await self.queue.get()]
        except TimeoutError:
            raise ApiError(504, "the request took longer than --request-timeout allows", code="timeout") from None
        while not self.queue.empty():
            outputs.append(self.queue.get_nowait())
        return outputs


def merged(outputs: Sequence[Output]) -> list[Output]:
    """Return outputs with those of the same request as one."""
    by_id: dict[int, Output] = {}
    for new in outputs:
        old = by_id.get(new.request_id)
        by_id[new.request_id] = (
            new
            if old is None
            else new._replace(
                text=old.text + new.text,
                token_ids=old.token_ids + new.token_ids,
                logprobs=old.logprobs + new.logprobs,
                prompt_logprobs=old.prompt_logprobs,
            )
        )
    return list(by_id.values())


def _check(output: Output) -> None:
    """Raise ApiError for an output that says that there is no more."""
    if output.error:
        raise ApiError(400, output.error)
    if output.finish_reason == "abort":
        raise ApiError(503, "the server is stopping, and --drain-seconds are over", code="stopping")
    if output.finish_reason == "error":
        raise ApiError(500, "a rank of the server has failed; the request is lost, try again", code="rank_failed")
