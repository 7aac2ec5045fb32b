"""Bodies of requests: their receipt, within limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from dcpmla.serving.connections import Limits
from dcpmla.serving.errors import ApiError
from dcpmla.serving.protocol import Body, parse


class Receiver:
    """The bodies of all requests that are being received or tokenized."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._num_bytes = limits, 0

    @asynccontextmanager
    async def body(self, request: Request, kind: type[Body]) -> AsyncIterator[Body]:
        """Receive and parse a body, which counts towards the total until the end of the block.

        Raises:
            ApiError: The body is too long, too slow or wrong, or the bodies of other requests leave no room.
        """
        content = bytearray()
        try:
            await self._receive(request, content)
            yield parse(kind, content)
        finally:
            self._num_bytes -= len(content)

    async def _receive(self, request: Request, content: bytearray) -> None:
        self._check_length(int(request.headers.get("content-length", 0)))
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    content += part
                    self._num_bytes += len(part)
                    self._check_length(len(content))
        except TimeoutError:
            raise ApiError(408, "the body takes too long", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise ApiError(400, "the body is not complete") from None

    def _check_length(self, length: int) -> None:
        """Raise ApiError for a body that is too long, or where all bodies together are."""
        if length > self._limits.body_bytes:
            raise ApiError(413, f"the body has more than {self._limits.body_bytes:,} bytes")
        if self._num_bytes > self._limits.total_bytes:
            words = f"requests that are being received have more than {self._limits.total_bytes:,} bytes; try again"
            raise ApiError(503, words, code="overloaded", headers={"Retry-After": "1"})
