"""The field of a body that a router fills in: `kv_transfer_params`.

Source: the convention of vLLM's NIXL connector, which its proxies and llm-d's follow.
"""

import hmac
import json
from typing import Annotated

from pydantic import StringConstraints

from dcpmla.serving.refused import Fields

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class KvTransferParams(Fields):
    """A router's question to a prefill server, and its answer on the way to a decode server. Other names are ignored.

    Attributes:
        do_remote_decode: Whether another server decodes, so that this one keeps the prompt's blocks for it.
        do_remote_prefill: Whether another server has prefilled the prompt.
        remote_engine_id, remote_request_id: Name of the prefill server's job, and of the transfer.
        first_token: JSON of the first token, with its log probabilities (`token_json`).
        proof: The prefill server's proof of all these for this prompt and salt (`proof_of`).
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    first_token: str | None = None
    proof: str | None = None


def proof_of(secret: str, handoff: str, first_token: str, prompt: str) -> str:
    """Return the proof that a prefill server has computed a prompt, which no client can write.

    Args:
        secret: Secret of the prefill server, which it gives to decode servers that connect.
        handoff: Name of the transfer.
        first_token: JSON of the first token.
        prompt: Digest of the prompt and its salt (`prompt_digest`).
    """
    content = json.dumps([handoff, first_token, prompt]).encode()
    return hmac.new(secret.encode(), content, "sha256").hexdigest()
