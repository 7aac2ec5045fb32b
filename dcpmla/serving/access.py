"""Access to the server: the keys of clients and of other servers, and web pages of other origins."""

import hmac
from collections.abc import Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dcpmla.serving.errors import ApiError
from dcpmla.serving.settings import Settings

OPEN_ROUTES = ("/health", "/ping")
_OF_SERVERS = "/kv/"
# Names of the keys in errors, and the errors' codes.
_API_KEY = "the server's API key", "invalid_api_key"
_OF_SERVERS_KEY = "the key of servers (--transfer-key)", "invalid_transfer_key"


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return an application that requires the keys, and sends answers to web pages of allowed origins.

    A browser's preflight request has no key and needs none. `has_key` of a request's state says whether its client has
    shown a key.
    """

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", []))
        key = _key(scope["path"], settings)
        refused = _page_error(headers, settings) or _key_error(scope, headers, key)
        scope.setdefault("state", {})["has_key"] = key is not None and refused is None
        await (app if refused is None else refused.response(scope["path"]))(scope, receive, send)

    return CORSMiddleware(check, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])


def _page_error(headers: Mapping[bytes, bytes], settings: Settings) -> ApiError | None:
    """Return the error of a request by a web page, as the headers that browsers send show it.

    Without a key, pages of other origins are refused, and so are requests for hosts that `settings.own_names` does not
    have: a page's own name may lead here, too.
    """
    if settings.api_key is not None or "*" in settings.origins:
        return None
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    name = host.rpartition(b":")[0] if host.rpartition(b":")[2].isdigit() else host
    if origin is not None and origin not in {each.encode() for each in settings.origins}:
        return ApiError(403, "web pages of this origin may not use the server (--allowed-origins)")
    if settings.own_names and name and name.lower() not in {each.encode() for each in settings.own_names}:
        return ApiError(403, "give the server a key (--api-key), or call it by a name of its own host (--host)")
    return None


def _key(path: str, settings: Settings) -> str | None:
    """Return the key of a path: on the routes for other servers the key of servers, on all others but the routes of a
    server's health the API key. None is no key.
    """
    if path in OPEN_ROUTES:
        return None
    return settings.server_key if path.startswith(_OF_SERVERS) else settings.api_key


def _key_error(scope: Scope, headers: Mapping[bytes, bytes], key: str | None) -> ApiError | None:
    """Return the error of a request without its key.

    Clients of OpenAI's API and servers give it as a bearer, clients of Anthropic's in a header of its own.
    """
    if key is None:
        return None
    expected = ((b"authorization", b"Bearer " + key.encode()), (b"x-api-key", key.encode()))
    if any([hmac.compare_digest(headers.get(name, b""), value) for name, value in expected]):
        return None
    name, code = _OF_SERVERS_KEY if scope["path"].startswith(_OF_SERVERS) else _API_KEY
    return ApiError(401, f"give {name}: Authorization: Bearer KEY, or x-api-key", code=code)
