"""The HTTP API: its routes over an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.access import guarded
from dcpmla.serving.answers import Answers, ChatAnswers
from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Limits
from dcpmla.serving.errors import ApiError
from dcpmla.serving.prompts import Texts
from dcpmla.serving.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from dcpmla.serving.replies import EventStream, collect, events, while_connected
from dcpmla.serving.structured import GrammarChecks

_NUM_NEW = 16  # new tokens of a completion without max_tokens


@dataclass(frozen=True)
class Settings:
    """The user's choices.

    Attributes:
        name: Name of the model.
        api_key: Key that every route except /health and /ping requires, None for no key.
        request_timeout: Maximum duration of one request, in seconds.
        allowed_origins: Origins whose web pages may use the server; "*" is any.
    """

    name: str
    api_key: str | None
    request_timeout: float
    allowed_origins: Sequence[str] = ("*",)


class Api:
    """The routes over an engine."""

    def __init__(self, engine: Engine, settings: Settings, limits: Limits) -> None:
        self._engine, self._settings, self._limits, self._created = engine, settings, limits, int(time.time())
        self._grammars = GrammarChecks()
        self._num_body_bytes = 0  # Bodies of all requests that are being received or tokenized.

    def app(self) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={ApiError: self._refuse, HTTPException: self._refuse, Exception: self._refuse},
        )
        return guarded(app, self._settings.api_key, self._settings.allowed_origins)

    async def health(self, request: Request) -> Response:
        """Return 200 while every rank takes part in steps and new requests are taken."""
        return Response(status_code=200 if self._engine.is_healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the measurements."""
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def version(self, request: Request) -> Response:
        """Return the version of this package."""
        return JSONResponse({"version": metadata.version("dcpmla")})

    async def models(self, request: Request) -> Response:
        """Return a list of the one model."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """Return the model, if it has the name."""
        self._texts(request.path_params["name"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "dcpmla"}
        return {**card, "max_model_len": self._engine.ready().max_model_len}

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        self._engine.check_room(1)
        async with self._body(request, CompletionBody) as body:
            texts = self._texts(body.model)
            self._engine.check_room(len(body.prompts) * body.num_choices)
            max_tokens = _NUM_NEW if body.token_limit is None else body.token_limit
            num_new, echo, adds_special = max(1, max_tokens), bool(body.echo), body.add_special_tokens is not False
            num_kept = body.num_kept_tokens(self._engine.ready().max_model_len, num_new)
            prompts = [await texts.prompt(prompt, echo, adds_special, num_kept) for prompt in body.prompts]
            body.prompt = ""  # The answer may take minutes.
        prompt_logprobs = [num for num in (body.logprobs if echo else None, body.prompt_logprobs) if num is not None]
        params = body.params(num_new, body.logprobs, max(prompt_logprobs, default=None))
        shown = body.shown(echo=echo, num_logprobs=body.logprobs, drops_new=max_tokens == 0)
        answers = Answers(texts, self._settings.name, prompts, body.num_choices, shown)
        return await self._answer(request, body, answers, params)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        self._engine.check_room(1)
        async with self._body(request, ChatBody) as body:
            texts = self._texts(body.model)
            longest, adds_special = self._engine.ready().max_model_len, bool(body.add_special_tokens)
            num_kept = body.num_kept_tokens(longest, body.token_limit or 1)
            prompt = await texts.chat(body.messages, body.chat_template_kwargs, body.template(), adds_special, num_kept)
            body.messages.clear()  # The answer may take minutes.
        max_tokens = body.token_limit or longest - len(prompt.token_ids)
        shown = body.shown(echo=False, num_logprobs=body.num_logprobs, drops_new=False)
        answers = ChatAnswers(texts, self._settings.name, [prompt], body.num_choices, shown)
        params = body.params(max_tokens, body.num_logprobs, body.prompt_logprobs)
        return await self._answer(request, body, answers, params)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        self._engine.ready()
        async with self._body(request, TokenizeBody) as body:
            texts, adds_special = self._texts(body.model), bool(body.add_special_tokens)
            if body.messages is not None:
                arguments = body.template()
                tokens = (await texts.chat(body.messages, body.chat_template_kwargs, arguments, adds_special)).token_ids
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
    async def _body(self, request: Request, kind: type[Body]) -> AsyncIterator[Body]:
        """Receive and parse a body, which counts towards the total until the end of the block.

        Raises:
            ApiError: The body is too long, too slow or wrong, or the bodies of other requests leave no room.
        """
        content = bytearray()
        try:
            await self._receive(request, content)
            yield parse(kind, content)
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
        self, request: Request, body: CompletionBody | ChatBody, answers: Answers, params: SamplingParams
    ) -> Response:
        try:
            params.check_vocabulary(self._engine.ready().vocab_size)
        except ValueError as error:
            raise ApiError(400, str(error), param="logit_bias") from error
        await self._grammars.check(params.grammar, body.grammar_source, self._engine.ready())
        generation = self._engine.submit(
            [prompt.token_ids for prompt in answers.prompts],
            params,
            self._settings.request_timeout,
            num_choices=body.num_choices,
            cache_salt=body.cache_salt or "",
            num_characters=sum(len(prompt.text) for prompt in answers.prompts) if answers.shown.echo else 0,
        )
        answers.drop_prompts()
        if body.stream:
            return EventStream(generation, events(generation, answers))
        with generation:
            value = await while_connected(request.receive, collect(generation, answers))
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
