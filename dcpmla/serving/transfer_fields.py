"""The field of a body that a router fills in: `kv_transfer_params`.

Source: the convention of vLLM's NIXL connector, which its proxies and llm-d's follow.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class KvTransferParams(BaseModel):
    """A router's question to a prefill server, and its answer on the way to a decode server. Other names are ignored.

    Attributes:
        do_remote_decode: Whether another server decodes, so that this one keeps the prompt's blocks for it.
        do_remote_prefill: Whether another server has prefilled the prompt.
        remote_engine_id, remote_request_id: Name of the prefill server's job, and of the transfer.
        first_token: The first token, with its log probabilities (`token_of`).
        prompt_digest: Digest of the prompt's tokens.
    """

    model_config = ConfigDict(strict=True)
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    first_token: list[Any] | None = None
    prompt_digest: str | None = None
