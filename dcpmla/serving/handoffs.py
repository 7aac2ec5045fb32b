"""The prefill server's routes for decode servers: `/kv/connect` and `/kv/prefill`."""

from collections import OrderedDict
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.answers import in_json
from dcpmla.serving.client import Engine
from dcpmla.serving.errors import ApiError
from dcpmla.serving.handoff_commands import peer_of
from dcpmla.serving.messages import Output
from dcpmla.serving.protocol import CacheSalt, TokenIds
from dcpmla.serving.receive import Receiver
from dcpmla.serving.replies import while_connected
from dcpmla.serving.settings import Settings
from dcpmla.serving.transfer_fields import Name
from dcpmla.serving.transfer_messages import Connect, Disconnect, Move

_MOST_PEERS = 64  # decode servers; the least recently used one is dropped


class ConnectBody(BaseModel):
    """A body of /kv/connect: the decode server (`Connect`)."""

    model_config = ConfigDict(strict=True)
    engine: Name
    layout: dict[str, Any]
    agents: list[str]


class PrefillBody(BaseModel):
    """A body of /kv/prefill.

    Attributes:
        handoff: Name of the transfer, which was never used before.
        engine: Name of the decode server.
        params: Fields of `SamplingParams`, with the request's own seed.
    """

    model_config = ConfigDict(strict=True)
    handoff: Name
    engine: Name
    prompt_token_ids: TokenIds
    params: dict[str, Any]
    cache_salt: CacheSalt | None = None


class HandoffRoutes:
    """The routes of a prefill server, over an engine."""

    def __init__(self, engine: Engine, settings: Settings, receiver: Receiver) -> None:
        self._engine, self._settings, self._receiver = engine, settings, receiver
        self._peers: OrderedDict[str, None] = OrderedDict()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/kv/connect", self.connect, methods=["POST"]),
            Route("/kv/prefill", self.prefill, methods=["POST"]),
        ]

    async def connect(self, request: Request) -> Response:
        """Connect to a decode server, whose cache must have the same rows; return this server's own message."""
        link = self._link()
        async with self._receiver.body(request, ConnectBody) as body:
            command = Connect(body.engine, body.layout, body.agents)
        try:
            other = peer_of(command)
            peer_of(link).layout.check_matches(other.layout)
            if len(other.agents) != other.layout.tp_size:
                raise ValueError(f"agents are {len(other.agents)}, of {other.layout.tp_size} ranks")
        except ValueError as error:
            raise ApiError(409, str(error), code="other_cache") from error
        if body.engine not in self._peers:
            self._peers[body.engine] = None
            self._engine.outbox.send(command)
            if len(self._peers) > _MOST_PEERS:
                self._engine.outbox.send(Disconnect(self._peers.popitem(last=False)[0]))
        return JSONResponse(vars(link))

    async def prefill(self, request: Request) -> Response:
        """Compute a prompt, whose blocks the decode server reads meanwhile; return its first token."""
        self._link()
        self._engine.check_room(1)
        async with self._receiver.body(request, PrefillBody) as body:
            if body.engine not in self._peers:
                raise ApiError(409, f"engine {body.engine} is not connected; use /kv/connect", code="not_connected")
            self._peers.move_to_end(body.engine)
            prompt, body.prompt_token_ids = body.prompt_token_ids, []
        try:
            params = SamplingParams.from_dict(body.params, SamplingParams())
            params.check_vocabulary(self._engine.ready().vocab_size)
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"params: {error}", param="params") from error
        seconds, salt = self._settings.request_timeout, body.cache_salt or ""
        move = Move(handoff=body.handoff)
        generation = self._engine.submit([prompt], params, seconds, cache_salt=salt, move=move)
        del prompt
        with generation:
            output = await while_connected(request.receive, _first(generation.outputs()))
        if output is None:
            return Response(status_code=499)
        return JSONResponse({"token": token_json(output), "num_cached_tokens": output.num_cached_tokens})

    def _link(self) -> Connect:
        link = self._engine.ready().link
        if self._settings.role != "prefill" or link is None:
            raise ApiError(404, f"this server's role (--role) is {self._settings.role}; give it prefill")
        return link


async def _first(outputs: Any) -> Output:
    """Return the only output of a request with one new token."""
    parts = [output async for _, output in outputs]
    return parts[-1]


def token_json(output: Output) -> list[Any]:
    """Return the JSON of an output's first token (`token_of`)."""
    if not output.logprobs:
        return [output.token_ids[0], None, []]
    token_id, logprob, top = output.logprobs[0]
    return [token_id, in_json(logprob or 0.0), [[each, in_json(number)] for each, number in top]]
