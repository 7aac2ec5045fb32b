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

    A browser's preflight request has no key and needs none. Without a key, pages of other origins are refused, and
    so are requests for hosts that `settings.own_names` does not have: a page's own name may lead here, too.
    """
    app = _with_keys(app, settings.api_key, settings.server_key)
    if settings.api_key is None and "*" not in settings.origins:
        app = _without_pages(app, settings)
    return CORSMiddleware(app, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])


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


def _without_pages(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return an application that refuses web pages of other origins, by the headers that browsers send."""
    origins = {origin.encode() for origin in settings.origins}
    hosts = {name.encode() for name in settings.own_names}

    async def check_page(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", []))
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        name = host.rpartition(b":")[0] if host.rpartition(b":")[2].isdigit() else host
        refused = None
        if origin is not None and origin not in origins:
            refused = ApiError(403, "web pages of this origin may not use the server (--allowed-origins)")
        elif hosts and name and name.lower() not in hosts:
            words = "give the server a key (--api-key), or call it by a name of its own host (--host)"
            refused = ApiError(403, words)
        await (app if refused is None else refused.response(scope["path"]))(scope, receive, send)

    return check_page


def _has_key(scope: Scope, key: bytes) -> bool:
    """Return whether a request has a key."""
    headers = dict(scope.get("headers", []))
    expected = ((b"authorization", b"Bearer " + key), (b"x-api-key", key))
    return any([hmac.compare_digest(headers.get(name, b""), value) for name, value in expected])
