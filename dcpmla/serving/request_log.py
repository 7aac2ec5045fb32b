"""A line of the log for each request, after the last byte of its answer (`RequestLog`)."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcpmla.serving.access import OPEN_ROUTES
from dcpmla.serving.client import Generation
from dcpmla.serving.few_lines import FewLines

_LEFT = 499  # status of a request whose client has left before the end of its answer, as nginx has it
_FAILED = 500
_MOST_CHARACTERS = 100  # of a path
_logger = logging.getLogger(__name__)


class RequestLog:
    """An application that logs the requests to another one: method, path, status, seconds and numbers of tokens.

    Prompts, answers, keys and queries of URLs are not logged. Errors of clients that have shown no key are few lines.
    Probes of the server's health, scrapes of metrics and preflights that succeed are logged at the level debug.

    Args:
        app: Application, which sets `generation` in a request's state if there is one, and `has_key` if the client has
            shown a key.
        few: Limit of lines.
    """

    def __init__(self, app: ASGIApp, few: FewLines) -> None:
        self._app, self._few = app, few

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status, is_whole = time.monotonic(), _LEFT, False

        async def watch(message: Message) -> None:
            nonlocal status, is_whole
            status = message.get("status", status)
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status, is_whole = _FAILED, True
            raise
        finally:
            self._log(scope, status if is_whole else _LEFT, start)

    def _log(self, scope: Scope, status: int, start: float) -> None:
        state = scope.get("state", {})
        if status >= 400 and not state.get("has_key") and not self._few.admits(f"{status} to clients without a key"):
            return
        generation: Generation | None = state.get("generation")
        _logger.log(
            _level(scope, status),
            "%s %s %s %s in %.3f s%s",
            (scope.get("client") or ["-"])[0],
            scope["method"],
            ascii(scope["path"][:_MOST_CHARACTERS])[1:-1],
            status if generation is None or generation.failure is None else f"{status}, then {generation.failure}",
            time.monotonic() - start,
            "" if generation is None else _tokens(generation, start),
        )


def _level(scope: Scope, status: int) -> int:
    is_probe = scope["path"] in OPEN_ROUTES
    is_routine = scope["path"] == "/metrics" or scope["method"] == "OPTIONS"
    return logging.DEBUG if is_probe or (is_routine and status < 400) else logging.INFO


def _tokens(generation: Generation, start: float) -> str:
    first = generation.first_token_time
    after = "" if first is None else f", the first after {first - start:.3f} s"
    return f": {generation.num_prompt_tokens:,} prompt tokens, {generation.num_new_tokens:,} new{after}"
