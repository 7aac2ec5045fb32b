"""Requests that a router sends to a prefill server, and then to a decode server (`Router`)."""

import json
from collections.abc import Sequence
from hmac import compare_digest
from uuid import uuid4

import msgspec
from starlette.datastructures import URL

from dcpmla.runtime.handoffs import prompt_digest
from dcpmla.runtime.request import TokenLogprobs
from dcpmla.serving.client import Engine
from dcpmla.serving.errors import ApiError
from dcpmla.serving.handoffs import token_json
from dcpmla.serving.messages import STAYS, Move, Output
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.replies import Ending
from dcpmla.serving.settings import Settings
from dcpmla.serving.shown import Json
from dcpmla.serving.transfer_fields import KvTransferParams, proof_of

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
