"""The requests' callbacks: who hears of new tokens, and whose callback fails."""

import logging
from collections.abc import Sequence

from dcpmla.runtime.request import Request

_logger = logging.getLogger(__name__)


class Callbacks:
    """Calls of `Request.on_token`, after all requests have a step's tokens: a callback may abort any of them.

    One that raises may do so on this rank alone, while the other ranks are already at the next step. So its request
    goes on, untold, until the next step that is launched has told them; one that has ended by itself stays as it is.
    """

    def __init__(self) -> None:
        self._called: list[Request] = []  # since the last launch: any rank's callback may have failed

    def tell(self, texts: Sequence[tuple[Request, str]]) -> None:
        """Tell requests of their new tokens, with the text that these made certain."""
        self._called += [request for request, _ in texts]
        for request, text in texts:
            if request.on_token is None or request.error is not None:
                continue
            try:
                request.on_token(request, text)
            except Exception as error:
                request.error = error
                _logger.error("on_token of request %r failed", request.request_id, exc_info=error)

    def take(self) -> tuple[list[Request], list[bool]]:
        """Return who was told since the last call, and whose callback failed on this rank."""
        called, self._called = self._called, []
        return called, [request.error is not None for request in called]
