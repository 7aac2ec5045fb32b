"""The prefill server's routes for decode servers: `/kv/connect` and `/kv/prefill`."""

import logging
from collections import Counter, OrderedDict
from contextlib import ExitStack
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.answers import in_json
from dcpmla.serving.client import Engine
from dcpmla.serving.engine_limits import check_params
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Connect, Disconnect, Move, Output
from dcpmla.serving.prompts import check_tokens
from dcpmla.serving.protocol import CacheSalt, TokenIds
from dcpmla.serving.receive import Receiver
from dcpmla.serving.replies import under
from dcpmla.serving.settings import Settings
from dcpmla.serving.structured import GrammarChecks
from dcpmla.serving.transfer_fields import Name

_MOST_PEERS = 64  # decode servers
_MOST_AGENTS = 4096
_AGENT_CHARACTERS = 1 << 20
_MOST_LOGGED, _MOST_CHARACTERS = 100, 500  # reasons for which decode servers do not connect
_logger = logging.getLogger(__name__)


class ConnectBody(BaseModel):
    """A body of /kv/connect: the decode server (`Connect`)."""

    model_config = ConfigDict(strict=True)
    engine: Name
    layout: dict[str, Any]
    agents: Annotated[
        list[Annotated[str, StringConstraints(max_length=_AGENT_CHARACTERS)]],
        Field(max_length=_MOST_AGENTS, fail_fast=True),
    ]


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
    """The routes of a prefill server, over an engine.

    Args:
        secret: Secret of this server's proofs, for decode servers that connect (`proof_of`).
    """

    def __init__(
        self, engine: Engine, settings: Settings, receiver: Receiver, checks: GrammarChecks, secret: str
    ) -> None:
        self._engine, self._settings, self._receiver, self._checks = engine, settings, receiver, checks
        self._secret = secret
        self._peers: OrderedDict[str, bool] = OrderedDict()  # whether they had prompts; the latest one is last
        self._num_open = Counter[str]()  # prompts of each peer that are being computed
        self._logged: set[str] = set()

    async def connect(self, request: Request) -> Response:
        """Connect to a decode server, whose cache must have the same rows; return this server's own message."""
        link = self._link()
        async with self._receiver.body(request, ConnectBody) as body:
            content = vars(body)
        try:
            other = Connect.of(content)
            link.layout.check_matches(other.layout)
            if len(other.agents) != other.layout.tp_size:
                raise ValueError(f"agents are {len(other.agents)}, of {other.layout.tp_size} ranks")
        except ValueError as error:
            self._log(str(error)[:_MOST_CHARACTERS])
            words = "this server's cache is another one, or the body is wrong; the log of this server says more"
            raise ApiError(409, words, code="other_cache") from None
        if body.engine not in self._peers:
            self._make_room()
            self._peers[body.engine] = False
            self._engine.outbox.send(other)
        return JSONResponse({**link.json_fields(), "secret": self._secret})

    def _make_room(self) -> None:
        """Drop a peer without transfers if there are too many: one that had no prompt, else the least recently used.

        Raises:
            ApiError: All have transfers.
        """
        if len(self._peers) < _MOST_PEERS:
            return
        in_use = {*self._engine.readers, *+self._num_open}
        idle = [peer for peer in self._peers if peer not in in_use]
        if not idle:
            words = f"{_MOST_PEERS} decode servers exchange blocks with this one; try again later"
            raise ApiError(503, words, code="overloaded", headers={"Retry-After": "1"})
        dropped = min(idle, key=self._peers.__getitem__)
        del self._peers[dropped], self._num_open[dropped]
        self._engine.outbox.send(Disconnect(dropped))

    async def prefill(self, request: Request) -> Response:
        """Compute a prompt, whose blocks the decode server reads meanwhile; return its first token."""
        self._link()
        with ExitStack() as stack:
            async with self._receiver.body(request, PrefillBody) as body:
                if body.engine not in self._peers:
                    raise ApiError(409, f"engine {body.engine} is not connected; use /kv/connect", code="not_connected")
                self._peers[body.engine] = True
                self._peers.move_to_end(body.engine)
                self._num_open[body.engine] += 1
                stack.callback(self._num_open.subtract, [body.engine])
                params = await under(request, self._params(body))
            seconds, salt = self._settings.request_timeout, body.cache_salt or ""
            move = Move(handoff=body.handoff, reader=body.engine)
            generation = self._engine.submit([body.prompt_token_ids], params, seconds, cache_salt=salt, move=move)
            body.prompt_token_ids = []  # The answer may take minutes.
            output = await under(request, _first(stack.enter_context(generation).outputs()))
        return JSONResponse({"token": token_json(output), "num_cached_tokens": output.num_cached_tokens})

    async def _params(self, body: PrefillBody) -> SamplingParams:
        """Return the parameters of a body, after the checks of them and of its prompt that all routes have."""
        model = self._engine.ready().model
        check_tokens(model, body.prompt_token_ids)
        try:
            params = SamplingParams.from_dict(body.params, SamplingParams())
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"params: {error}", param="params") from error
        await check_params(params, "params.grammar", model, self._checks)
        return params

    def _link(self) -> Connect:
        link = self._engine.ready().model.link
        if self._settings.role != "prefill" or link is None:
            raise ApiError(404, f"this server's role (--role) is {self._settings.role}; give it prefill")
        return link

    def _log(self, reason: str) -> None:
        """Log once why a decode server does not connect, which asks again every few seconds."""
        if reason not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(reason)
            _logger.warning("a decode server does not connect: %r", reason)


async def _first(outputs: Any) -> Output:
    """Return the only output of a request with one new token."""
    parts = [output async for _, output in outputs]
    return parts[-1]


def token_json(output: Output) -> list[Any]:
    """Return the JSON of an output's first token, which is a `TokenLogprobs`."""
    if not output.logprobs:
        return [output.token_ids[0], None, []]
    token_id, logprob, top = output.logprobs[0]
    return [token_id, in_json(logprob or 0.0), [[each, in_json(number)] for each, number in top]]
