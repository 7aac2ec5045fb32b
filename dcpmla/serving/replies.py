"""The base of all routes' answers, and the ways in which one follows the engine: whole, or as a stream of events, while
its client is connected.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcpmla.serving.client import Generation
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Output, joined
from dcpmla.serving.prompts import Prompt, Texts
from dcpmla.serving.protocol import RequestFields
from dcpmla.serving.reader import AnswerReader
from dcpmla.serving.shown import Json, Usage
from dcpmla.serving.slices import slices

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_NUM_JOINED = 256  # outputs of a whole answer that are read at once
Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")
Ending = Callable[[Output], Json]  # function of fields of an answer, of a stream in its last chunk, that needs the end


class Reply(ABC):
    """The answer to one body in the shape of a route, as it grows.

    Args:
        body: Body of the request; its fields choose the shown parts of answers.
        model: Name of the model for clients.
        prompts: Prompts that it answers. Each has a number of choices, one after the other.
        readers: Reader of each choice; none of completions.

    Attributes:
        num_choices: Number of answers to each prompt.
        usages: Usage of each choice.
        ending: Text after the last event of a stream.
    """

    ending = ""

    def __init__(
        self, body: RequestFields, texts: Texts, model: str, prompts: list[Prompt], readers: Sequence[AnswerReader] = ()
    ) -> None:
        self.body, self.texts, self.model, self.prompts, self.readers = body, texts, model, prompts, readers
        self.id, self.created, self.num_choices = uuid.uuid4().hex, int(time.time()), body.sampling.num_choices
        self.usages = [Usage(len(prompt.token_ids)) for prompt in prompts for _ in range(self.num_choices)]

    @property
    def usage(self) -> Usage:
        """Return the usage of all choices. The choices of a prompt have its tokens in common."""
        firsts = self.usages[:: self.num_choices]
        reasoning = [usage.reasoning_tokens for usage in self.usages if usage.reasoning_tokens is not None]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(usage.completion_tokens for usage in self.usages),
            sum(usage.cached_tokens for usage in firsts),
            sum(reasoning) if reasoning else None,
        )

    def read(self, index: int, output: Output) -> bool:
        """Count an output of a choice, read it if there are readers, and return whether it is the choice's first."""
        is_first = self.usages[index].count(output)
        if self.readers:
            self.readers[index].push(output)
            self.usages[index].reasoning_tokens = self.readers[index].num_reasoning_tokens
        return is_first

    def reason(self, index: int, output: Output) -> str | None:
        """Return the reason of a choice's end, None before; calls are one."""
        return self.readers[index].finish_reason(output.finish_reason) if self.readers else output.finish_reason

    def drop_prompts(self) -> None:
        """Keep only the parts of prompts that the answer needs: it may take minutes."""
        self.prompts.clear()

    def add(self, index: int, output: Output) -> None:
        """Take outputs of a choice, joined, for the whole answer."""
        self.chunks(index, output)

    @abstractmethod
    def whole(self) -> Json:
        """Return the whole answer, after all outputs."""

    def first_chunks(self) -> list[Json]:
        """Return the chunks that come before any token."""
        return []

    @abstractmethod
    def chunks(self, index: int, output: Output) -> list[Json]:
        """Return the chunks with an output of a choice, none if there is nothing to show yet."""

    @abstractmethod
    def last_chunks(self) -> list[Json]:
        """Return the chunks that come after all tokens."""

    def error(self, error: ApiError) -> Json:
        """Return the chunk of an error, which is the last one."""
        return error.body()


def event(*chunks: Json) -> Iterator[str]:
    """Yield each chunk as a server-sent event in slices, named after the chunk's type if it has one."""
    for chunk in chunks:
        before = f"event: {chunk['type']}\ndata: " if "type" in chunk else "data: "
        for text in slices(chunk):
            yield before + text
            before = ""
        yield "\n\n"


async def collect(generation: Generation, answers: Reply, ending: Ending | None = None) -> Json:
    """Return the whole answer. It is read as it comes: reading a long one at its end would keep the event loop."""
    waiting: list[list[Output]] = [[] for _ in generation.indices]
    fields: Json = {}
    async for index, output in generation.outputs():
        waiting[index].append(output)
        if output.finish_reason is not None or len(waiting[index]) == _NUM_JOINED:
            answers.add(index, whole := joined(waiting[index]))
            waiting[index].clear()
            if ending is not None and output.finish_reason is not None:
                fields = ending(whole)
    return answers.whole() | fields


async def events(generation: Generation, answers: Reply, ending: Ending | None = None) -> AsyncIterator[str]:
    """Yield the answer as events; an error is the last one, if one comes."""
    try:
        for text in event(*answers.first_chunks()):
            yield text
        async for index, output in generation.outputs():
            chunks = answers.chunks(index, output)
            if ending is not None and output.finish_reason:
                chunks[-1] |= ending(output)
            for text in event(*chunks):
                yield text
    except ApiError as error:
        generation.failure = error.status
        for text in event(answers.error(error)):
            yield text
    else:
        for text in event(*answers.last_chunks()):
            yield text
        yield answers.ending


class WholeAnswer(Response):
    """A whole answer as JSON, with some headers. One of several slices has no Content-Length."""

    def __init__(self, value: Json, headers: Headers = ()) -> None:
        super().__init__()
        self._value, self._more_headers = value, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        pieces = slices(self._value)
        text, following = next(pieces), next(pieces, None)
        headers = [(b"content-type", b"application/json"), *self._more_headers]
        if following is None:
            headers.append((b"content-length", str(len(text.encode())).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while following is not None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await asyncio.sleep(0)
            text, following = following, next(pieces, None)
        await send({"type": "http.response.body", "body": text.encode()})


class EventStream(Response):
    """A streamed answer, with some headers; its requests end with it, or with its client."""

    def __init__(self, generation: Generation, events: AsyncIterator[str], headers: Headers = ()) -> None:
        super().__init__()
        self._generation, self._events, self._more_headers = generation, events, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *self._more_headers]})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what work comes to; None, with the work cancelled, if the client goes away first."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(until_gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await tasks[0] if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def under(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what work for a request comes to; it ends with the client.

    Raises:
        ApiError: The client has left.
    """

    async def done() -> tuple[T]:
        return (await work,)  # which may be None

    found = await while_connected(request.receive, done())
    if found is None:
        raise ApiError(499, "the client has left")
    return found[0]
