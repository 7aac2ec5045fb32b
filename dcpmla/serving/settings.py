"""The user's choices for the HTTP process."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The user's choices.

    Attributes:
        name: Name of the model.
        api_key: Key that every route except /health and /ping requires, None for no key.
        request_timeout: Maximum duration of one request, in seconds.
        allowed_origins: Origins whose web pages may use the server; "*" is any.
        chat_template: Template in place of the model's, None for that.
        tool_call_parser: Name of the format of tool calls, None for the model's.
        reasoning_parser: Name of the format of reasoning, None for the model's.
        role: Part of the work: "prefill" computes prompts for other servers, "decode" what follows them, "both" all.
        prefill_servers: URLs of the servers that prefill for a decode server.
        transfer_key: Key that prefill and decode servers have in common, and clients have not; None for no key.
        hosts: Names in lower case by which clients without a key may call the server; empty for any.
    """

    name: str
    api_key: str | None
    request_timeout: float
    allowed_origins: Sequence[str] = ()
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    role: str = "both"
    prefill_servers: Sequence[str] = ()
    transfer_key: str | None = None
    hosts: Sequence[str] = ()

    @property
    def server_key(self) -> str | None:
        """Return the key by which prefill and decode servers know each other, None for no key."""
        return self.api_key if self.transfer_key is None else self.transfer_key
