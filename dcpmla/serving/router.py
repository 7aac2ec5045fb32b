"""Requests that a router sends to a prefill server, and then to a decode server (`Router`)."""

import json
from collections.abc import Callable, Sequence
from hmac import compare_digest
from uuid import uuid4

from starlette.datastructures import URL

from dcpmla.runtime.handoffs import prompt_digest
from dcpmla.serving.client import Engine
from dcpmla.serving.errors import ApiError
from dcpmla.serving.handoffs import token_json
from dcpmla.serving.messages import Output
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.replies import Reply
from dcpmla.serving.settings import Settings
from dcpmla.serving.shown import Json
from dcpmla.serving.transfer_fields import KvTransferParams, proof_of
from dcpmla.serving.transfer_messages import STAYS, Move, token_of

_FIELD = "kv_transfer_params"


class Router:
    """The server's part in a router's requests.

    Args:
        prefills: Prefill servers of a decode server; None for other roles.
        secret: Secret of this server's proofs.
    """

    def __init__(self, engine: Engine, settings: Settings, prefills: Prefills | None, secret: str) -> None:
        self._engine, self._settings, self._prefills, self._secret = engine, settings, prefills, secret

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
        return Move(source=(engine, handoff), first=token_of(json.loads(first)))

    def handed_over(self, reply: Reply, move: Move, url: URL, cache_salt: str) -> Reply:
        """Return an answer that also has what the decode server needs, if its blocks are handed over."""
        link = self._engine.ready().link
        if not move.handoff or link is None:
            return reply
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": link.engine,
            "remote_request_id": move.handoff,
            "remote_host": url.hostname,
            "remote_port": url.port,
            "remote_block_ids": [],
            "tp_size": link.layout["tp_size"],
        }
        digest = prompt_digest(reply.prompts[0].token_ids, cache_salt)
        return _HandedOver(reply, params, lambda first: proof_of(self._secret, move.handoff, first, digest))

    def _check_role(self, field: str, role: str) -> None:
        if self._settings.role != role:
            words = f"this server's role (--role) is {self._settings.role}; send it to one with {role}"
            raise ApiError(400, f"{_FIELD}.{field} is true, and {words}", param=_FIELD)


class _HandedOver:
    """An answer with `kv_transfer_params`, of a stream in the chunk that ends it.

    Args:
        prove: Function that returns the proof of the JSON of the first token.
    """

    def __init__(self, reply: Reply, params: Json, prove: Callable[[str], str]) -> None:
        self._reply, self._params, self._prove = reply, params, prove
        self.prompts, self.num_choices, self.ending = reply.prompts, reply.num_choices, reply.ending

    def drop_prompts(self) -> None:
        self._reply.drop_prompts()

    def add(self, index: int, output: Output) -> None:
        self._reply.add(index, output)
        if output.finish_reason:
            self._params |= self._after(output)[_FIELD]

    def whole(self) -> Json:
        return self._reply.whole() | {_FIELD: self._params}

    def first_chunks(self) -> list[Json]:
        return self._reply.first_chunks()

    def chunks(self, index: int, output: Output) -> list[Json]:
        chunks = self._reply.chunks(index, output)
        return [*chunks[:-1], chunks[-1] | self._after(output)] if output.finish_reason else chunks

    def last_chunks(self) -> list[Json]:
        return self._reply.last_chunks()

    def error(self, error: ApiError) -> Json:
        return self._reply.error(error)

    def _after(self, output: Output) -> Json:
        """Return the field of an answer that has its token."""
        first = json.dumps(token_json(output))
        return {_FIELD: {**self._params, "first_token": first, "proof": self._prove(first)}}
