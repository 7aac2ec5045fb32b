"""Access to the server: the keys of clients and of other servers, and web pages of other origins."""

import hmac

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dcpmla.serving.errors import ApiError
from dcpmla.serving.settings import Settings

_OPEN = ("/health", "/ping")
_OF_SERVERS = "/kv/"


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return an application that requires the keys, and sends answers to web pages of allowed origins.

    A browser's preflight request has no key and needs none.
    """
    app = _with_keys(app, settings.api_key, settings.server_key)
    return CORSMiddleware(app, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])


def _with_keys(app: ASGIApp, api_key: str | None, server_key: str | None) -> ASGIApp:
    """Return an application that asks for a key, except on routes of a server's health: on the routes for other servers
    for the key of servers, on all others for the API key. None is no key.

    Clients of OpenAI's API and servers give it as a bearer, clients of Anthropic's in a header of its own.
    """
    words = "Authorization: Bearer KEY, or x-api-key"
    refused = ApiError(401, f"give the server's API key: {words}", code="invalid_api_key")
    stranger = ApiError(401, f"give the key of servers (--transfer-key): {words}", code="invalid_transfer_key")

    async def check_key(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in _OPEN
        is_of_servers = not is_open and scope["path"].startswith(_OF_SERVERS)
        key, error = (server_key, stranger) if is_of_servers else (api_key, refused)
        is_allowed = is_open or key is None or _has_key(scope, key.encode())
        await (app if is_allowed else error.response(scope["path"]))(scope, receive, send)

    return check_key


def _has_key(scope: Scope, key: bytes) -> bool:
    """Return whether a request has a key."""
    headers = dict(scope.get("headers", []))
    expected = ((b"authorization", b"Bearer " + key), (b"x-api-key", key))
    return any([hmac.compare_digest(headers.get(name, b""), value) for name, value in expected])
