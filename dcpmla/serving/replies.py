"""The ways in which an answer follows the engine: whole, or as a stream of events, while its client is connected."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcpmla.serving.client import Generation
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Output, joined
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.shown import Json
from dcpmla.serving.slices import slices

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_NUM_JOINED = 256  # outputs of a whole answer that are read at once
T = TypeVar("T")
Ending = Callable[[Output], Json]  # function of fields of an answer, of a stream in its last chunk, that needs the end


class Reply(Protocol):
    """An answer in the shape of one route, as it grows.

    Attributes:
        prompts: Prompts that it answers.
        num_choices: Number of answers to each.
        ending: Text after the last event of a stream.
    """

    prompts: list[Prompt]
    num_choices: int
    ending: str

    def drop_prompts(self) -> None:
        """Keep only the parts of prompts that the answer needs: it may take minutes."""
        ...

    def add(self, index: int, output: Output) -> None:
        """Take outputs of a choice, joined, for the whole answer."""
        ...

    def whole(self) -> Json:
        """Return the whole answer, after all outputs."""
        ...

    def first_chunks(self) -> list[Json]:
        """Return the chunks that come before any token."""
        ...

    def chunks(self, index: int, output: Output) -> list[Json]:
        """Return the chunks with an output of a choice."""
        ...

    def last_chunks(self) -> list[Json]:
        """Return the chunks that come after all tokens."""
        ...

    def error(self, error: ApiError) -> Json:
        """Return the chunk of an error, which is the last one."""
        ...


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
        for text in event(answers.error(error)):
            yield text
    else:
        for text in event(*answers.last_chunks()):
            yield text
        yield answers.ending


class WholeAnswer(Response):
    """A whole answer as JSON. One of several slices has no Content-Length."""

    def __init__(self, value: Json) -> None:
        super().__init__()
        self._value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        pieces = slices(self._value)
        text, following = next(pieces), next(pieces, None)
        headers = [(b"content-type", b"application/json")]
        if following is None:
            headers.append((b"content-length", str(len(text.encode())).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while following is not None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await asyncio.sleep(0)
            text, following = following, next(pieces, None)
        await send({"type": "http.response.body", "body": text.encode()})


class EventStream(Response):
    """A streamed answer; its requests end with it, or with its client."""

    def __init__(self, generation: Generation, events: AsyncIterator[str]) -> None:
        super().__init__()
        self._generation, self._events = generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
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
