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
        app = _Guard(app, api_key)
    return CORSMiddleware(app, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])


class _Guard:
    """A wrapper that asks for the API key, except on routes of a server's health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "http" and scope["path"] not in _OPEN and not hmac.compare_digest(key, self._expected):
            error = ApiError(401, "give the server's API key: Authorization: Bearer KEY", code="invalid_api_key")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
