"""The HTTP API: routes, what guards them, and how an answer follows the engine."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dcpmla.serving.answers import DONE, Answers, ChatAnswers, event
from dcpmla.serving.client import Engine, Generation, merged
from dcpmla.serving.connections import Limits
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Output
from dcpmla.serving.prompts import Texts
from dcpmla.serving.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The user's choices.

    Attributes:
        name: Name of the model.
        api_key: Key that every route except /health requires, None for no key.
        request_timeout: Maximum duration of one request, in seconds.
    """

    name: str
    api_key: str | None
    request_timeout: float


class Api:
    """The routes over an engine."""

    def __init__(self, engine: Engine, settings: Settings, limits: Limits) -> None:
        self._engine, self._settings, self._limits, self._created = engine, settings, limits, int(time.time())
        self._num_body_bytes = 0  # Bodies of all requests that are being received or tokenized.

    def app(self) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={ApiError: self._refuse, HTTPException: self._refuse, Exception: self._refuse},
        )
        return app if self._settings.api_key is None else _Guard(app, self._settings.api_key)

    async def health(self, request: Request) -> Response:
        """Return 200 while every rank takes part in steps and new requests are taken."""
        return Response(status_code=200 if self._engine.is_healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the measurements."""
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Return the one model."""
        model = {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "dcpmla"}
        model["max_model_len"] = self._engine.ready().max_model_len
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        self._engine.check_room(1)
        async with self._body(request, CompletionBody, CompletionBody.check) as body:
            texts = self._texts(body.model)
            self._engine.check_room(len(body.prompts) * body.num_choices)
            prompts = [await texts.prompt(prompt, wants_text=bool(body.echo)) for prompt in body.prompts]
            body.prompt = ""  # The answer may take minutes.
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        params = body.params(max(1, max_tokens), body.logprobs, body.logprobs if body.echo else None)
        answers = Answers(
            texts,
            self._settings.name,
            prompts,
            body.num_choices,
            echo=bool(body.echo),
            num_logprobs=body.logprobs,
            drops_new=max_tokens == 0,
        )
        return await self._answer(request, body, answers, params)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        self._engine.check_room(1)
        async with self._body(request, ChatBody, ChatBody.check) as body:
            texts = self._texts(body.model)
            prompts = [await texts.chat(body.messages, body.chat_template_kwargs)]
            body.messages.clear()  # The answer may take minutes.
        room = self._engine.ready().max_model_len - len(prompts[0].token_ids)
        max_tokens = body.max_completion_tokens or body.max_tokens or room
        answers = ChatAnswers(texts, self._settings.name, prompts, body.num_choices, num_logprobs=body.num_logprobs)
        return await self._answer(request, body, answers, body.params(max_tokens, body.num_logprobs, None))

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        self._engine.ready()
        async with self._body(request, TokenizeBody) as body:
            texts = self._texts(body.model)
            if (body.prompt is None) == (body.messages is None):
                raise ApiError(400, "give either prompt or messages", param="prompt")
            if body.messages is not None:
                tokens = (await texts.chat(body.messages, body.chat_template_kwargs)).token_ids
            else:
                tokens = await texts.encode(body.prompt or "", body.add_special_tokens is not False)
        return JSONResponse(
            {"count": len(tokens), "max_model_len": self._engine.ready().max_model_len, "tokens": tokens}
        )

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        self._engine.ready()
        async with self._body(request, DetokenizeBody) as body:
            return JSONResponse({"prompt": await self._texts(body.model).decode(body.tokens)})

    @asynccontextmanager
    async def _body(
        self, request: Request, kind: type[Body], check: Callable[[Body], None] = lambda body: None
    ) -> AsyncIterator[Body]:
        """Receive and parse a body, which counts towards the total until the end of the block.

        Raises:
            ApiError: The body is too long, too slow or wrong, or the bodies of other requests leave no room.
        """
        content = bytearray()
        try:
            await self._receive(request, content)
            yield parse(kind, content, check)
        finally:
            self._num_body_bytes -= len(content)

    async def _receive(self, request: Request, content: bytearray) -> None:
        self._check_length(int(request.headers.get("content-length", 0)))
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    content += part
                    self._num_body_bytes += len(part)
                    self._check_length(len(content))
        except TimeoutError:
            raise ApiError(408, "the body takes too long", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise ApiError(400, "the body is not complete") from None

    def _check_length(self, length: int) -> None:
        """Raise ApiError for a body that is too long, or where all bodies together are."""
        if length > self._limits.body_bytes:
            raise ApiError(413, f"the body has more than {self._limits.body_bytes:,} bytes")
        if self._num_body_bytes > self._limits.total_bytes:
            words = f"requests that are being received have more than {self._limits.total_bytes:,} bytes; try again"
            raise ApiError(503, words, code="overloaded", headers={"Retry-After": "1"})

    def _texts(self, name: str | None) -> Texts:
        """Return the tokenizer of the model that a client names, or of the one there is."""
        model = self._engine.ready()
        if name not in (None, self._settings.name):
            words = f"the model {name!r} does not exist; this is {self._settings.name!r}"
            raise ApiError(404, words, param="model", code="model_not_found")
        return Texts(model)

    async def _answer(
        self, request: Request, body: CompletionBody | ChatBody, answers: Answers, params: Any
    ) -> Response:
        generation = self._engine.submit(
            [prompt.token_ids for prompt in answers.prompts],
            params,
            self._settings.request_timeout,
            num_choices=body.num_choices,
            cache_salt=body.cache_salt or "",
            num_characters=sum(len(prompt.text) for prompt in answers.prompts) if answers.echo else 0,
        )
        answers.drop_prompts()
        if body.stream:
            return _EventStream(generation, _events(generation, answers, body.wants_usage))
        with generation:
            value = await _while_connected(request.receive, _collect(generation, answers))
        return Response(status_code=499) if value is None else JSONResponse(value)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        match error:
            case ApiError():
                found = error
            case HTTPException():
                found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
            case _:
                found = ApiError(500, "the server has made a mistake; its log says more")
        self._engine.metrics.refused(found.status)
        return found.response()


async def _collect(generation: Generation, answers: Answers) -> dict[str, Any]:
    """Return the whole answer."""
    outputs: list[list[Output]] = [[] for _ in generation.indices]
    async for index, output in generation.outputs():
        outputs[index].append(output)
    choices = [answers.whole(index, merged(parts)[0]) for index, parts in enumerate(outputs)]
    return {**answers.body(choices), "usage": answers.usage.body()}


async def _events(generation: Generation, answers: Answers, wants_usage: bool) -> AsyncIterator[str]:
    """Yield the answer as events; an error is the last one, if one comes."""
    usage = {"usage": None} if wants_usage else {}
    try:
        for choice in answers.first_chunks():
            yield event({**answers.body([choice], is_chunk=True), **usage})
        async for index, output in generation.outputs():
            chunk = answers.chunk(index, output)
            if chunk is not None:
                yield event({**answers.body([chunk], is_chunk=True), **usage})
    except ApiError as error:
        yield event(error.body())
        return
    if wants_usage:
        yield event({**answers.body([], is_chunk=True), "usage": answers.usage.body()})
    yield DONE


class _EventStream(Response):
    """A streamed answer; its requests end with it, or with its client."""

    def __init__(self, generation: Generation, events: AsyncIterator[str]) -> None:
        super().__init__()
        self._generation, self._events = generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await _while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
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


class _Guard:
    """A wrapper that asks for the API key, except on /health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "http" and scope["path"] != "/health" and not hmac.compare_digest(token, self._expected):
            error = ApiError(401, "give the server's API key: Authorization: Bearer KEY", code="invalid_api_key")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
