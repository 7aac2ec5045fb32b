"""Access to the server: the API key, and web pages of other origins."""

import hmac
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dcpmla.serving.errors import ApiError

_OPEN = ("/health", "/ping")


def guarded(app: ASGIApp, api_key: str | None, allowed_origins: Sequence[str]) -> ASGIApp:
    """Return an application that requires the key, None for no key, and sends answers to web pages of allowed origins.

    A browser's preflight request has no key and needs none.
    """
    if api_key is not None:
        app = _with_key(app, api_key.encode())
    return CORSMiddleware(app, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])


def _with_key(app: ASGIApp, key: bytes) -> ASGIApp:
    """Return an application that asks for the API key, except on routes of a server's health.

    Clients of OpenAI's API give it as a bearer, those of Anthropic's in a header of its own.
    """
    error = ApiError(401, "give the server's API key: Authorization: Bearer KEY, or x-api-key", code="invalid_api_key")
    expected = ((b"authorization", b"Bearer " + key), (b"x-api-key", key))

    async def check_key(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", []))
        has_key = any(hmac.compare_digest(headers.get(name, b""), value) for name, value in expected)
        is_allowed = scope["type"] != "http" or scope["path"] in _OPEN or has_key
        await (app if is_allowed else error.response(scope["path"]))(scope, receive, send)

    return check_key
