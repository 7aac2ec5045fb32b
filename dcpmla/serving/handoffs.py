"""A server's part in moves of prompts to and from other servers: the prefill server's routes `/kv/connect` and
`/kv/prefill` for decode servers, and the requests that a router sends to a prefill server, then to a decode server.
"""

import json
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from hmac import compare_digest
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dcpmla.runtime.handoffs import prompt_digest
from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.answers import in_json
from dcpmla.serving.client import Engine
from dcpmla.serving.engine_limits import check_params
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import STAYS, Connect, Disconnect, Move, Output
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.prompts import Prompt, check_tokens
from dcpmla.serving.protocol import CacheSalt, TokenIds
from dcpmla.serving.receive import Receiver
from dcpmla.serving.replies import Ending, under
from dcpmla.serving.settings import Settings
from dcpmla.serving.shown import Json
from dcpmla.serving.structured import GrammarChecks
from dcpmla.serving.transfer_fields import KvTransferParams, Name, proof_of

_FIELD = "kv_transfer_params"
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


class Handoffs:
    """The moves of prompts to and from the engine of a server.

    Args:
        prefills: Prefill servers of a decode server; None for other roles.
    """

    def __init__(
        self, engine: Engine, settings: Settings, receiver: Receiver, checks: GrammarChecks, prefills: Prefills | None
    ) -> None:
        self._engine, self._settings, self._receiver, self._checks = engine, settings, receiver, checks
        self._prefills, self._secret = prefills, secrets.token_hex()  # the secret of this server's proofs (`proof_of`)
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
            request.state.generation = generation
            body.prompt_token_ids = []  # The answer may take minutes.
            output = await under(request, _first(stack.enter_context(generation).outputs()))
        return JSONResponse({"token": token_json(output), "num_cached_tokens": output.num_cached_tokens})

    async def _params(self, body: PrefillBody) -> SamplingParams:
        """Return the parameters of a body, once they and its prompt have passed the checks that all routes make."""
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

    def move(
        self, fields: KvTransferParams | None, prompts: Sequence[Prompt], num_choices: int, cache_salt: str
    ) -> Move:
        """Return the part of prompts in a transfer; none where there are several, or several choices, or where the
        prefill server has not computed this prompt with this salt.

        Raises:
            ApiError: This server does not take part in such transfers, or the other one is none of its own.
        """
        if fields is None or not (fields.do_remote_decode or fields.do_remote_prefill):
            return STAYS
        is_one = len(prompts) * num_choices == 1
        if fields.do_remote_decode:
            self._check_role("do_remote_decode", "prefill")
            return Move(handoff=uuid4().hex) if is_one else STAYS
        self._check_role("do_remote_prefill", "decode")
        engine, handoff = fields.remote_engine_id, fields.remote_request_id
        first, proof = fields.first_token, fields.proof
        if engine is None or handoff is None or first is None or proof is None:
            words = "needs remote_engine_id, remote_request_id, first_token and proof, as the prefill server gave them"
            raise ApiError(400, f"{_FIELD} with do_remote_prefill {words}", param=_FIELD)
        secret = None if self._prefills is None else self._prefills.secret_of(engine)
        if secret is None:
            words = "which is no engine of a connected server of prefill_servers (--prefill-servers)"
            raise ApiError(400, f"{_FIELD}.remote_engine_id is {engine!r}, {words}", param=_FIELD)
        if not is_one:
            return STAYS
        expected = proof_of(secret, handoff, first, prompt_digest(prompts[0].token_ids, cache_salt))
        if not compare_digest(expected.encode(), proof.encode()):
            return STAYS
        return Move(source=(engine, handoff), first=msgspec.json.decode(first, type=TokenLogprobs))

    def ending(self, prompt: Sequence[int], move: Move, url: URL, cache_salt: str) -> Ending | None:
        """Return the function of what the decode server needs besides an answer, if its blocks are handed over.

        Args:
            prompt: Token ids of the answer's only prompt.
            url: URL of the request.
        """
        link = self._engine.link
        if not move.handoff or link is None:
            return None
        digest = prompt_digest(prompt, cache_salt)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": link.engine,
            "remote_request_id": move.handoff,
            "remote_host": url.hostname,
            "remote_port": url.port,
            "remote_block_ids": [],
            "tp_size": link.layout.tp_size,
        }

        def fields(output: Output) -> Json:
            first = json.dumps(token_json(output))
            proof = proof_of(self._secret, move.handoff, first, digest)
            return {_FIELD: {**params, "first_token": first, "proof": proof}}

        return fields

    def _check_role(self, field: str, role: str) -> None:
        if self._settings.role != role:
            words = f"this server's role (--role) is {self._settings.role}; send it to one with {role}"
            raise ApiError(400, f"{_FIELD}.{field} is true, and {words}", param=_FIELD)

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
