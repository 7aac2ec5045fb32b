"""The HTTP API: its routes over an engine."""

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from importlib import metadata
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.access import guarded
from dcpmla.serving.answers import Answers
from dcpmla.serving.anthropic_body import CountBody, MessagesBody
from dcpmla.serving.anthropic_reply import MessagesReply
from dcpmla.serving.background import Background
from dcpmla.serving.chat_answers import ChatAnswers
from dcpmla.serving.chat_body import ChatBody, ChatRequest, TokenizeBody
from dcpmla.serving.chats import Chats
from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Limits
from dcpmla.serving.engine_limits import check_params
from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.handoffs import Handoffs
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.prompts import Prompt, Texts
from dcpmla.serving.protocol import CompletionBody, DetokenizeBody
from dcpmla.serving.reader import AnswerReader
from dcpmla.serving.receive import Receiver
from dcpmla.serving.replies import EventStream, Reply, WholeAnswer, collect, events, under
from dcpmla.serving.responses_body import ResponsesBody
from dcpmla.serving.responses_reply import ResponsesReply
from dcpmla.serving.settings import Settings
from dcpmla.serving.slices import MAX_ENTRIES, check_entries
from dcpmla.serving.structured import GrammarChecks
from dcpmla.serving.worker import Worker

_NUM_NEW = 16  # new tokens of a completion without max_tokens
Chat = TypeVar("Chat", bound=ChatRequest)
# Function of a body, the tokenizer, the model's name, the prompts and a reader of each answer.
MakeReply = Callable[[Chat, Texts, str, list[Prompt], list[AnswerReader]], Reply]


class Api:
    """The routes over an engine."""

    def __init__(
        self, engine: Engine, settings: Settings, limits: Limits, worker: Worker, prefills: Prefills | None = None
    ) -> None:
        self._engine, self._settings, self._created = engine, settings, int(time.time())
        self._receiver = Receiver(engine, limits)
        self._worker, self._checks = worker, GrammarChecks(worker)
        self._handoffs = Handoffs(engine, settings, self._receiver, self._checks, prefills)

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
            Route("/v1/chat/completions", partial(self.chat, ChatBody, ChatAnswers), methods=["POST"]),
            Route("/v1/responses", partial(self.chat, ResponsesBody, ResponsesReply), methods=["POST"]),
            Route("/v1/messages", partial(self.chat, MessagesBody, MessagesReply), methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/kv/connect", self._handoffs.connect, methods=["POST"]),
            Route("/kv/prefill", self._handoffs.prefill, methods=["POST"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={ApiError: self._refuse, HTTPException: self._refuse, Exception: self._refuse},
        )
        app.router.redirect_slashes = False  # A redirect would name the host that the client has made up.
        return guarded(app, self._settings)

    async def health(self, request: Request) -> Response:
        """Return 200 while every rank takes part in steps and new requests are taken."""
        return Response(status_code=200 if self._engine.is_healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the measurements."""
        return Response(generate_latest(self._engine.metrics.registry), media_type="text/plain; version=0.0.4")

    async def version(self, request: Request) -> Response:
        """Return the version of this package."""
        return JSONResponse({"version": metadata.version("dcpmla")})

    async def models(self, request: Request) -> Response:
        """Return a list of the one model, under each of its names."""
        return JSONResponse({"object": "list", "data": [*map(self._model_card, self._settings.names)]})

    async def model(self, request: Request) -> Response:
        """Return the model, if it has the name."""
        name = request.path_params["name"]
        self._texts(name)
        return JSONResponse(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "dcpmla"}
        return {**card, "max_model_len": self._engine.ready().model.max_model_len}

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        async with self._receiver.body(request, CompletionBody) as body:
            answers, params = await under(request, self._completion(body))
        num_kept_characters = sum(len(prompt.text) for prompt in answers.prompts) if body.echo else 0
        return await self._answer(request, body, answers, params, num_kept_characters)

    async def _completion(self, body: CompletionBody) -> tuple[Answers, SamplingParams]:
        """Return the form of the answers to a body, and the parameters of its requests."""
        texts, longest = self._texts(body.model), self._engine.ready().model.max_model_len
        limit = body.limit(longest, "")
        num_new, echo = max(1, _NUM_NEW if limit is None else limit), bool(body.echo)
        adds_special, num_kept = body.add_special_tokens is not False, body.num_kept_tokens(longest, num_new)
        prompt_logprobs = [num for num in (body.logprobs if echo else None, body.prompt_logprobs) if num is not None]
        params = body.params(num_new, body.logprobs, max(prompt_logprobs, default=None))
        self._engine.check_room(len(body.prompts) * body.num_choices, num_counted=1)
        await check_params(params, body.grammar_source, self._engine.ready().model, self._checks)
        prompts = [await texts.prompt(prompt, echo, adds_special, num_kept) for prompt in body.prompts]
        body.prompt = ""  # The answer may take minutes.
        return Answers(body, texts, self._settings.name, prompts), params

    async def chat(self, kind: type[Chat], reply: MakeReply[Chat], request: Request) -> Response:
        """Continue a conversation in the shape of any route."""
        async with self._receiver.body(request, kind) as body:
            answer, params = await under(request, self._conversation(body, reply))
        return await self._answer(request, body, answer, params)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation of Anthropic's messages."""
        async with self._receiver.body(request, CountBody) as body:
            self._texts(body.model)
            tokens = await under(request, self._chats.tokens(body.conversation()))
        return JSONResponse({"input_tokens": len(tokens)})

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        async with self._receiver.body(request, TokenizeBody) as body:
            tokens = (await under(request, self._tokens(body))).tolist()
        longest = self._engine.ready().model.max_model_len
        return WholeAnswer({"count": len(tokens), "max_model_len": longest, "tokens": tokens})

    async def _tokens(self, body: TokenizeBody) -> "array[int]":
        texts, adds_special = self._texts(body.model), bool(body.add_special_tokens)
        if body.messages is None:
            return await texts.encode([body.prompt or ""], body.add_special_tokens is not False)
        return await self._chats.tokens(body.conversation_of(body.messages), adds_special)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        async with self._receiver.body(request, DetokenizeBody) as body:
            text = await under(request, self._texts(body.model).decode(body.tokens))
        return WholeAnswer({"prompt": text})

    def _texts(self, name: str | None) -> Texts:
        """Return the tokenizer of the model that a client names, or of the one there is."""
        self._engine.ready()
        if name is not None and name not in self._settings.names:
            words = f"the model {name!r} does not exist; this is {self._settings.name!r}"
            raise ApiError(404, words, param="model", code="model_not_found")
        return Texts(self._background)

    async def _conversation(self, body: Chat, reply: MakeReply[Chat]) -> tuple[Reply, SamplingParams]:
        """Return the form of the answer to a body of any route, and the parameters of its requests."""
        texts, chats, sampling = self._texts(body.model), self._chats, body.sampling
        longest = self._engine.ready().model.max_model_len
        limit = sampling.limit(longest, body.limit_name)
        num_kept = sampling.num_kept_tokens(longest, limit or 1)
        conversation = body.conversation()
        prompts = [await chats.prompt(conversation, body.adds_special_tokens, num_kept)]
        if not limit:
            limit = longest - len(prompts[0].token_ids)
            if body.num_logprobs is not None and not body.stream:  # The default is what an answer may have.
                limit = max(1, min(limit, MAX_ENTRIES // (sampling.num_choices * (1 + body.num_logprobs))))
        params = sampling.params(limit, body.num_logprobs, sampling.prompt_logprobs)
        skips = params.skip_special_tokens
        readers = [chats.reader(conversation, prompts[0], skips) for _ in range(sampling.num_choices)]
        grammar = await chats.grammars.grammar(conversation.tool_use, prompts[0], *body.asked_grammar())
        if grammar is not None:
            if params.ignore_eos:
                words = "is true; an answer with required or strict calls ends where its grammar does"
                raise wrong("ignore_eos", words)
            params = replace(params, grammar=grammar)
        if chats.has_format:
            params = replace(params, skip_special_tokens=False)
        await check_params(params, sampling.grammar_source, self._engine.ready().model, self._checks)
        return reply(body, texts, self._settings.name, prompts, readers), params

    @cached_property
    def _background(self) -> Background:
        """Return where what clients send is worked on."""
        return Background(self._engine.ready(), self._worker)

    @cached_property
    def _chats(self) -> Chats:
        """Return the form of the model's conversations."""
        settings, prepared = self._settings, self._engine.ready()
        formats = settings.tool_call_parser, settings.reasoning_parser
        variables = settings.default_chat_template_kwargs or {}
        return Chats(prepared, settings.template, *formats, variables, self._background, self._checks)

    async def _answer(
        self,
        request: Request,
        body: CompletionBody | ChatRequest,
        reply: Reply,
        params: SamplingParams,
        num_kept_characters: int = 0,
    ) -> Response:
        """Submit prompts, and send the answer.

        Args:
            num_kept_characters: Characters of the prompts that are kept for the answer.
        """
        longest, num_new = self._engine.ready().model.max_model_len, 0
        lengths = [len(prompt.token_ids) for prompt in reply.prompts]
        if not body.stream:
            num_new = sum(max(0, min(params.max_new_tokens, longest - length)) for length in lengths)
        num_entries = check_entries(
            sum(lengths) * reply.num_choices, params.prompt_logprobs, num_new * reply.num_choices, params.logprobs
        )
        salt = body.cache_salt or ""
        move = self._handoffs.move(body.sampling.kv_transfer_params, reply.prompts, reply.num_choices, salt)
        ending = self._handoffs.ending(reply.prompts[0].token_ids, move, request.url, salt)
        generation = self._engine.submit(
            [prompt.token_ids for prompt in reply.prompts],
            params.for_prompt(0) if move.handoff else params,
            self._settings.request_timeout,
            num_choices=reply.num_choices,
            cache_salt=salt,
            num_characters=num_kept_characters + num_entries,
            move=move,
        )
        request.state.generation = generation
        reply.drop_prompts()
        room, asked = longest - max(lengths), body.sampling.token_limit
        headers = [] if asked is None or asked <= room else [(b"dcpmla-max-tokens", str(room).encode())]
        if body.stream:
            return EventStream(generation, events(generation, reply, ending), headers)
        with generation:
            value = await under(request, collect(generation, reply, ending))
        return WholeAnswer(value, headers)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        match error:
            case ApiError():
                found = error
            case HTTPException():
                found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
            case _:
                found = ApiError(500, "the server has made a mistake; its log says more")
        self._engine.metrics.count("refused_requests", str(found.status))
        return found.response(request.url.path)
