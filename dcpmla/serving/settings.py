"""The options of a server (`ServeOptions`), and what its HTTP process has besides (`Settings`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any

from dcpmla.fields import FLAG, OBJECT, TEXT, Count, Rule, instance_of, one_of, optional, tuple_of, whole
from dcpmla.integrations.transfers import ROLES
from dcpmla.serving.chat.formats import FORMATS
from dcpmla.serving.kv_events import EventsConfig
from dcpmla.serving.metric_names import METRICS_NAMES

LOG_LEVELS = ("debug", "info", "warning", "error")
_LOOPBACK = "localhost", "127.0.0.1", "[::1]"  # names in requests
_URL = re.compile(r"https?://[^/?#\s]+/?")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")
_IS_URL = Rule("a server's URL, like http://10.0.0.2:8001", lambda value: bool(_URL.fullmatch(str(value))))
_IS_ORIGIN = Rule(
    "an origin; give * or one such as https://chat.example:8443", lambda value: bool(_ORIGIN.fullmatch(str(value)))
)
_Format = Annotated[str | None, optional(one_of(tuple(FORMATS)))]
_Seconds = Annotated[int, whole(1, 7 * 24 * 3600)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of a server besides those of its model and engine.

    Attributes:
        host: Address to listen on, of the first rank's host. 0.0.0.0 listens to other machines, too: give a key then.
        port: Port to listen on; 0 is any that is free. The line `serving on http://...` shows it.
        served_model_name: Names of the model for requests, which may name none, too. Answers and metrics have the
            first; by default MODEL as it is given.
        chat_template: File of a chat template in place of the model's, on the first rank's host, or its text.
        default_chat_template_kwargs: JSON object of variables of the template, where a request does not give them.
        tool_call_parser: Format of tool calls in place of the model's, under vLLM's name.
        reasoning_parser: Format of reasoning in place of the model's, under vLLM's name.
        role: Part of the work: "prefill" computes prompts for servers with "decode" (docs/disaggregation.md); "both"
            serves alone, and registers nothing for transfers.
        prefill_servers: URLs of the servers with `--role prefill` that compute prompts for this one, with `--role
            decode`. Each is connected when it answers, and again when it has restarted.
        api_key: Key that every route but `/health` and `/ping` requires, as `Authorization: Bearer KEY` or
            `x-api-key: KEY`; by default the variable DCPMLA_API_KEY, else none. Other users of the host see options,
            but not variables.
        transfer_key: Key that servers with `--role prefill` and `--role decode` have in common, and clients have not,
            in place of the API key on `/kv/*` alone; by default the variable DCPMLA_TRANSFER_KEY, else none. It is not
            the API key. Beyond loopback addresses a server of either role does not start without it.
        allowed_origins: Origins whose web pages may use the server (CORS), such as https://chat.example; * is any, the
            default with a key. A preflight request needs no key. Without a key other pages get 403, and on a loopback
            address so does each request for another host's name, unless * is allowed.
        max_waiting: Limit of requests beyond the `--max-num-seqs` that run; more get 429 with `Retry-After`.
        request_timeout: Seconds after which a request ends with 504.
        drain_seconds: Seconds that running requests have after a SIGTERM.
        log_level: Least important lines of the log that are written. "info" has a line for each request and, while the
            server is busy, one on its load every ten seconds.
        disable_access_log: Whether the log has no line for each request.
        metrics_names: Names of the measurements in `/metrics`: "dcpmla", or "vllm" for vLLM's names and labels where it
            measures the same.
        kv_events_config: JSON object with vLLM's fields, after which the first rank publishes which prefixes its cache
            has. It needs the extra `events`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Rule("a port in [0, 65535]", whole(0, 65535).holds)] = 8000
    served_model_name: Annotated[Sequence[str], tuple_of(TEXT)] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: Annotated[Mapping[str, Any] | None, optional(OBJECT)] = None
    tool_call_parser: _Format = None
    reasoning_parser: _Format = None
    role: Annotated[str, one_of(ROLES)] = "both"
    prefill_servers: Annotated[Sequence[str], tuple_of(_IS_URL)] = ()
    api_key: str | None = None
    transfer_key: str | None = None
    allowed_origins: Annotated[Sequence[str] | None, optional(tuple_of(_IS_ORIGIN))] = None
    max_waiting: Count = 1024
    request_timeout: _Seconds = 3600
    drain_seconds: _Seconds = 25
    log_level: Annotated[str, one_of(LOG_LEVELS)] = "info"
    disable_access_log: Annotated[bool, FLAG] = False
    metrics_names: Annotated[str, one_of(METRICS_NAMES)] = "dcpmla"
    kv_events_config: Annotated[EventsConfig | None, optional(instance_of(EventsConfig))] = None

    @property
    def server_key(self) -> str | None:
        """Return the key by which prefill and decode servers know each other, None for no key."""
        return self.api_key if self.transfer_key is None else self.transfer_key

    @property
    def origins(self) -> Sequence[str]:
        """Return the origins whose web pages may use the server; "*" is any."""
        return self.allowed_origins or (() if self.api_key is None else ("*",))

    @property
    def own_names(self) -> Sequence[str]:
        """Return the names in lower case by which clients without a key may call the server; empty for any."""
        return (*_LOOPBACK, self.host.lower()) if is_loopback(self.host) else ()


@dataclass(frozen=True, kw_only=True)
class Settings(ServeOptions):
    """The options of a running server, and what follows from them and from the model's at its start.

    Attributes:
        name: Name of the model in answers.
        template: Text of the chat template in place of the model's, None for that.
    """

    name: str
    template: str | None = None

    @property
    def names(self) -> Sequence[str]:
        """Return the names by which requests may call the model."""
        return self.served_model_name or (self.name,)


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is one that other hosts do not reach. No name server is asked."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
